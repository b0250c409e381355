"""Commands that use the trained model of a run: `potluck sample` and `potluck eval`.

The model comes from a run's log, from the checkpoints in a peer's folder, or from a folder of `potluck export`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import io
import itertools
import json as jsons
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.cli import running
from peer.cli.log import extent_of, following, log_of, room_for
from peer.cli.options import coroutine, with_options
from peer.net import processes
from peer.net.disk import Disk
from peer.node.open_run import here, is_run, run_in
from peer.ui.progress import Progress
from peer.ui.text import clean, count, harmless, size, typed
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.corpus import TOKENIZER
from protocol.run.manifest import Manifest
from protocol.wire import logfile
from protocol.wire.commit import Commit

if TYPE_CHECKING:
    from peer.corpus.rows import Reading
    from peer.corpus.sources import Source
    from peer.corpus.tokenizer_process import TokenizerProcess
    from peer.log import reader, replay
    from peer.training.inference import Dice
    from peer.training.model import Stage

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|RUN",
        help="A folder of a bootstrap node, of a full replica, or of potluck export; or a manifest file or line, as"
        " for join (default: the peer or node in this folder).",
    ),
]
Round = Annotated[int | None, typer.Option(min=0, help="Take the model after this round (default: the last one).")]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="A peer's folder checkpoint-…, from which to go on; one of a full replica, or one of each member of a"
        " chain.",
    ),
]
SEEDS = 1 << 32
CHECKPOINT = "checkpoint-"
"""Prefix of the folders in a peer's folder; the round follows."""
LARGEST_LOSS = 700.0
"""Nats a token; the perplexity of a larger loss overflows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The model of `where` after a round (None: the last), replayed from peers' checkpoints if there are any."""

    where: str
    round: int | None
    checkpoints: tuple[Path, ...]

    @classmethod
    def typed(cls, where: str | None, round: int | None, checkpoints: list[Path] | None) -> Choice:
        """Without `where`: the peer or node in the working folder. Raises UsageError."""
        return cls(here() if where is None else where, round, tuple(checkpoints or ()))

    @property
    def exported(self) -> Path | None:
        """The folder, if `potluck export` wrote it."""
        from peer.log import model_folder

        folder = Path(self.where)
        return folder if os.path.isfile(folder / model_folder.CONFIG) and not (folder / logfile.LOG).is_file() else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state of a log or of a peer's checkpoint."""

    manifest: Manifest
    state: replay.State
    tokenizer: bytes
    is_checked: bool
    """Whether a later commit has the state's digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained model, ready to use."""

    name: str
    round: int
    window: int
    """Tokens of a sequence in training."""
    stage: Stage
    tokenizer: TokenizerProcess

    def __str__(self) -> str:
        millions = layout.total_parameters(self.stage.spec) / 1e6
        device = next(self.stage.parameters()).device.type
        return f"the model of {clean(self.name)} after round {self.round}, {millions:,.1f}M parameters, on {device}"


# --- where a model comes from


async def trained(choice: Choice) -> Trained:
    """Loads the model, with its progress. Raises UsageError, LocalError, RemoteError."""
    with Progress() as progress:
        return await _trained(choice, progress)


async def _trained(choice: Choice, progress: Progress) -> Trained:
    from peer.corpus.tokenizer_process import TokenizerProcess
    from peer.log import export
    from peer.training import inference

    if (folder := choice.exported) is not None:
        if choice.round is not None or choice.checkpoints:
            raise UsageError(f"model {folder}: is of one round; give it without --round and --checkpoint")
        progress.begin("reading the model")
        there = export.read(folder, Disk(), room_for)
        name, round, window = there.name, there.round, there.sequence
        spec, theta, raw = there.spec, there.theta, there.tokenizer
    else:
        own = checkpoints_in(Path(choice.where))
        found = await (own_model(choice, progress) if own else replayed(choice, progress))
        name, round, window = found.manifest.name, found.state.round, found.manifest.train.sequence
        spec, theta, raw = found.manifest.model, found.state.theta, found.tokenizer
    tokenizer = TokenizerProcess(raw)
    if tokenizer.vocabulary > spec.vocab_size:
        raise UsageError(
            f"tokenizer: has {tokenizer.vocabulary} ids, the model {spec.vocab_size}; give it the one that it was"
            " trained with"
        )
    return Trained(name=name, round=round, window=window, stage=inference.load(spec, theta), tokenizer=tokenizer)


