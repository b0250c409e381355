"""`potluck data`: builds the corpus of a run, and shows it."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.cli import running
from peer.cli.options import coroutine, group, with_options
from peer.node.open_run import ASSETS
from peer.ui.text import clean, number, size
from protocol.errors import UsageError
from protocol.run.corpus import TOKENIZER, CorpusIndex

if TYPE_CHECKING:
    from peer.corpus.build import Request
    from peer.corpus.tokenizer_process import TokenizerProcess

SAMPLE_CHARACTERS = 160

app = group()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `potluck data build`."""

    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files (.parquet, .jsonl, .csv; any other: UTF-8 text), folders of such files,"
            " hub:OWNER/NAME@REVISION, or sotu, the text that comes with Potluck.",
        ),
    ]
    tokenizer: Annotated[
        str, typer.Option(help="JSON file of the run's tokenizer, or the name of one that comes with Potluck.")
    ]
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence: the manifest's train.sequence.")]
    out: Annotated[Path, typer.Option(help="Folder for the corpus; a build that was interrupted there is continued.")]
    column: Annotated[str, typer.Option(help="Column with the text.")] = "text"
    split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train"
    subset: Annotated[str, typer.Option(help="Subset (configuration) of a hub data set that has several.")] = ""
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out and count rows that cannot be read, instead of an error.")
    ] = False
    end: Annotated[
        str,
        typer.Option(metavar="TOKEN", help="The tokenizer's token that ends a document (default: its usual names)."),
    ] = ""
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order and of the held-out part.")] = 0
    threads: Annotated[int, typer.Option(min=1, help="Processes that tokenize.")] = os.cpu_count() or 1


async def _build(options: BuildOptions) -> None:
    from peer.corpus import sources
    from peer.corpus.build import Request
    from peer.corpus.rows import Reading
    from peer.corpus.tokenizer import with_end

    tokenizer = tokenizer_file(options.tokenizer)
    request = Request(
        sources=tuple(map(sources.parse, options.sources)),
        tokenizer=with_end(tokenizer, options.end) if options.end else tokenizer,
        sequence=options.sequence,
        out=options.out,
        reading=Reading(
            column=options.column, split=options.split, subset=options.subset, skip_bad_rows=options.skip_bad_rows
        ),
        seed=options.seed,
        workers=options.threads,
    )
    for line in described(await build_corpus(request), options.out):
        print(line)


app.command(
    "build",
    help="Tokenize and shuffle text into a corpus, which one digest names. Killed or stopped, it goes on where it was.",
    epilog="Example: potluck data build text/*.parquet --tokenizer tokenizer.json --sequence 1024 --out corpus",
)(with_options(BuildOptions, lambda options, _: running.run(_build(options), interrupted=1)))


async def build_corpus(request: Request) -> CorpusIndex:
    """Builds a corpus in a thread, which ends with this task. Raises UsageError."""
    from peer.corpus.build import build
    from peer.net.disk import Disk

    def say(line: str) -> None:
        print(line, flush=True)

    stop = threading.Event()
    try:
        return await asyncio.to_thread(build, request, Disk(), say, stop)
    except asyncio.CancelledError:
        say("stopping; type the same command again to go on")
        raise
    finally:
        stop.set()


def tokenizer_file(name: str) -> bytes:
    """Reads a tokenizer's JSON file: a path, or the name of one that comes with Potluck. Raises UsageError."""
    path = Path(name)
    if not path.is_file() and path.name == name and (ASSETS / name).is_file():
        path = ASSETS / name
    try:
        return path.read_bytes()
    except OSError as error:
        shipped = ", ".join(sorted(found.name for found in ASSETS.glob("*.json")))
        raise UsageError(
            f"tokenizer {name}: {error.strerror}; give the tokenizer.json of your run, or the name of one that comes"
            f" with Potluck ({shipped})"
        ) from None


@app.command("show", epilog="Example: potluck data show corpus")
@coroutine
async def show(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a corpus.")]) -> None:
    """Show a corpus: its digest, what it was made of, and how its text looks."""
    from peer.corpus.text import CorpusReader
    from peer.net.disk import Disk

    reader = CorpusReader(folder, Disk())
    for line in described(reader.index, folder):
        print(line)
    reader.require_whole(f"corpus {folder}")
    ids = reader.held_out(1)[0].tolist()
    with _tokenizer(folder, reader.index) as tokenizer:
        print(f"a held-out sequence begins: {clean(tokenizer.decode(ids), SAMPLE_CHARACTERS)}")


def _tokenizer(folder: Path, index: CorpusIndex) -> TokenizerProcess:
    """A corpus's tokenizer. Raises UsageError."""
    from peer.corpus.tokenizer import read_tokenizer
    from peer.corpus.tokenizer_process import TokenizerProcess

    return TokenizerProcess(read_tokenizer(folder / TOKENIZER, index.tokenizer), f"tokenizer {folder / TOKENIZER}")


def described(index: CorpusIndex, folder: Path) -> list[str]:
    """A corpus as text. Raises UsageError if its tokenizer is missing."""
    with _tokenizer(folder, index) as tokenizer:
        end = tokenizer.end
    ends = "none of which ends" if end is None else f"of which {end} ends"
    chunks, bytes = number(index.n_chunks, "chunk"), size(index.sequences * index.stride)
    return [
        f"corpus {folder}: {index.digest}",
        f"source: {index.documents:,} documents, {size(index.text_bytes)} of text, {index.tokens:,} tokens",
        f"to train on: {index.sequences:,} sequences of {index.sequence} tokens in {chunks}, {bytes}",
        f"held out: {index.held_out_sequences:,} sequences, {index.bytes_per_token:.3f} bytes a token",
        f"tokenizer: {index.tokenizer}, {index.vocab_size:,} ids of {index.id_bytes} bytes, {ends} a document; seed"
        f" {index.seed}",
    ]
