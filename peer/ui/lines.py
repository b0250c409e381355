"""Events as lines of text: messages of the screen, and the output of processes without a terminal.

The output is one short line a round, and rare events. Details of stages are on the screen and in the JSON lines only.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO, assert_never

from peer import events
from peer.events import Event, Sink
from peer.net.address import host_of, is_link_local, is_loopback
from peer.ui.text import (
    Names,
    blocks,
    called,
    clean,
    cleaned,
    clock,
    count,
    duration,
    rate,
    readable,
    schedule_of,
    size,
    typed,
)
from protocol.wire.claims import Evaluation, Score
from protocol.wire.commit import Commit
from protocol.wire.decree import Decree

MARKS = {"info": "·", "good": "✓", "warning": "!", "error": "✗"}
_ASCII = str.maketrans({
    "◄": "<", "←": "<",
    "·": "-", "✓": "+", "✗": "x", "…": "~", "×": "x", "−": "-", "█": "#", "░": ".", "●": "*", "○": "o",
    "→": ">",
    "▏": " ", "▎": " ", "▍": " ", "▌": " ", "▋": " ", "▊": " ", "▉": " ",
})  # fmt: skip


LONGEST_WARNING = 400
"""Characters; the remedy is at the end, behind addresses."""


class Said(NamedTuple):
    """A line for an event. level: info, good, warning or error."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A message to a reader."""

    time: float
    level: str
    """`info`, `good`, `warning` or `error`."""
    text: str


def ascii(text: str) -> str:
    """Replaces each character that is not ASCII by one that is."""
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def describe(event: Event, names: Mapping[str, str]) -> list[Said]:
    """Returns the lines of a cleaned event for a watcher of the whole run. names: by peer id."""
    source = called(event.source, names)
    match event.body:
        case events.Listening(address=""):
            return [Said("warning", "nobody can join now: this machine has no address; connect it to a network")]
        case events.Listening(address=address, line=line):
            return [Said("info", f"to join: potluck join {line or address}"), *_reaches(host_of(address))]
        case events.Ready(peer=peer, device=device, memory_bytes=memory):
            offer = device + (f", {size(memory)}" if memory else "")  # bootstrap nodes do not train
            return [Said("info", f"{called(peer, names)} is ready: {offer}")]
        case events.Gone(peer=peer):
            return [Said("warning", f"{called(peer, names)} is gone")]
        case events.Commit() as commit:
            return list(_commit(commit, names))
        case events.ChainReconfigured(reason=""):  # a member that follows says the same as the node
            return []
        case events.ChainReconfigured() as chain:
            return [Said("warning", f"{_goes_on(chain, names)}: {readable(chain.reason, names)}")]
        case events.Moved(replica=replica, reason=reason):
            return [Said("info", f"replica {replica}: {readable(reason, names)}")]
        case events.Diverged(peer=peer, round=round, shard=shard, refuted=refuted):
            than = " than the log gives" if refuted else ""
            return [Said("error", f"{called(peer, names)} has other bits in {shard} after round {round}{than}")]
        case events.Refused(peer=peer, address=address, reason=reason, seconds=seconds):
            who = f"peer {called(peer, names)}" + (f" at {address}" if address else "")
            return [Said("warning", f"{who} {reason}; it is ignored for {duration(seconds)}")]
        case events.Quarrel(accuser=accuser, accused=accused, reason=reason, out=out):
            gone = ", ".join(called(peer, names) for peer in out)
            after = f"in no chain from now on: {gone}" if out else "from now on they are put into different chains"
            return [Said("warning", f"{called(accuser, names)} says of {called(accused, names)}: {reason}; {after}")]
        case events.Unfair(peer=peer, round=round, reason=reason):
            who = f"node {called(peer, names)}: its commit of round {round}"
            return [Said("error", f"{who} {reason}; it gets no vote, and another node leads")]
        case events.Forked(round=round):
            return [
                Said("error", f"round {round} has two decided results: too many operators lie, so every peer stops")
            ]
        case events.Relayed(circuits=circuits, bytes=passed, bps=bps):
            streams = count(range(circuits), "stream")
            return [Said("info", f"relays {streams} at {bps / 1e6:.1f} Mb/s; {size(passed)} since the start")]
        case events.Withdrew(round=round, reason=reason):
            return [Said("warning", f"{source} sits out round {round}: {readable(reason, names)}")]
        case events.Leaving():
            return [Said("info", f"{source} leaves")]
        case events.Left():
            return []  # for the peer's own user
        case events.Paused(reason=reason):
            return [Said("info", f"{source} pauses: {reason}")]
        case events.Resumed():
            return [Said("info", f"{source} goes on")]
        case events.Restored(round=round):
            return [Said("info", f"{source} continues from round {round}")]
        case events.ShardRebuilt(shards=shards):
            return [Said("info", f"{source} rebuilt {', '.join(shards)} from the log")]
        case events.RunFinished(state_digest=digest):
            return [Said("good", "run finished" + (f"; state {digest[:12]}…" if digest else ""))]
        case events.Violation(round=round, reason=reason):
            return [
                Said("error", f"the operators' commit of round {round} breaks a rule: it {readable(reason, names)}")
            ]
        case events.Warning(text=text):
            return [Said("warning", readable(text, names, LONGEST_WARNING))]
        case events.Attest() | events.Leads() | events.Recovered():
            return []  # after every round, of every peer; internal to the quorum; followed by `round`
        case events.Started() | events.Role() | events.Step() | events.Chain() | events.Announced() | events.Offered():
            return []  # of every peer, in every round: in the screen's table
        case events.TextFetched() | events.Found() | events.ReadingLog() | events.Fetching() | events.Waiting():
            return []  # for the peer's own user
        case events.Measured() | events.Reachable():
            return []  # repeated by the node with `ready`
        case events.Round() | events.Finished() | events.ChainFailed():
            return []  # likewise; the node reports its decision about a failed chain
        case never:
            assert_never(never)


