"""The run's tokenizer, from its file."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from protocol.errors import UsageError, first_line, os_errors

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


def read_tokenizer(source: Path | bytes, digest: str) -> bytes:
    """A tokenizer's JSON file, or its bytes, whose sha256 must be the manifest's `digest`. Raises UsageError."""
    name = "tokenizer" if isinstance(source, bytes) else f"tokenizer {source}"
    with os_errors(name, "put the run's tokenizer.json there"):
        raw = source if isinstance(source, bytes) else source.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != digest:
        raise UsageError(
            f"{name}: its digest is {found[:12]}…, the manifest says {digest[:12]}…; use the run's own tokenizer.json"
        )
    return raw


def load_tokenizer(source: Path | bytes, digest: str) -> Tokenizer:
    """The tokenizer in `read_tokenizer`, of our own: it may take any time and memory. Raises UsageError."""
    return parse_tokenizer(read_tokenizer(source, digest), "tokenizer" if isinstance(source, bytes) else str(source))


def parse_tokenizer(raw: bytes, name: str) -> Tokenizer:
    """The tokenizer in a JSON file's bytes; `name` names it in errors. Raises UsageError."""
    try:
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(
            f"{name}: not a tokenizer: {first_line(error)}; use a tokenizer.json of `tokenizers`"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Returns the id that ends a document: the one between two texts in the file (`with_end`), or a usual name's."""
    processor = tokenizer.post_processor
    said = json.loads(processor.__getstate__()) if processor is not None else {}
    pair: list[Any] = (
        said.get("pair", []) if said.get("type") == "TemplateProcessing" and len(said["single"]) == 1 else []
    )
    if len(pair) == 3 and "SpecialToken" in pair[1]:
        found: int | None = tokenizer.token_to_id(pair[1]["SpecialToken"]["id"])
        return found
    return next((i for i in map(tokenizer.token_to_id, END_OF_TEXT) if i is not None), None)


def with_end(raw: bytes, token: str) -> bytes:
    """Returns the tokenizer's file with `token` as what ends a document, written as the template of a pair of texts.

    The ids of a single text stay the same. Raises UsageError.
    """
    tokenizer = parse_tokenizer(raw, "tokenizer")
    number = tokenizer.token_to_id(token)
    if number is None:
        raise UsageError(
            f"--end {token}: the tokenizer has no such token; name one that it has, such as"
            f" {', '.join(specials(tokenizer)) or 'none'}"
        )
    tokenizer.post_processor = TemplateProcessing(
        single="$A", pair=["$A", token, "$B"], special_tokens=[(token, number)]
    )
    return str(tokenizer.to_str()).encode()


def specials(tokenizer: Tokenizer) -> list[str]:
    """The special tokens, in the order of their ids, at most twelve."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [token.content for _, token in added if token.special][:12]


class TextEncoder:
    """Turns text into ids; no text becomes a special token, nor the one that ends a document.

    In a copy of the tokenizer these tokens have names that no text has, and pieces that continue a document get no
    space before them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end = end_of_text(tokenizer)
        plain = json.loads(tokenizer.to_str())
        _rename(plain, _special_names(plain, None if self.end is None else tokenizer.id_to_token(self.end)))
        self._first = Tokenizer.from_str(json.dumps(plain))
        has_prefix = _without_prefix(plain)
        self._later = Tokenizer.from_str(json.dumps(plain)) if has_prefix else self._first

    def ids(self, text: str) -> list[int]:
        """Of the beginning of a document."""
        found: list[int] = self._first.encode(text, add_special_tokens=False).ids
        return found

    def pieces(self, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
        """Of each piece; `begins`: whether it begins a document."""
        found: list[list[int]] = [[] for _ in texts]
        for encoder, wanted in ((self._first, True), (self._later, False)):
            at = [i for i, first in enumerate(begins) if first is wanted]
            for i, encoding in zip(
                at, encoder.encode_batch_fast([texts[i] for i in at], add_special_tokens=False), strict=True
            ):
                found[i] = encoding.ids
        return found


class Encoder(Protocol):
    """A TextEncoder, here or in a process of its own (peer/corpus/tokenizer_process.py)."""

    @property
    def end(self) -> int | None: ...

    def pieces(self, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]: ...


def encode(encoder: Encoder, pieces: Sequence[bytes], ends: Sequence[bool], begins: bool) -> list[list[int]]:
    """Returns the ids of each piece of a unit, with the end-of-text token, if there is one, behind each document.

    An empty document has no ids. `begins`: whether the first piece begins a document.
    """
    tail = [] if encoder.end is None else [encoder.end]
    found = encoder.pieces([piece.decode() for piece in pieces], [begins, *ends][: len(pieces)])
    return [ids + tail if piece and last else ids for ids, piece, last in zip(found, pieces, ends, strict=True)]


def _special_names(plain: dict[str, Any], end: str | None) -> set[str]:
    names = {token["content"] for token in plain["added_tokens"] if token["special"]}
    names |= {name for name in (end, plain["model"].get("unk_token")) if name}
    if isinstance(unknown := plain["model"].get("unk_id"), int):
        names.add(plain["model"]["vocab"][unknown][0])
    processor = plain["post_processor"] or {}
    names |= set(processor.get("special_tokens") or {}) if processor.get("type") == "TemplateProcessing" else set()
    return names | {processor[role][0] for role in ("sep", "cls") if role in processor}


def _rename(plain: dict[str, Any], names: set[str]) -> None:
    """Gives these tokens names that no text has; they keep their ids."""
    salt = secrets.token_hex(16)
    new = {name: f"\0{salt} {number}" for number, name in enumerate(sorted(names))}
    model = plain["model"]
    plain["post_processor"] = None
    for token in plain["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(name, name): number for name, number in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = new[model["unk_token"]]
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        model["merges"] = [merge for merge, (a, b) in pairs if not names & {a, b, a + b}]


def _without_prefix(plain: dict[str, Any]) -> bool:
    """Takes out what puts a space before a text; whether there was such."""
    found = False
    for part in (plain["normalizer"], plain["pre_tokenizer"]):
        for step in (part or {}).get("normalizers") or (part or {}).get("pretokenizers") or [part or {}]:
            if step.get("prepend"):
                step["prepend"], found = "", True
            if step.get("add_prefix_space"):
                step["add_prefix_space"], found = False, True
            if step.get("prepend_scheme", "never") != "never":
                step["prepend_scheme"], found = "never", True
    return found


def vocabulary(tokenizer: Tokenizer) -> int:
    """All ids are smaller than this."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


_BAD = "\ufffd"
"""What the library writes for bytes that are not UTF-8, or not yet."""
_LONGEST = 4
"""Bytes of a character: so many tokens may share one."""
_CONTEXT = 8
"""Ids before the first one that say how it is written: some tokenizers drop a text's first space."""


class Decodes(Protocol):
    """A tokenizer, here or in a process of its own (peer/corpus/tokenizer_process.py)."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class Decoder:
    """Decodes the ids that come after `before`, as soon as each character's bytes are there.

    Ids are decoded together until none is in the middle of a character. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Decodes, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before = list(before[-_CONTEXT:])
        self._pending: list[int] = []
        self._written = 0

    def add(self, new: int) -> str:
        """The text that is known now and was not before `new`."""
        self._pending.append(new)
        text = self._text()
        bad = len(text) - len(text.rstrip(_BAD))
        if bad and len(self._pending) >= _LONGEST:  # only the last of them can still become a character
            bad = min(bad, _LONGEST - 1)
        return self._write(text, len(text) - bad)

    def rest(self) -> str:
        """Returns the withheld text at the end of the ids."""
        text = self._text()
        return self._write(text, len(text))

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._pending)[len(decode(self._before)) :]

    def _write(self, text: str, end: int) -> str:
        found = text[self._written : end]
        self._written = max(self._written, end)
        if end == len(text):
            self._before, self._pending, self._written = self._pending, [], 0
        return found