@contextlib.asynccontextmanager
async def opened(choice: Choice, progress: Progress) -> AsyncIterator[tuple[Manifest, reader.Source]]:
    """The manifest and the log of a run that has begun. Raises UsageError, LocalError, RemoteError."""
    if run_in(Path(choice.where)) is None and (known := checkpoints_in(Path(choice.where))):
        raise UsageError(
            f"directory {choice.where}: is a peer's, which has no log; give RUN, and {typed('--checkpoint', known[-1])}"
        )
    progress.begin("looking for the log")
    async with log_of(choice.where, progress.clear) as (manifest, source):
        if manifest is None:
            raise UsageError(f"log {source.name}: has no rounds yet; there is no model before the first")
        yield manifest, source


async def replayed(choice: Choice, progress: Progress) -> Replayed:
    """Checks and replays the log. Raises UsageError, LocalError, RemoteError."""
    async with opened(choice, progress) as (manifest, source):
        return await replay_of(choice, manifest, source, await source.tokenizer(manifest), progress)


async def replay_of(
    choice: Choice,
    manifest: Manifest,
    source: reader.Source,
    tokenizer: bytes,
    progress: Progress,
    follow: Callable[[Commit], None] = lambda commit: None,
) -> Replayed:
    """As `replayed`, of an open log. follow: receives its commits."""
    from peer.log import replay

    round, empty = choice.round, room_for(manifest.model)
    known = await extent_of(manifest, source, progress)
    archived = None if choice.checkpoints else await replay.archived_state(manifest, source, known, empty)
    is_later = archived is not None and round is not None and archived.round > round
    start = _start(manifest, choice.checkpoints) if choice.checkpoints else None if is_later else archived
    if start is not None and round is not None and start.round > round:
        raise UsageError(f"--checkpoint: is of round {start.round}, after --round {round}; give an older one")
    show = following(progress, start, known.head if round is None else min(known.head, round))

    def each(commit: Commit) -> None:
        show(commit)
        follow(commit)

    done = await replay.verify(
        manifest, source.records(), source.payload, lambda problem: None, start, empty, round, each
    )
    head = -1 if done.head is None else done.head.round
    reached = min(head, round) if round is not None else head
    if done.problems and is_later and archived is not None:
        raise UsageError(
            f"log {source.name}: its archive begins after round {archived.round}; give a later --round, or a"
            " --checkpoint"
        )
    if done.problems:
        raise LocalError(
            f"log {source.name}: {clean(str(done.problems[0]), 300)}; no model is made of it, see potluck log verify"
        )
    if reached < (round or 0) or (start is not None and start.round > head):
        raise UsageError(f"log {source.name}: ends at round {head}; give a --round, or a --checkpoint, that it has")
    state = replay.State(max(reached, start.round if start else 0), done.theta, done.digests)
    return Replayed(manifest, state, tokenizer, start is None or start.round < head)


def _start(manifest: Manifest, checkpoints: tuple[Path, ...]) -> replay.State:
    """The shards of all the checkpoints. Raises UsageError."""
    from peer.log import replay

    found = [replay.start_from(manifest, path) for path in checkpoints]
    theta = {shard: arrays for state in found for shard, arrays in state.theta.items()}
    missing = [shard for shard in layout.shard_names(manifest.model) if shard not in theta]
    if len({state.round for state in found}) > 1:
        rounds = ", ".join(str(state.round) for state in found)
        raise UsageError(f"--checkpoint: they are of rounds {rounds}; give those of one round")
    if missing:
        raise UsageError(
            f"--checkpoint: none has {', '.join(missing[:4])}; give one of each member of the chain, or of a full"
            " replica"
        )
    return replay.State(found[0].round, theta, {})


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a peer's folder, the newest last; none in another folder."""
    if not os.path.isdir(folder) or (folder / logfile.LOG).is_file():
        return []
    return sorted(path for path in folder.glob(f"{CHECKPOINT}*") if path.is_dir())


