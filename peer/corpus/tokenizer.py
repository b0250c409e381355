"""The run's tokenizer, from its file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from protocol.errors import UsageError, apart
from protocol.run.layout import ModelSpec

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


def load_tokenizer(source: Path | bytes, digest: str) -> Tokenizer:
    """The tokenizer in a JSON file (or its bytes), whose sha256 must be the manifest's `digest`. Raises UsageError."""
    name = "tokenizer" if isinstance(source, bytes) else f"tokenizer {source}"
    try:
        raw = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; put the run's tokenizer.json there") from None
    found = hashlib.sha256(raw).hexdigest()
    if found != digest:
        has, wanted = apart(found, digest)
        raise UsageError(f"{name}: its digest is {has}, the manifest says {wanted}; use the run's own tokenizer.json")
    return parse_tokenizer(raw, name)


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
    """The id that ends a document, if the tokenizer has one."""
    return next((i for i in map(tokenizer.token_to_id, END_OF_TEXT) if i is not None), None)


def check_document_end(model: ModelSpec, raw: bytes) -> None:
    """Raises UsageError where the model looks for the ends of documents, and the text made with the tokenizer in these bytes has others, or none."""
    said = model.document_end_id
    if said < 0:
        return
    end = end_of_text(parse_tokenizer(raw, "tokenizer"))
    if said == end:
        return
    what, remedy = (
        ("no id", "leave it out") if end is None else (f"id {end}", f"write {end} under [model], or leave it out")
    )
    raise UsageError(
        f"manifest: document_end_id is {said}, but the run's tokenizer ends documents with {what}; {remedy}"
    )


def vocabulary(tokenizer: Tokenizer) -> int:
    """All ids are smaller than this."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def first_line(error: BaseException) -> str:
    """An exception's first line, short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
