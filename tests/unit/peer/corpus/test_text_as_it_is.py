"""Text is built to the byte, or refused with file, row and remedy: inputs as they come, after public bug reports."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from peer.cli.main import main
from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.corpus.tokenizer import TextEncoder, encode, end_of_text, parse_tokenizer, with_end
from peer.node.open_run import ASSETS
from protocol.errors import UsageError
from tests.support.texts import documents

RAW = (ASSETS / "sotu-4k.json").read_bytes()
BUILD = ["data", "build", "--tokenizer", "sotu-4k.json", "--sequence", "8", "--threads", "1"]
DOCUMENTS = ["one\r\ntwo", "<|endoftext|> é 😀", "NA", "42", 'a\tb "c", d\n']


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


JSONL = lines(*({"n": 1, "text": text} for text in DOCUMENTS))
CSV = b"n,text\n" + b"".join(b'1,"' + text.replace('"', '""').encode() + b'"\n' for text in DOCUMENTS)


def table(kind: pa.DataType, values: list[str] | None = None) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(DOCUMENTS if values is None else values).cast(kind)}), out)
    return out.getvalue()


def bad_parquet() -> bytes:
    texts, out = (
        pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")),
        io.BytesIO(),
    )
    pq.write_table(pa.table({"text": texts}), out)
    return out.getvalue()


def arrow(file: bool) -> bytes:
    made, out = pa.table({"text": DOCUMENTS}), io.BytesIO()
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(out, made.schema) as writer:
        writer.write_table(made)
    return out.getvalue()


RIGHT: list[tuple[str, bytes, list[str]]] = [
    ("a.jsonl", JSONL, DOCUMENTS),
    ("A.JSONL", JSONL, DOCUMENTS),
    ("a::b.jsonl", JSONL, DOCUMENTS),
    ("train[1]*?%20 -é.jsonl", JSONL, DOCUMENTS),
    ("crlf.jsonl", JSONL.replace(b"\n", b"\r\n"), DOCUMENTS),
    ("mark.jsonl", codecs.BOM_UTF8 + JSONL, DOCUMENTS),
    ("blank.jsonl", b"\n" + JSONL + b"\n \n", DOCUMENTS),
    ("no-end.jsonl", JSONL[:-1], DOCUMENTS),
    ("long.jsonl", lines({"text": "x" * 3_000_000}), ["x" * 3_000_000]),
    ("null.jsonl", lines({"text": None}, {"text": "a", "n": [1]}), ["", "a"]),
    ("numbers.jsonl", b'{"text":"a","n":' + b"9" * 5000 + b"}\n", ["a"]),
    ("lines.json", JSONL, DOCUMENTS),
    ("list.json", json.dumps([{"text": text} for text in DOCUMENTS]).encode(), DOCUMENTS),
    ("list.jsonl", json.dumps([{"text": text} for text in DOCUMENTS]).encode(), DOCUMENTS),
    ("pretty.json", json.dumps([{"text": text} for text in DOCUMENTS * 9000], indent=2).encode(), DOCUMENTS * 9000),
    ("a.csv", CSV, DOCUMENTS),
    ("mark.csv", codecs.BOM_UTF8 + b"text,n\na,1\n", ["a"]),
    ("a.tsv", b"n\ttext\n1\ta, b\n", ["a, b"]),
    ("none.csv", b"n,body\n", []),
    ("a.parquet", table(pa.string()), DOCUMENTS),
    ("large.parquet", table(pa.large_string()), DOCUMENTS),
    ("dictionary.parquet", table(pa.dictionary(pa.int32(), pa.string())), DOCUMENTS),
    ("none.parquet", table(pa.string(), []), []),
    ("a.parquet.gz", gzip.compress(table(pa.string())), DOCUMENTS),
    ("file.arrow", arrow(True), DOCUMENTS),
    ("stream.arrow", arrow(False), DOCUMENTS),
    ("a.jsonl.gz", gzip.compress(JSONL[:40]) + gzip.compress(JSONL[40:]), DOCUMENTS),
    ("a.jsonl.zst", zstandard.compress(JSONL[:40]) + zstandard.compress(JSONL[40:]), DOCUMENTS),
    ("a.jsonl.bz2", bz2.compress(JSONL), DOCUMENTS),
    ("a.jsonl.xz", lzma.compress(JSONL), DOCUMENTS),
    ("unsaid.jsonl", gzip.compress(JSONL), DOCUMENTS),
    ("a.txt", b"a\r\nb\0c\n", ["a\r\nb\0c\n"]),
    ("mark.txt", codecs.BOM_UTF8 + "é\n".encode(), ["é\n"]),
    ("a.txt.gz", gzip.compress(b"a\nb\n"), ["a\nb\n"]),
    ("no ending", b"a\nb\n", ["a\nb\n"]),
]  # fmt: skip


def read(path: Path, reading: Reading | None = None) -> list[str]:
    return documents(sources.units(sources.parse(str(path)), reading or Reading()))


@pytest.mark.parametrize(("name", "content", "expected"), RIGHT, ids=[name for name, _, _ in RIGHT])
def test_right_to_the_byte_alone_and_in_a_folder(
    name: str, content: bytes, expected: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "test" / "train"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    assert read(folder / name) == read(tmp_path / "test") == expected


BAD = [
    ("number.jsonl", lines({"text": "a"}, {"text": 42}), "row 2, line 2: column text has no text but a number"),
    ("list.jsonl", lines({"text": "a"}, {"text": ["a"]}), "row 2, line 2: column text has no text but a list"),
    ("bool.jsonl", lines({"text": "a"}, {"text": True}), "row 2, line 2: column text has no text but true or false"),
    ("object.jsonl", lines({"text": "a"}, {"text": {"a": 1}}), "row 2, line 2: column text has no text but an object"),
    ("nan.jsonl", b'{"text":"a"}\n\n{"text":NaN}\n', "row 2, line 3: column text has no text but a number"),
    ("twice.jsonl", b'{"text":"a"}\n{"text":"a","te\\u0078t":"b"}\n', "row 2, line 2: has the column text twice"),
    ("missing.jsonl", lines({"text": "a"}, {"body": "b"}), "row 2, line 2: has no column text; it has body"),
    ("half.jsonl", lines({"text": "a"}, {"text": "\ud83d"}), "row 2, line 2: column text has half a surrogate pair"),
    ("cut.jsonl", b'{"text":"a"}\n{"text":"b', "row 2, line 2: not JSON: "),
    ("deep.jsonl", b'{"text":"a"}\n' + b"[" * 200_000 + b"\n", "row 2, line 2: not JSON: too many brackets"),
    ("many.json", b'[{"text":"a"},\n\n {"text":42\n}]', "row 2, line 3: column text has no text but a number"),
    ("latin.jsonl", b'{"text":"a"}\n{"text":"\xe9"}\n', "row 2, line 2: not UTF-8 at byte 9 of the line"),
    ("fields.csv", b"n,text\n1,a\n2,b,c\n", "row 2, line 3: has 3 fields, the first line names 2 columns"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[name for name, _, _ in BAD])
def test_a_bad_row_is_named_or_left_out_and_counted(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read(path)
    assert str(error.value).startswith(f"source {path}: {said}")
    assert "; " in str(error.value)
    assert "--skip-bad-rows" in str(error.value)
    units = list(sources.units(sources.parse(str(path)), Reading(skip_bad_rows=True)))
    assert [piece for unit in units for piece in unit.pieces] == [b"a", b""]
    assert [(unit.left_out, unit.first_left_out.startswith(said)) for unit in units] == [(1, True)]


@pytest.mark.parametrize("given", [(), ("--tokenizer", "sotu-4k.json")], ids=["makes its tokenizer", "has one"])
def test_init_names_a_bad_row_and_how_a_corpus_is_built_without_it(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, said = BAD[0]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as end:
        main(["init", "my-run", name, *given])
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert told.startswith(f"potluck: source {name}: {said}")
    assert told.endswith("leave such rows out: potluck data build --skip-bad-rows, whose folder goes with --corpus\n")
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [name], "nothing half-written"


@pytest.mark.parametrize(
    ("options", "remedies"), [(("--column",), ["--column"]), ((), ["PUT --column", "PUT --skip-bad-rows"])]
)
@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[name for name, _, _ in BAD])
def test_an_error_names_no_option_that_the_command_has_not(
    name: str, content: bytes, said: str, options: tuple[str, ...], remedies: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        read(tmp_path / name, Reading(options=options, instead="" if options else "PUT {}"))
    told = str(error.value)
    assert told.startswith(f"source {tmp_path / name}: {said}")
    assert re.findall(r"(?:PUT )?--[a-z-]+", told) == [r for r in remedies if "column" not in r or "name one" in told]
    assert "mend or remove that row" in told or "name one with" in told


def write_set(folder: Path, *blocks: list[str]) -> None:
    """A data set of one file, which `datasets` reads in blocks of 10 MiB."""
    folder.mkdir()
    with open(folder / "a.jsonl", "w") as file:
        for block in blocks:
            file.write("\n".join(block) + "\n")


PLAIN = [json.dumps({"text": f'"{i}" é'}) for i in range(20)]
LONG = [json.dumps({"text": "x" * 10_000})] * 1_200


@pytest.mark.parametrize("before", [[], PLAIN, LONG], ids=["first", "later", "in a later block"])
@pytest.mark.parametrize("bad", ["42", '["a"]', '{"a": 1}', '"\\ud83d"'])
def test_a_row_of_a_hub_data_set_without_text_is_refused_and_changes_no_other(
    bad: str, before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "set", [*before, f'{{"text": {bad}}}', *PLAIN])
    for skip in (False, True):
        with pytest.raises(UsageError) as error:
            list(sources.units(sources.parse("hub:set@main"), Reading(skip_bad_rows=skip)))
        told = str(error.value)
        assert told.startswith("source hub:set@main: near row ")
        assert "hf download set --repo-type dataset --revision main --local-dir DIR" in told
        assert "\n" not in told


def test_a_hub_data_set_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "set", LONG, PLAIN, ['{"text": null}'])
    found = list(sources.units(sources.parse("hub:set@main"), Reading()))
    assert documents(found) == [json.loads(row)["text"] for row in LONG + PLAIN] + [""]


REFUSED = [
    ("utf16.txt", "a text".encode("utf-16"), "is UTF-16, not UTF-8; convert it"),
    ("utf16le.txt", "a longer text".encode("utf-16-le"), "is UTF-16LE, not UTF-8; convert it"),
    ("utf16.jsonl", JSONL.decode().encode("utf-16"), "is UTF-16, not UTF-8; convert it"),
    ("latin.txt", b"caf\xe9 ", "not UTF-8 at byte 3; convert it"),
    ("far.txt", b"fine\n" * 300_000 + b"\xe9t\xe9", "not UTF-8 at byte 1500000; convert it"),
    ("cut.txt", b"cut \xc3", "not UTF-8 at byte 4; convert it"),
    ("column.jsonl", lines({"body": "a", "n": 1}), "has no column text; it has body, n: name one with --column"),
    ("none.jsonl.gz", b"no gzip", "not whole gzip after byte 0 of its text: "),
    ("utf8.parquet", bad_parquet(), "row 2: column text is not UTF-8 at its byte 0; mend or remove that row"),
    ("latin.csv", b"text\ncaf\xe9 \n", "not UTF-8 at byte 8; convert it"),
    ("cut.jsonl.gz", gzip.compress(JSONL)[:-9], "not whole gzip after byte"),
    ("cut.jsonl.zst", zstandard.compress(JSONL)[:-3], "not whole zstandard after byte"),
    ("cut.jsonl.xz", lzma.compress(JSONL)[:-9], "not whole xz after byte"),
    ("cut.parquet", table(pa.string())[:-9], "it must be whole parquet: get it again"),
    ("number.parquet", table(pa.int64(), ["1"]), "row 1: column text has no text but int64"),
    ("bytes.parquet", table(pa.binary()), "row 1: column text has no text but binary"),
    ("quote.csv", b'n,text\n1,"a\n2,b\n', "row 1, line 2: not CSV: unexpected end of data; mend"),
    ("column.csv", b"n;text\n1;a\n", "has no column text; its first line names n;text: name one with --column"),
    ("two.csv", b"text,text\na,b\n", "has the column text more than once"),
    ("cut.json", b'[{"text":"a"}, {"text":', "row 2, line 1: not JSON: "),
    ("behind.json", b'[{"text":"a"}] x', "line 1: not JSON: there is more behind its list"),
]


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_refused_with_the_file_and_nothing_half_written(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in" / name, tmp_path / "out"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        main([*BUILD, str(path.parent), "--out", str(out)])
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert told.startswith(f"potluck: source {path}: ")
    assert said in told
    assert told.count("\n") == 1
    assert not out.exists()


def test_each_file_of_a_folder_is_read_or_named(tmp_path: Path) -> None:
    for name in ("train-1.txt", "b/test.md", "b/x.jsonl/valid", ".hidden", "empty.txt", "photo.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(
            b"\xff\xd8\xff" if name == "photo.jpg" else b"" if name == "empty.txt" else b"a\nb\n"
        )
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    source = sources.parse(str(tmp_path))
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in source.files] == [
        "b/test.md",
        "b/x.jsonl/valid",
        "train-1.txt",
    ]
    assert read(tmp_path) == ["a\nb\n"] * 3
    assert {Path(o.path).name: o.reason.partition(",")[0] for o in source.left_out} == {
        ".hidden": "hidden", "empty.txt": "empty", "photo.jpg": "not text", "loop": "a link to a folder above it",
        "gone": "a link to nothing",
    }  # fmt: skip
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="has no file to read: 0 left out; name a folder that has text"):
        read(tmp_path / "none")


def test_a_report_counts_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(*[{"text": "We the people."}] * 50, {"text": 1}, {"text": None}))
    (tmp_path / "in" / ".x").touch()
    with pytest.raises(SystemExit) as end:
        main([*BUILD, str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--skip-bad-rows"])
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.startswith(f"reads {tmp_path}/in/a.jsonl: JSON lines, a document a row, column text (string)")
    assert f"leaves out {tmp_path}/in/.x: hidden" in said
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    (file,) = report["files"]
    assert (file["documents"], file["without_text"], file["left_out"]) == (50, 1, 1)
    assert file["first_left_out"].startswith("row 51, line 51: ")


# --- text never becomes a special id


def sentencepiece() -> Tokenizer:
    """Like Llama 2's: control tokens in the vocabulary, a space before each text, tokens for bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a"]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    """Like T5's: its model has the special tokens as pieces that text may match."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), *((c, -4.0) for c in "</s>ab")]
    made = Tokenizer(models.Unigram(pieces, 0, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    return made


def unflagged() -> Tokenizer:
    """Its end of text is an added token that is not marked as special."""
    plain = json.loads(RAW)
    plain["added_tokens"][0]["special"] = False
    return Tokenizer.from_str(json.dumps(plain))


@pytest.mark.parametrize("make", [sentencepiece, unigram, unflagged], ids=lambda make: make.__name__)
def test_text_never_becomes_a_special_id(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    encoder = TextEncoder(tokenizer)
    text = "a</s>a" if make is not unflagged else "a<|endoftext|><|endoftext|>b"
    ids = encoder.ids(text)
    assert encoder.end is not None
    assert not {encoder.end, *(tokenizer.token_to_id(name) for name in ("<s>", "<unk>"))} & set(ids)
    assert tokenizer.decode(ids) == text
    (whole,) = encode(encoder, [text.encode()], [True], True)
    assert whole == [*ids, encoder.end]


def test_the_parts_of_a_long_document_have_no_space_between_them() -> None:
    tokenizer = sentencepiece()
    found = encode(TextEncoder(tokenizer), [b"a a", b"a", b"a"], [False, True, True], True)
    assert [tokenizer.decode(found[0] + found[1]), tokenizer.decode(found[2])] == ["a aa", "a"]
    assert encode(TextEncoder(tokenizer), [b"a"], [True], False)[0][0] == tokenizer.token_to_id("a")


def test_an_end_of_another_name_is_given_with_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = RAW.replace(b"<|endoftext|>", b"[SEP]")
    assert end_of_text(parse_tokenizer(plain, "t")) is None
    (tmp_path / "t.json").write_bytes(plain)
    (tmp_path / "a.txt").write_text("We the people [SEP] of this town.\n" * 200)
    typed = [
        "data",
        "build",
        tmp_path / "a.txt",
        "--tokenizer",
        tmp_path / "t.json",
        "--sequence",
        "8",
        "--threads",
        "1",
    ]
    for more, code, said in (
        (["--out", tmp_path / "x"], 0, "tokenizer: has no end of text that is known here, so documents run together; "),
        (["--out", tmp_path / "y", "--end", "[SEP]"], 0, "of which 0 ends a document"),
        (["--out", tmp_path / "z", "--end", "[END]"], 2, "--end [END]: the tokenizer has no such token; "),
    ):
        with pytest.raises(SystemExit) as end:
            main([*map(str, [*typed, *more])])
        told = capsys.readouterr()
        assert (end.value.code or 0) == code
        assert any(said in line for line in (told.out + told.err).splitlines())
    made = parse_tokenizer((tmp_path / "y" / "tokenizer.json").read_bytes(), "t")
    assert end_of_text(made) == 0
    assert made.encode("We the people").ids == parse_tokenizer(plain, "t").encode("We the people").ids
    assert with_end(with_end(plain, "[SEP]"), "[SEP]") == with_end(plain, "[SEP]")