async def own_model(choice: Choice, progress: Progress) -> Replayed:
    """The model of a full replica's folder, by a checkpoint. Raises UsageError if a part is missing."""
    from peer.log import replay

    progress.begin("reading the checkpoint")
    folder = Path(choice.where)
    if choice.checkpoints:
        raise UsageError(f"directory {folder}: is a peer's; give it without --checkpoint, or RUN with it")
    found = checkpoints_in(folder)
    numbers = {path.name.removeprefix(CHECKPOINT): path for path in found}
    rounds = {int(number): path for number, path in numbers.items() if number.isdigit()}
    path = found[-1] if choice.round is None else rounds.get(choice.round)
    if path is None:
        known = ", ".join(map(str, sorted(rounds)))
        raise UsageError(
            f"directory {folder}: has checkpoints of rounds {known}, and none of round {choice.round}; give one of"
            " these"
        )
    _require(folder, logfile.MANIFEST, path)
    manifest = manifests.from_bytes((folder / logfile.MANIFEST).read_bytes(), str(folder / logfile.MANIFEST))
    state = replay.start_from(manifest, path)
    missing = [shard for shard in layout.shard_names(manifest.model) if shard not in state.theta]
    if missing:
        raise UsageError(
            f"directory {folder}: its peer holds a part of the model, without {', '.join(missing[:4])}; give RUN, and"
            " every member's checkpoint by --checkpoint"
        )
    _require(folder, TOKENIZER, path)
    tokenizer = (folder / TOKENIZER).read_bytes()
    if hashlib.sha256(tokenizer).hexdigest() != manifest.tokenizer.digest:
        raise UsageError(f"tokenizer {folder / TOKENIZER}: is another one than the run's; remove it, and join again")
    return Replayed(manifest, state, tokenizer, False)


def _require(folder: Path, name: str, checkpoint: Path) -> None:
    if not (folder / name).is_file():
        raise UsageError(
            f"directory {folder}: is a peer's without {name}, which a full replica has after a while in the run; give"
            f" RUN, and {typed('--checkpoint', checkpoint)}"
        )


# --- potluck sample


@dataclass(frozen=True, slots=True)
class Writer:
    """Continues texts by at most `tokens` tokens."""

    model: Trained
    dice: Dice
    tokens: int

    def ids(self, beginning: str) -> list[int]:
        """Token ids of the beginning of a document. Raises UsageError."""
        try:
            beginning.encode()
        except UnicodeEncodeError:
            raise UsageError("prompt: is not UTF-8; type it in a terminal that is set to UTF-8") from None
        encoder = self.model.tokenizer
        ids = [] if encoder.end is None else [encoder.end]
        ids += encoder.ids(beginning)
        if not ids:
            raise UsageError("prompt: is empty, and the run's tokenizer has no token that begins a text; give one")
        return ids

    def text(self, ids: Sequence[int]) -> Iterator[str]:
        """The continuation of `ids` in pieces that are safe to print, until the model ends it. Raises LocalError."""
        from peer.corpus.tokenizer import Decoder
        from peer.training import inference

        decoder, end = Decoder(self.model.tokenizer, ids), self.model.tokenizer.end
        endless = inference.continuation(self.model.stage, ids, self.model.window, self.dice)
        for new in itertools.islice(endless, self.tokens):
            if new == end:
                break
            yield harmless(decoder.add(new))
        yield harmless(decoder.rest())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """The options of `potluck sample`."""

    where: Where = None
    round: Round = None
    checkpoint: Checkpoints = None
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="How the text begins.")] = ""
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens that the model adds; it may end the text before.")] = (
        200
    )
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token; 1: as the model says.")] = (
        0.8
    )
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the N likeliest tokens; 0: from all.")] = 50
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=SEEDS - 1, help="The same seed gives the same text (default: a new one, which is printed)."
        ),
    ] = None
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive", help="Type prompts, and the model continues them. Ctrl-C ends a text, Ctrl-D the program."
        ),
    ] = False


def _sample(options: SampleOptions, context: typer.Context) -> None:
    seed = secrets.randbelow(SEEDS) if options.seed is None else options.seed

    async def ready() -> Writer:
        from peer.training.inference import Dice

        if options.interactive and options.prompt:
            raise UsageError("--prompt: is what you type with --interactive; leave one of them out")
        if not math.isfinite(options.temperature):
            raise UsageError(f"--temperature {options.temperature}: is not a number; give one such as 0.8")
        model = await trained(Choice.typed(options.where, options.round, options.checkpoint))
        print(f"potluck: {model}, seed {seed}", file=sys.stderr)
        return Writer(model, Dice(seed, temperature=options.temperature, top_k=options.top_k), options.tokens)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    if options.interactive:
        converse(running.run(ready(), interrupted=1))
    else:
        running.run(_write(ready(), options.prompt), interrupted=1)


sample = with_options(SampleOptions, _sample)


async def _write(ready: Coroutine[Any, Any, Writer], prompt: str) -> None:
    writer = await ready
    ids = writer.ids(prompt)
    try:
        print(harmless(prompt), end="", flush=True)
        for piece in writer.text(ids):
            print(piece, end="", flush=True)
            await asyncio.sleep(0)  # here Ctrl-C ends it
    finally:
        print(flush=True)


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C is noted here, not raised: what is raised while torch converts a list comes out as another error."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def converse(writer: Writer) -> None:
    """Continues each line that is typed, until the input ends."""
    print("potluck: type a prompt; Ctrl-C ends a text, Ctrl-D the program", file=sys.stderr)
    while True:
        try:
            ids = writer.ids(input("> "))
            with noted_interrupts() as interrupts:
                for piece in writer.text(ids):
                    print(piece, end="", flush=True)
                    if interrupts:
                        break
            print(flush=True)
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(flush=True)
            return
        except (UsageError, UnicodeDecodeError) as error:
            print(f"potluck: {error}", file=sys.stderr)