def price(found: events.Found) -> list[str]:
    """Returns the run's cost for this machine as text."""
    mirrors = ", ".join(clean(mirror, 80) for mirror in found.mirrors)
    return [
        f"a full replica keeps at most {size(2 * found.state_bytes)} of states on disk and writes one every"
        f" {duration(found.state_seconds)}; --store-limit and --data-limit come on top",
        f"it sends at most {size(found.sent_a_day)} of updates a day, and fetches as much from each other replica",
        f"it spends at most {found.measuring:.0%} of its time measuring the model and others' updates; its text comes"
        f" from the run's nodes and peers{f', and from {mirrors}' if mirrors else ''}",
    ]


def _reaches(host: str) -> list[Said]:
    """A warning if the address to join works for some machines only."""
    if is_loopback(host):
        remedy = "for others, give --host 0.0.0.0, or --announce with the address at which they reach it"
        return [Said("warning", f"that line works on this machine only: the node has no other address; {remedy}")]
    if is_link_local(host):
        remedy = "for others, give this machine an address in a network, or --announce one"
        return [Said("warning", f"that line works on the same cable or Wi-Fi only; {remedy}")]
    return []


def describe_own(event: Event, names: Mapping[str, str]) -> list[Said]:
    """As `describe`, for the user of the peer that reports the event."""
    match event.body:
        case events.Started() as s:
            return [Said("info", f"{called(s.peer, names)} is here: {s.device}, {size(s.memory_bytes)}")]
        case events.Found() as f:
            model = f"{f.parameters / 1e6:,.1f}M parameters, rounds of {duration(f.round_seconds)}"
            text = f"run {f.run[:12]}… {f.name}: {model}; finding out how others reach this machine"
            rounds = "the first round" if f.probation == 1 else f"the first {f.probation} rounds"
            newcomers = f"you begin on probation: in {rounds} your work is checked and kept, and counts from then on"
            said = [text, *([newcomers] if f.probation else []), *(price(f) if f.state_bytes else [])]
            return [Said("info", line) for line in said]
        case events.ReadingLog() as log:
            return [_read_of_log(log)]
        case events.Fetching() as f:
            return [_fetched(f)]
        case events.Waiting(round=round, seconds=seconds):
            return [
                Said("info", f"ready: round {round}, the first for this machine, begins in about {duration(seconds)}")
            ]
        case events.Measured(round_trip_ms=trip) as m:
            found = f"bandwidth: {rate(m.up_bps)} up, {rate(m.down_bps)} down"
            how = f"; {trip:.0f} ms to a bootstrap node" if trip is not None else ", as transfers show"
            return [Said("info", found + (", as measured before" if m.by == "earlier" else how))]
        case events.TextFetched(bytes=fetched, seconds=took, tokens=tokens):
            speed = rate(int(8 * fetched / took)) if took else "at once"
            whole = f"of {tokens / 1e6:,.1f}M tokens; the rest comes while it trains"
            return [Said("good", f"text: the first {size(fetched)} fetched in {took:.1f} s ({speed}), {whole}")]
        case events.Reachable(how=how, addresses=addresses):
            return _reached(how, addresses)
        case events.Role(role="full", round=round):
            return [Said("info", f"round {round}: this machine trains the whole model")]
        case events.Role() as role:
            place = f"stage {role.position + 1} of {role.stages}"
            part = f"{blocks(role.first, role.last)}, {place} of a chain"
            return [Said("info", f"round {role.round}: this machine trains {part}")]
        case events.Round(round=0) | events.Round(holds=False) as done:
            return list(_measured(done.evaluations, done.scores, names))
        case events.Round(round=round, own_tokens=own) as done:
            amounts = f"{size(done.bytes_sent)} sent, {size(done.bytes_received)} received"
            amounts += f" and {size(done.bytes_written)} written to disk since the start"
            yours = f": {own:,} of {done.tokens:,} tokens were yours" if own else ""
            return [
                Said("good", f"round {round} is applied{yours}; {amounts}"),
                *([Said("info", f"round {round}: {on_probation(done.probation)}")] if done.probation else []),
                *_measured(done.evaluations, done.scores, names),
            ]
        case events.ChainFailed(round=round, peer=peer, reason=reason):
            return [Said("warning", f"round {round}: the chain fails at {called(peer, names)}: {reason}")]
        case events.ChainReconfigured() as chain:
            return [Said("info", _goes_on(chain, names))]
        case events.Leaving(seconds=seconds):
            text = f"leaving: this machine hands its last work over, which takes {seconds:g} s at most"
            return [Said("info", f"{text}; Ctrl-C once more ends at once")]
        case events.Paused(reason=reason):
            return [Said("info", f"pauses: {reason}")]
        case events.Resumed():
            return [Said("info", "goes on")]
        case events.Finished(round=round):
            return [Said("good", f"the run is over after round {round}")]
        case events.Left() as left:
            return _thanks(left)
    return describe(event, {**names, event.source: "this machine"})


