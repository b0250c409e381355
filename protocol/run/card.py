"""The card of a run for lists of runs: what it trains, its admission, and the line to join, signed by its operator.

A list has the card of a run as JSON in each line. It may come from anybody: a card with a line is shown where the key
that signed it and the run's id give the line's code (protocol/run/short_line.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from protocol import identity
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.run import short_line
from protocol.run.short_line import ShortLine
from protocol.wire import framing
from protocol.wire.commit import DOMAIN
from protocol.wire.schema import AtMost, SchemaError, Within, build

MAX_LIST_BYTES = 1 << 20
MAX_RUNS = 1000
_MOST = 1 << 53

LONGEST_TEXT = 200
Text = Annotated[str, AtMost(LONGEST_TEXT)]
Number = Annotated[int, Within(0, _MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """about: what it trains; text: on which text; licence: of the model, as the manifest has it
    memory: bytes of the smallest stage
    round, tokens, loss: at `time` (Unix seconds); loss 0: none yet
    line: empty where not everybody may join
    run: the run's id; operator: the peer id of the node that signs, which is the one at `line`
    """

    name: Text
    about: Text = ""
    text: Text = ""
    licence: Text = ""
    parameters: Number
    memory: Number
    open: bool
    round: Number
    rounds: Number
    tokens: Number
    loss: Annotated[float, Within(0.0, 1e6)] = 0.0
    time: Number
    line: Text = ""
    run: Text
    operator: Text
    signature: Text = ""

    @property
    def short(self) -> ShortLine | None:
        return short_line.parse(self.line)

    @property
    def _body(self) -> bytes:
        fields = dataclasses.asdict(self)
        return DOMAIN + framing.pack_message(["card", [fields[name] for name in sorted(fields) if name != "signature"]])

    def signed(self, operator: Identity) -> Card:
        return dataclasses.replace(self, signature=operator.sign(self._body).hex())

    def why_refused(self) -> str | None:
        """Why it is not the card of the run at its line; None if it is. The card of a closed run has no line."""
        short = self.short
        if short is None and (self.open or self.line):
            return "has no line to join"
        if short is not None and (
            short.code != short_line.code_of(self.operator, self.run) or short.name != short_line.short_name(self.name)
        ):
            return "has the line of another run or node"
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            signature = b""
        return None if identity.verify(self.operator, self._body, signature) else "is not signed by its operator's node"

    def json(self) -> str:
        """The card's line of a list."""
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value != ""})


def cards(raw: bytes, name: str) -> Iterator[Card | str]:
    """The cards of the list `name`; a text says which one is refused, and why. Raises UsageError for what is no
    list."""
    lines = [line for line in raw.splitlines() if line.strip() and not line.startswith(b"#")]
    if not 0 < len(lines) <= MAX_RUNS or len(raw) > MAX_LIST_BYTES:
        raise UsageError(
            f"list {name}: is empty, or has more than {MAX_RUNS} lines or {MAX_LIST_BYTES >> 20} MB; give a list of"
            " runs, whose lines potluck run card prints"
        )
    for number, line in enumerate(lines, 1):
        try:
            card = build(Card, json.loads(line), ignore_unknown=True)
        except (SchemaError, ValueError, RecursionError) as error:
            yield f"line {number}: {'not JSON' if isinstance(error, ValueError | RecursionError) else error}"
            continue
        why = card.why_refused()
        yield card if why is None else f"line {number}, {card.name}: {why}"
