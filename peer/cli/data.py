"""What `potluck data build` and `potluck data show` do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.node.open_run import ASSETS
from peer.ui.text import clean, size
from protocol.errors import UsageError
from protocol.run.corpus import CorpusIndex

SAMPLE_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What was typed; see `potluck data build --help`."""

    sources: Sequence[str]
    tokenizer: str
    sequence: int
    out: Path
    column: str
    split: str
    subset: str
    seed: int
    threads: int


async def build(options: BuildOptions, say: Callable[[str], None]) -> None:
    """`potluck data build`. Raises UsageError."""
    from peer.corpus import build as corpora
    from peer.corpus import sources
    from peer.net.disk import LocalDisk

    request = corpora.Request(
        sources=tuple(map(sources.parse, options.sources)),
        tokenizer=tokenizer_file(options.tokenizer),
        sequence=options.sequence,
        out=options.out,
        reading=sources.Reading(column=options.column, split=options.split, subset=options.subset),
        seed=options.seed,
        workers=options.threads,
    )
    stop = threading.Event()
    try:
        index = await asyncio.to_thread(corpora.build, request, LocalDisk(), say, stop)
    except asyncio.CancelledError:
        say("stopping; type the same command again to go on")
        raise
    finally:
        stop.set()
    for line in described(index, options.out):
        say(line)


def tokenizer_file(name: str) -> bytes:
    """The tokenizer's JSON file: a path, or the name of one that comes with Potluck. Raises UsageError."""
    path = Path(name)
    if not path.is_file() and path.name == name and (ASSETS / name).is_file():
        path = ASSETS / name
    try:
        return path.read_bytes()
    except OSError as error:
        shipped = ", ".join(sorted(found.name for found in ASSETS.glob("*.json")))
        raise UsageError(
            f"tokenizer {name}: {error.strerror}; give the tokenizer.json of your run, or the name of one that comes with Potluck"
            f" ({shipped})"
        ) from None


def show(folder: Path, say: Callable[[str], None]) -> None:
    """`potluck data show`. Raises UsageError."""
    from peer.corpus.reader import TOKENIZER, CorpusReader
    from peer.corpus.tokenizer import load_tokenizer
    from peer.net.disk import LocalDisk

    reader = CorpusReader(folder, LocalDisk())
    for line in described(reader.index, folder):
        say(line)
    missing = reader.missing()
    if missing:
        raise UsageError(
            f"corpus {folder}: {len(missing)} of its chunks are missing or cut off, such as {missing[0][:12]}…; get them again,"
            " or build the corpus again"
        )
    ids = reader.held_out(1)[0].tolist()
    tokenizer = load_tokenizer(folder / TOKENIZER, reader.index.tokenizer)
    say(f"a held-out sequence begins: {clean(tokenizer.decode(ids), SAMPLE_CHARACTERS)}")


def described(index: CorpusIndex, folder: Path) -> list[str]:
    """A corpus in lines for people."""
    chunks = f"{index.n_chunks} chunk{'' if index.n_chunks == 1 else 's'}"
    return [
        f"corpus {folder}: {index.digest}",
        f"source: {index.documents:,} documents, {size(index.text_bytes)} of text, {index.tokens:,} tokens",
        f"to train on: {index.sequences:,} sequences of {index.sequence} tokens in {chunks}, {size(index.sequences * index.stride)}",
        f"held out: {index.held_out_sequences:,} sequences, {index.bytes_per_token:.3f} bytes a token",
        f"tokenizer: {index.tokenizer}, {index.vocab_size:,} ids of {index.id_bytes} bytes; seed {index.seed}",
    ]
