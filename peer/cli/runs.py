"""`potluck runs`: what a list of runs offers, and how to join. `potluck join NAME` finds a run of the last list."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from peer.config import cache_folder
from peer.net.disk import Disk
from peer.ui.text import clean, count, duration, size
from protocol.errors import RemoteError, UsageError, os_errors
from protocol.run.card import MAX_LIST_BYTES, Card, cards
from protocol.run.short_line import short_name

FETCH_SECONDS = 15.0
_KEPT = "runs.jsonl"
"""The last list in the user's folder for files of all runs; its first line is a comment with where it came from."""
_FROM = "# "


def runs(
    list: Annotated[
        str | None,
        typer.Argument(metavar="LIST", help="A list of runs: an https:// address, or a file (default: the last one)."),
    ] = None,
) -> None:
    """Prints the runs of a list; refused entries go to stderr."""
    where = list if list is not None else _last()
    raw = _read(where)
    found = [*cards(raw, clean(where))]
    folder = cache_folder()
    disk = Disk()
    disk.make_folder(folder)
    disk.write(folder / _KEPT, f"{_FROM}{where}\n".encode() + raw)
    good = [card for card in found if isinstance(card, Card)]
    for entry in found:
        if isinstance(entry, str):
            typer.echo(f"potluck: list {clean(where)}: {clean(entry)}; it is left out", err=True)
    for card in good:
        print("\n".join(lines(card, time.time())) + "\n", flush=True)
    print(f"{count(good, 'run')} in {clean(where)}; potluck join NAME takes part", flush=True)


def lines(card: Card, now: float) -> list[str]:
    """A card as text, `now` in Unix seconds."""
    name = short_name(card.name)
    what = f"{card.parameters / 1e6:,.1f}M parameters"
    who = "everybody" if card.open else "invited peers only"
    at = f"{duration(max(0.0, now - card.time))} ago"
    done = f"round {card.round:,} of {card.rounds:,}, {card.tokens / 1e6:,.1f}M tokens"
    loss = f", loss {card.loss:.3f}" if card.loss else ""
    about = [clean(text) for text in (card.about, card.text and f"text: {card.text}") if text]
    return [
        f"{name}  {'; '.join([what, *about])}",
        f"    licence: {clean(card.licence) or 'not said'}; for {who}, from {size(card.memory)} of memory on",
        f"    {done}{loss}, {at}",
        *([f"    potluck join {card.line}"] if card.line else []),
    ]


def line_of(name: str) -> str | None:
    """The line of the run that the last list calls `name`; None where there is none. Raises UsageError for several."""
    try:
        raw = (cache_folder() / _KEPT).read_bytes()
        listed = [card for card in cards(raw, _KEPT) if isinstance(card, Card) and card.line]
        found = {card.line for card in listed if short_name(card.name) == name}
    except (OSError, UsageError):
        return None
    if len(found) > 1:
        raise UsageError(f"RUN {name}: is the name of {len(found)} runs in the last list; give the line of one")
    return next(iter(found), None)


def _last() -> str:
    """Where the last list came from. Raises UsageError."""
    try:
        with open(cache_folder() / _KEPT, encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError:
        first = ""
    if not first.startswith(_FROM):
        raise UsageError("LIST: is missing, and none was read before; give the address of a list of runs, or a file")
    return first.removeprefix(_FROM).rstrip("\n")


def _read(where: str) -> bytes:
    """The list's bytes. Raises UsageError, RemoteError."""
    if "://" not in where:
        remedy = "give a file, or an address that begins with https://"
        with os_errors(f"list {clean(where)}", remedy), open(where, "rb") as file:
            return file.read(MAX_LIST_BYTES + 1)
    import httpx2

    found, end = bytearray(), time.monotonic() + FETCH_SECONDS
    try:
        url = httpx2.URL(where)
        if url.scheme != "https" and url.host not in ("127.0.0.1", "localhost"):
            raise UsageError(f"list {clean(where)}: give an address that begins with https://, or a file")
        with httpx2.stream("GET", url, timeout=FETCH_SECONDS, follow_redirects=True) as response:
            if response.status_code != 200:
                raise RemoteError(where, f"list {clean(where)}: {response.status_code}; check the address")
            for piece in response.iter_bytes():
                found += piece
                if len(found) > MAX_LIST_BYTES:
                    break
                if time.monotonic() > end:
                    raise RemoteError(where, f"list {clean(where)}: did not come in {FETCH_SECONDS:g} s; try again")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        why = clean(str(error) or type(error).__name__, 100)
        raise RemoteError(where, f"list {clean(where)}: {why}; check the address and the network") from None
    return bytes(found)
