"""Ids to text and text to windows: no character is cut, no token is left out or predicted twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.corpus.tokenizer import Decoder, TextEncoder, parse_tokenizer
from peer.corpus.tokenizing import ROWS, Read, windows
from peer.node.open_run import ASSETS
from peer.ui.text import harmless

TOKENIZER = parse_tokenizer((ASSETS / "sotu-4k.json").read_bytes(), "tokenizer")
END = TOKENIZER.token_to_id("<|endoftext|>")


def with_bytes() -> Tokenizer:
    """One that has tokens for bytes and for words, as SentencePiece makes them."""
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


FALLBACK = with_bytes()


def streamed(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    decoder = Decoder(tokenizer, before)
    return [*map(decoder.add, ids), decoder.rest()]


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60))
def test_the_pieces_of_any_ids_are_their_text(ids: list[int]) -> None:
    assert "".join(streamed(TOKENIZER, ids)) == TOKENIZER.decode(ids)


@given(st.text(max_size=40), st.sampled_from([TOKENIZER, FALLBACK]))
def test_a_character_comes_out_whole_as_soon_as_it_is_there(text: str, tokenizer: Tokenizer) -> None:
    ids = [3 + byte for byte in text.encode()] if tokenizer is FALLBACK else tokenizer.encode(text).ids
    pieces = streamed(tokenizer, ids, [1] if tokenizer is FALLBACK else [END])
    assert "".join(pieces) == text
    if tokenizer is FALLBACK and "\ufffd" not in text:
        ends = np.cumsum([len(c.encode()) for c in text]).tolist()
        assert [at + 1 for at, piece in enumerate(pieces) if piece] == ends
        assert pieces[-1] == ""


def test_what_is_no_utf8_is_shown_as_such_and_holds_nothing_up() -> None:
    ids = [3 + byte for byte in b"\xe2\x82"]
    assert streamed(FALLBACK, [1, *ids, 2]) == ["a", "", "", "\ufffd\ufffdb", ""]
    assert "".join(streamed(FALLBACK, [1, *ids])) == "a\ufffd\ufffd"
    pieces = streamed(FALLBACK, [3 + 0xFF] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert len(pieces[-1]) <= 3


def test_spaces_between_words_stay() -> None:
    assert streamed(FALLBACK, [1, 1, 2], before=[1]) == [" a", " a", "b", ""]
    assert streamed(FALLBACK, [1, 1, 2]) == ["a", " a", "b", ""]


def test_what_steers_a_terminal_is_not_shown() -> None:
    assert harmless("a\x1b[2J\x07\r\n\tb\u202ec\x9b\u200bé€😀\x00") == "a [2J  \n\tb c  é€😀 "


# --- windows


def rows(
    texts: dict[str, str], folder: Path, length: int, tokenizer: Tokenizer = TOKENIZER
) -> tuple[list[np.ndarray], Read]:
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    read = Read()
    found = [sources.parse(str(folder / name)) for name in texts]
    return list(windows(found, Reading(), TextEncoder(tokenizer), length, read)), read


@pytest.mark.parametrize("length", [1, 7, 64, 5000])
def test_each_token_is_predicted_once_from_those_before_it_in_its_window(tmp_path: Path, length: int) -> None:
    first, second, third = "The state of the Union. " * 40, "Größe 😀\n" * 30, "A third one."
    lines = "".join(json.dumps({"text": text}) + "\n" for text in (second, "", third))
    found, read = rows({"a.txt": first, "b.jsonl": lines}, tmp_path, length)
    expected = [END]
    for text in (first, second, third):
        expected += [*TOKENIZER.encode(text).ids, END]
    assert np.concatenate([part[:, 1:].reshape(-1) for part in found]).tolist() == expected[1:]
    assert np.concatenate([part[:, :-1].reshape(-1) for part in found]).tolist() == expected[:-1]
    assert all(part.shape[1] == length + 1 and len(part) <= ROWS for part in found[:-1])
    assert found[-1].shape[1] <= length + 1
    assert read.text_bytes == len((first + second + third).encode())
    assert read.documents == 4


def test_without_an_end_of_text_nothing_foretells_the_first_token(tmp_path: Path) -> None:
    plain = json.loads(TOKENIZER.to_str())
    plain["added_tokens"] = []
    del plain["model"]["vocab"]["<|endoftext|>"]
    without = parse_tokenizer(json.dumps(plain).encode(), "tokenizer")
    found, _ = rows({"a.txt": "The state of the Union."}, tmp_path, 3, without)
    ids = without.encode("The state of the Union.").ids
    assert np.concatenate([part[:, 1:].reshape(-1) for part in found]).tolist() == ids[1:]


def test_no_text_gives_no_window(tmp_path: Path) -> None:
    assert rows({"a.txt": "", "b.jsonl": ""}, tmp_path, 4)[0] == []
