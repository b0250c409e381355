"""Tokenizers of a run that are hostile: what they cost is bounded, and the process that asks lives on."""

from __future__ import annotations

import json
import resource
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from peer.corpus import tokenizer_process
from peer.corpus.tokenizer import TextEncoder, parse_tokenizer
from peer.corpus.tokenizer_process import TokenizerProcess
from peer.node.evaluating import decoded
from peer.node.open_run import ASSETS
from protocol.errors import UsageError

SOTU = (ASSETS / "sotu-4k.json").read_bytes()
TEXT = "The state of the Union is  strong,\n\tGröße 😀 12345.\n"


def doubling(times: int, long: int = 0) -> bytes:
    """Each of its decoder's steps doubles the text. long: characters of each token."""
    made = Tokenizer(models.WordLevel({f"{'a' * long}{i}a": i for i in range(64)}, "0a"))
    made.decoder = decoders.Sequence([decoders.Replace("a", "aa") for _ in range(times)])
    return made.to_str().encode()


def catastrophic() -> bytes:
    """A pattern that backtracks without end."""
    plain = json.loads(SOTU)
    split = {"type": "Split", "pattern": {"Regex": "(e+)+!"}, "behavior": "Isolated", "invert": False}
    plain["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, plain["pre_tokenizer"]]}
    return json.dumps(plain).encode()


def growing_input() -> bytes:
    """A normalizer that doubles the text."""
    plain = json.loads(SOTU)
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    plain["normalizer"] = {"type": "Sequence", "normalizers": [step] * 40}
    return json.dumps(plain).encode()


def bytes_of_llama() -> Tokenizer:
    """As SentencePiece makes them, with byte fallback."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {"▁": 259, "t": 260, "h": 261, "th": 262}
    made = Tokenizer(models.BPE(vocabulary, [("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def bpe_of_gpt_4() -> Tokenizer:
    """Bytes behind the pattern of GPT-4 and Llama 3."""
    made = Tokenizer.from_str(SOTU.decode())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    from tokenizers import Regex

    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return made


COMMON = {"sotu": Tokenizer.from_str(SOTU.decode()), "llama": bytes_of_llama(), "gpt-4": bpe_of_gpt_4()}


@pytest.mark.parametrize("name", COMMON)
def test_a_usual_tokenizer_says_the_same_in_its_process(name: str) -> None:
    here = parse_tokenizer(COMMON[name].to_str().encode(), "t")
    encoder = TextEncoder(here)
    with TokenizerProcess(COMMON[name].to_str().encode()) as there:
        assert there.end == encoder.end
        assert there.vocabulary == max(here.get_vocab().values()) + 1
        ids = there.ids(TEXT)
        assert ids == encoder.ids(TEXT)
        assert there.decode(ids) == here.decode(ids) != ""
        assert there.pieces([TEXT, TEXT], [True, False]) == encoder.pieces([TEXT, TEXT], [True, False])


def used() -> float:
    """Processor seconds of all children that have ended, and of this process."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.mark.parametrize("raw", [doubling(20), doubling(60), doubling(14, long=2000)], ids=["20", "60", "long"])
async def test_a_decoder_that_doubles_costs_little(raw: bytes) -> None:
    before, most = used(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with pytest.raises(UsageError, match=r"^tokenizer: .*; use another"):
        await decoded(raw, list(range(16)), list(range(64)))
    assert used() - before < tokenizer_process.DECODING_SECONDS + 5
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < 1 << 30 or peak == most, "no child has had more, but for one of another test"


@pytest.mark.parametrize("raw", [catastrophic(), growing_input()], ids=["pattern", "normalizer"])
def test_encoding_ends(raw: bytes) -> None:
    before = used()
    with (
        TokenizerProcess(raw) as there,
        pytest.raises(UsageError, match=r"to use it takes more time or memory|use another"),
    ):
        there.ids("e" * 4_000 + " !")
    assert used() - before < tokenizer_process.ENCODING_SECONDS + 5


BAD = {
    "nothing": b"",
    "no json": b"{",
    "nested": b'{"decoder": ' + b"[" * 100_000,
    "not a tokenizer": b"[]",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_tokenizer_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"^tokenizer: [^\n]*$"), TokenizerProcess(BAD[name]) as there:
        _ = there.end


def test_what_the_library_gives_up_on_is_an_error_like_others() -> None:
    """A panic of the library is no Exception of Python's."""
    with TokenizerProcess(SOTU) as there:
        for ids in ([-1], [2**40], ["x"]):
            with pytest.raises(UsageError, match=r"^tokenizer: [^\n]*$"):
                there.decode(ids)  # type: ignore[arg-type]
        assert there.decode(there.ids(TEXT)) == TEXT
