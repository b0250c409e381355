"""`potluck sample`: text from the model of a run."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import secrets
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.cli import running
from peer.cli.trained import Checkpoints, Choice, Round, Trained, Where, trained
from peer.ui.text import harmless
from protocol.errors import UsageError

if TYPE_CHECKING:
    from peer.training.inference import Dice

_SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes texts of at most `tokens` tokens more than their beginnings."""

    model: Trained
    dice: Dice
    tokens: int

    def ids(self, beginning: str) -> list[int]:
        """The beginning of a document. Raises UsageError."""
        from peer.corpus.tokenizer import TextEncoder

        try:
            beginning.encode()
        except UnicodeEncodeError:
            raise UsageError("the beginning: is not UTF-8; type it in a terminal that is set to UTF-8") from None
        encoder = TextEncoder(self.model.tokenizer)
        ids = [] if encoder.end is None else [encoder.end]
        ids += encoder.ids(beginning)
        if not ids:
            raise UsageError(
                "the beginning: is empty, and the run's tokenizer has no token that begins a text; give one"
            )
        return ids

    def text(self, ids: Sequence[int]) -> Iterator[str]:
        """What follows `ids`, piece by piece, harmless to a terminal; up to where the model ends it. Raises LocalError."""
        from peer.corpus.tokenizer import Decoder, end_of_text
        from peer.training import inference

        decoder, end = Decoder(self.model.tokenizer, ids), end_of_text(self.model.tokenizer)
        endless = inference.continuation(self.model.stage, ids, self.model.window, self.dice)
        for new in itertools.islice(endless, self.tokens):
            if new == end:
                break
            yield harmless(decoder.add(new))
        yield harmless(decoder.rest())


def sample(
    where: Where = None,
    round: Round = None,
    checkpoint: Checkpoints = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="How the text begins.", show_default=False)] = "",
    tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that the model adds; it may end the text before.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: always the likeliest token; 1: as the model says.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many of the likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=_SEEDS - 1, help="The same seed gives the same text (default: a new one, which is told)."
        ),
    ] = None,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            help="Type beginnings, and the model goes on. Ctrl-C ends a text, Ctrl-D the program.",
        ),
    ] = False,
) -> None:
    """`potluck sample`.

    Long because typer reads a command's options from its function's parameters.
    """
    chosen = secrets.randbelow(_SEEDS) if seed is None else seed

    async def ready() -> Writer:
        from peer.training.inference import Dice

        if interactive and prompt:
            raise UsageError("--prompt: is what you type with --interactive; leave one of them out")
        if not math.isfinite(temperature):
            raise UsageError(f"--temperature {temperature}: is not a number; give one such as 0.8")
        model = await trained(Choice.typed(where, round, checkpoint))
        print(f"potluck: {model}, seed {chosen}", file=sys.stderr)
        return Writer(model, Dice(chosen, temperature=temperature, top_k=top_k), tokens)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what this terminal cannot show
    if interactive:
        writer = running.run(ready(), interrupted=1)
        with running.reporting():
            converse(writer)
    else:
        running.run(_write(ready(), prompt), interrupted=1)


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


def converse(writer: Writer) -> None:
    """Goes on with each line that is typed, until the input ends."""
    print("potluck: type a beginning; Ctrl-C ends a text, Ctrl-D the program", file=sys.stderr)
    while True:
        try:
            for piece in writer.text(writer.ids(input("> "))):
                print(piece, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(flush=True)
            return
        except (UsageError, UnicodeDecodeError) as error:
            print(f"potluck: {error}", file=sys.stderr)