def on_probation(reason: str) -> str:
    """A `LeftOut.reason` of work on probation, for its maker."""
    _, _, when = reason.rpartition("counts ")
    return f"your work is good and is kept; as you are new, it counts {when or 'soon'}"


def _thanks(left: events.Left) -> list[Said]:
    """What a user gave, and what came of it meanwhile."""
    if not left.rounds:
        return []
    given, loss = "none of their tokens were yours yet", ""
    if left.own_tokens:
        given = f"{left.own_tokens:,} of their {left.tokens:,} tokens were yours ({left.own_tokens / left.tokens:.1%})"
    if left.first_loss is not None and left.last_loss is not None and left.rounds > 1:
        loss = f"; the model's loss went from {left.first_loss:.3f} to {left.last_loss:.3f}"
    rounds = f"you took part in {count(range(left.rounds), 'round')} in {duration(left.seconds)}"
    commands = ("sample", left.folder, "--interactive"), ("export", left.folder, "--out", "model")
    model = "to use the model: " + ", or ".join(typed("potluck", *words) for words in commands)
    return [Said("good", f"thank you: {rounds}; {given}{loss}"), Said("info", model)]


def decreed(decree: Decree, names: Mapping[str, str]) -> str:
    """A decree as text."""
    who = f" {called(decree.subject, names)}" if decree.subject else ""
    if decree.schedule is not None:
        who = f" {schedule_of(decree.schedule)}"
    if decree.operators:
        who = f" {', '.join(called(operator.peer, names) for operator in decree.operators)}"
    if decree.quorum is not None:
        who = f" {decree.quorum}"
    return f"{decree.action}{who}" + (f": {decree.reason}" if decree.reason else "")


def _read_of_log(log: events.ReadingLog) -> Said:
    if log.round == log.newest:
        return Said("good", f"the log is read: {log.round - log.after:,} rounds in {log.seconds:.1f} s")
    return Said("info", f"reading the log: round {log.round:,} of {log.newest:,}")


def _fetched(f: events.Fetching) -> Said:
    speed = f" ({rate(int(8 * f.came / f.seconds))})" if f.came and f.seconds else ""
    if f.done:
        return Said("good", f"the model of round {f.round} is fetched: {size(f.bytes)} in {f.seconds:.1f} s{speed}")
    left = f", about {duration(f.seconds * (f.bytes - f.came) / f.came)} left" if f.came else ""
    return Said("info", f"fetching the model of round {f.round}: {size(f.came)} of {size(f.bytes)}{speed}{left}")


