"""`potluck eval`: how well the model of a run foretells given text, and its marks in lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.trained import Checkpoints, Choice, Round, Where, replayed, trained
from peer.net import children
from peer.net.disk import LocalDisk
from peer.node.open_run import is_run
from peer.ui.text import count, size
from protocol.errors import LocalError, UsageError

_MOST_LOSS = 700.0
"""Nats a token; beyond, the perplexity is no number."""


def evaluate(
    where: Where = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Files with text: .parquet, .jsonl, .csv; any other: UTF-8 text.",
            show_default=False,
        ),
    ] = None,
    round: Round = None,
    checkpoint: Checkpoints = None,
    column: Annotated[str, typer.Option(help="Column with the text, in files that have columns.")] = "text",
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Not files, but these tasks of lm-evaluation-harness, if it is installed.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/guides/model.md).")] = False,
) -> None:
    """`potluck eval`."""
    named = list(files or ())
    if where is not None and not is_run(where):
        named.insert(0, where)  # it is the first of the files
        where = None
    with running.reporting():
        if not named and tasks is None:
            raise UsageError("potluck eval: no text; name files, or tasks with --tasks")
        choice = Choice.typed(where, round, checkpoint)
    work = _files(choice, named, column, json) if tasks is None else _tasks(choice, tasks, bool(named or json))
    running.run(work, interrupted=1)


async def _files(choice: Choice, files: Sequence[str], column: str, json: bool) -> None:
    """Loss, perplexity and bits per byte, as peer/corpus/windows.py defines them. Raises UsageError, LocalError, RemoteError."""
    import json as jsons

    from peer.corpus import sources
    from peer.corpus.windows import Read, windows
    from peer.training import inference

    found = [sources.parse(name) for name in files]
    for source in found:
        if source.kind in ("folder", "hub"):
            raise UsageError(f"source {source}: is not a file; name files")
    sources.forbid_the_hub(found)
    model = await trained(choice)
    read, nats, tokens = Read(), 0.0, 0
    reading = sources.Reading(column=column, options=("--column",))
    for ids in windows(found, reading, model.tokenizer, model.window, read):
        nats += inference.nats(model.stage, ids)
        tokens += ids[:, 1:].size
        await asyncio.sleep(0)  # here Ctrl-C ends it
    if not tokens:
        raise UsageError("files: have no text; name some that have, or their column with --column")
    loss = nats / tokens
    if not loss < _MOST_LOSS:
        raise LocalError(f"model: its loss is {loss}; the run has diverged, give an earlier --round")
    result = {
        "run": model.name,
        "round": model.round,
        "documents": read.documents,
        "tokens": tokens,
        "bytes": read.text_bytes,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": nats / (math.log(2) * read.text_bytes),
    }
    if json:
        print(jsons.dumps(result), flush=True)
        return
    print(f"{model}")
    print(
        f"{count(range(read.documents), 'document')}, {size(read.text_bytes)} ({read.text_bytes:,} bytes), {tokens:,} tokens,"
        f" in sequences of {model.window}"
    )
    print(
        f"loss {loss:.4f} nats per token, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per byte",
        flush=True,
    )


async def _tasks(choice: Choice, tasks: str, with_more: bool) -> None:
    """Runs lm-evaluation-harness' own command on an export. Raises UsageError, LocalError, RemoteError."""
    from peer.log import export

    if with_more:
        raise UsageError("--tasks: goes without files and --json; leave them out")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--tasks: lm-evaluation-harness is not installed here; type pip install 'lm_eval[hf]', or name files instead"
        )
    with tempfile.TemporaryDirectory(prefix="potluck-eval-") as name:
        folder = Path(name) / "model"
        if choice.exported is not None:
            try:
                folder.symlink_to(choice.exported.resolve())
            except OSError:  # a disk without symbolic links
                shutil.copytree(choice.exported, folder)
        else:
            found = await replayed(choice)
            export.write(found.manifest, found.state, found.tokenizer, folder, LocalDisk())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lm_eval", "--model", "hf"),
            *("--model_args", f"pretrained={folder},dtype=float32", f"--tasks={tasks}"),
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            children.send(process, signal.SIGTERM)
            await process.wait()
            raise
    if code:
        raise LocalError(f"lm_eval: ended with exit code {code}; see what it says above")