# --- potluck eval


@coroutine
async def evaluate(
    where: Where = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files with text: .parquet, .jsonl, .csv; any other: UTF-8 text."),
    ] = None,
    round: Round = None,
    checkpoint: Checkpoints = None,
    column: Annotated[str, typer.Option(help="Column with the text, in files that have columns.")] = "text",
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Not files, but these tasks of lm-evaluation-harness, if it is installed."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/guides/model.md).")] = False,
) -> None:
    named = list(files or ())
    if where is not None and not is_run(where):
        named.insert(0, where)  # it is the first of the files
        where = None
    if not named and tasks is None:
        raise UsageError("potluck eval: no text; name files, or tasks with --tasks")
    choice = Choice.typed(where, round, checkpoint)
    await (_files(choice, named, column, json) if tasks is None else _tasks(choice, tasks, bool(named or json)))


async def _files(choice: Choice, files: Sequence[str], column: str, json: bool) -> None:
    """Prints loss, perplexity and bits per byte (peer/corpus/tokenizing.py). Raises PotluckError."""
    from peer.corpus import sources
    from peer.corpus.rows import Reading
    from peer.corpus.tokenizing import Read, windows
    from peer.training import inference

    found = [sources.parse(name) for name in files]
    for source in found:
        if source.kind in ("folder", "hub"):
            raise UsageError(f"source {source}: is not a file; name files")
    sources.forbid_the_hub(found)
    model = await trained(choice)
    read, nats, tokens = Read(), 0.0, 0
    reading = Reading(column=column, options=("--column",))
    with Progress() as progress:
        if progress.is_shown:
            progress.begin("reading the text")
            whole = await _text_bytes(found, reading)
            progress.begin(f"measuring {size(whole)}", whole, lambda: tokens * read.text_bytes / max(read.tokens, 1))
        for ids in windows(found, reading, model.tokenizer, model.window, read):
            nats += inference.nats(model.stage, ids)
            tokens += ids[:, 1:].size
            await asyncio.sleep(0)  # here Ctrl-C ends it
    if not tokens:
        raise UsageError("files: have no text; name some that have, or their column with --column")
    loss = nats / tokens
    if not loss < LARGEST_LOSS:
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
    print(model)
    print(
        f"{count(range(read.documents), 'document')}, {size(read.text_bytes)} ({read.text_bytes:,} bytes),"
        f" {tokens:,} tokens, in sequences of {model.window}"
    )
    print(
        f"loss {loss:.4f} nats per token, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per"
        " byte"
    )


async def _text_bytes(found: Sequence[Source], reading: Reading) -> int:
    """Bytes of the text in these sources. Raises UsageError."""
    from peer.corpus import sources

    total = 0
    for source in found:
        for unit in sources.units(source, reading):
            total += sum(map(len, unit.pieces))
            await asyncio.sleep(0)  # here Ctrl-C ends it
    return total


async def _tasks(choice: Choice, tasks: str, with_more: bool) -> None:
    """Runs lm-evaluation-harness' command on an export. Raises UsageError, LocalError, RemoteError."""
    from peer.log import export

    if with_more:
        raise UsageError("--tasks: goes without files and --json; leave them out")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--tasks: lm-evaluation-harness is not installed here; type pip install 'lm_eval[hf]', or name files"
            " instead"
        )
    with tempfile.TemporaryDirectory(prefix="potluck-eval-") as name:
        folder = Path(name) / "model"
        if choice.exported is not None:
            try:
                folder.symlink_to(choice.exported.resolve())
            except OSError:  # a disk without symbolic links
                shutil.copytree(choice.exported, folder)
        else:
            with Progress() as progress:
                found = await replayed(choice, progress)
            export.write(found.manifest, found.state, found.tokenizer, folder, Disk())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lm_eval", "--model", "hf"),
            *("--model_args", f"pretrained={folder},dtype=float32", f"--tasks={tasks}"),
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            processes.send_signal(process, signal.SIGTERM)
            await process.wait()
            raise
    if code:
        raise LocalError(f"lm_eval: ended with exit code {code}; see what it says above")