def _reached(how: str, addresses: Sequence[str]) -> list[Said]:
    where = f" at {readable(addresses[0], {}, 60)}" if addresses else ""
    match how:
        case "direct":
            return [Said("info", f"others connect to this machine directly{where}")]
        case "mapped":
            return [Said("info", f"others connect to this machine through its router{where}")]
        case "private":
            text = (
                "your router refuses connections from outside, so others reach this machine by hole punching or through"
                " a relay, which is slower; to be reached directly, forward a TCP port of the router to this machine"
                " and give it with --port"
            )
            return [Said("info", text)]
    return []


def _measured(evaluations: Sequence[Evaluation], scores: Sequence[Score], names: Mapping[str, str]) -> Iterator[Said]:
    """A commit's held-out losses and scores."""
    for x in evaluations:
        text = f"loss {x.loss:.3f} after round {x.round}, {x.bits_per_byte:.3f} bits per byte"
        yield Said("good", f"held out: {text}, as {called(x.peer, names)} measured it")
    if scores:
        marks = [(mark.assigned, mark.other) for said in scores for mark in said.marks]
        rounds = ", ".join(map(str, sorted({said.round for said in scores})))
        own, other = (statistics.median(found) for found in zip(*marks, strict=True)) if marks else (0.0, 0.0)
        median = f"the median update lowers the loss by {own:.5f} on its own text, by {other:.5f} on other text"
        found = f"{count(marks, 'check')} of updates: {median}" if marks else "nobody could check an update"
        yield Said("info", f"round {rounds}: {found}")


def _commit(commit: Commit, names: Mapping[str, str]) -> Iterator[Said]:
    if commit.round == 0:
        planned = commit.plan
        yield Said("good", f"first plan: {count(planned.replicas, 'replica')}" if planned else "run begins")
    else:
        text = f"round {commit.round}: {count(commit.contributions, 'replica')}"
        yield Said("good", text + (f", loss {commit.loss:.3f}" if commit.loss is not None else ""))
        if light := [c for c in commit.contributions if c.weight < 1]:
            which = ", ".join(f"replica {c.replica} with {c.weight:.0%} of its weight" for c in light)
            why = "its update copies another one, opposes the others, or agrees little with them"
            yield Said("warning", f"round {commit.round} counts {which}: {why}")
        for left in commit.left_out:
            where = f"round {commit.round}: " if left.probation else f"round {commit.round} without "
            without = f"{where}replica {left.replica}: {readable(left.reason, names)}"
            yield Said("info" if left.probation else "warning", without)
    if commit.decree is not None:
        yield Said("warning", f"decree of the operators: {decreed(commit.decree.decree, names)}")
    yield from _measured(commit.evaluations, commit.scores, names)
    for joined in commit.joined:
        why = f": {joined.invitation.reason}" if joined.invitation.reason else ""
        by = called(joined.operator, names)
        yield Said("info", f"{called(joined.peer, names)} takes part, invited by operator {by}{why}")


def _goes_on(chain: events.ChainReconfigured, names: Mapping[str, str]) -> str:
    where = f"round {chain.round}: replica {chain.replica}"
    if not chain.peers:
        return f"{where} ends"
    if chain.steps:
        return f"{where} offers {count(range(chain.steps), 'inner step')}"
    return f"{where} goes on as {' > '.join(called(peer, names) for peer in chain.peers)}"


class Lines:
    """Formats events. own: for the user of the peer that reports them; its role is repeated only when it changes."""

    def __init__(self, names: Mapping[str, str] | None = None, *, own: bool = False) -> None:
        self._names = Names(names)
        self._own = own
        self._role: tuple[object, ...] = ()

    def of(self, event: Event) -> list[str]:
        """The lines of an event, usually none."""
        return [f"{clock(event.time)} {MARKS[level]} {text}" for level, text in self.said(event)]

    def said(self, event: Event) -> list[Said]:
        """The same without time and mark."""
        event = cleaned(event)
        if self._own and isinstance(event.body, events.Role):
            b = event.body
            before, self._role = self._role, (b.role, b.first, b.last, b.position, b.stages)
            if before == self._role:
                return []
        if isinstance(event.body, events.Ready):
            self._names.learn(event.body.peer, event.body.name)
        return (describe_own if self._own else describe)(event, self._names)


def sink(json: bool) -> Sink:
    """A sink that prints events, as JSON or as text."""
    return events.json_sink() if json else printer(Lines())


def printer(lines: Lines, out: TextIO | None = None) -> Sink:
    """A sink that writes each event's lines (default: to standard output), in ASCII unless the output is UTF-8."""

    def show(event: Event) -> None:
        file = out or sys.stdout
        plain = not (file.encoding or "utf-8").lower().startswith("utf")
        for line in lines.of(event):
            print(ascii(line) if plain else line, file=file, flush=True)

    return show
