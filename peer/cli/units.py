"""What the system is told of a peer or a bootstrap node that it is to run for weeks: a unit of systemd, or an agent of launchd. Texts only.

Both start the same command in the same folder: now, whenever the system starts (as far as it starts anything for this user), and again
when the process crashes, after a pause that grows to LONGEST_PAUSE seconds. They do not where it ended well (the run is over), or with
one of the exit codes FINAL (what was typed is wrong, the operators have banned the peer, or the run is closed to it). To stop it they send SIGTERM to the peer alone, and it has STOP_SECONDS to give away what it has
learned; so its network daemon lives until it is done.
"""

from __future__ import annotations

import hashlib
import plistlib
import re
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import FINAL, UsageError

FIRST_PAUSE = 10
"""Seconds between a crash and the next start,"""
LONGEST_PAUSE = 320
"""and at most. systemd before version 254 has no growing pauses: there it stays the first."""
STOP_SECONDS = 90
"""Twenty to end the inner step under way and to hand over (handover.LEAVE_SECONDS), the rest for a checkpoint on a slow disk. systemd gives
120 to all that a user runs."""

_ENDS = "|".join(f":{code}" for code in FINAL)
_AGAIN = f"""\
stop= child= told=
tell() {{ [ -z "$stop" ] || [ -z "$child" ] || [ -n "$told" ] || {{ told=1; kill -TERM "$child" 2>/dev/null; }}; }}
trap 'stop=1; tell' TERM INT
pause={FIRST_PAUSE}
while :; do
    child=; "$@" & child=$!; tell
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    case "$stop:$code" in :0|{_ENDS}|1:*) exit 0 ;; esac
    child=; sleep "$pause" & child=$!; tell
    wait "$child"
    [ -z "$stop" ] || exit 0
    pause=$((pause * 2)); [ "$pause" -le {LONGEST_PAUSE} ] || pause={LONGEST_PAUSE}
done
"""
"""launchd knows neither growing pauses nor exit codes. A signal ends `wait` early; the process is still there then. One that comes before the shell
knows whom it has started is passed on when it does, and none twice: a peer that is told twice gives nothing away."""


def name_of(folder: Path) -> str:
    """Of the service whose peer is in `folder`: readable, and of no other folder."""
    whole = folder.resolve()
    words = re.sub(r"[^A-Za-z0-9]+", "-", whole.name).strip("-").removeprefix("potluck-") or "peer"
    return f"potluck-{words[:40]}-{hashlib.sha256(bytes(whole)).hexdigest()[:6]}"


def systemd(command: Sequence[str], at: Path, folder: Path) -> str:
    """The unit. `command`: words, the first an absolute path; `at`: where it is started; `folder`: the peer's. Raises UsageError."""
    return f"""\
[Unit]
Description=Potluck in {_literal(str(folder))}
StartLimitIntervalSec=0

[Service]
WorkingDirectory={_literal(str(at))}
ExecStart={_words(command)}
Restart=on-failure
RestartPreventExitStatus={" ".join(map(str, FINAL))}
RestartSec={FIRST_PAUSE}
RestartSteps=5
RestartMaxDelaySec={LONGEST_PAUSE}
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}

[Install]
WantedBy=default.target
"""


def _literal(text: str) -> str:
    """As a setting that is one value to the end of its line: only % means something there, and what begins or ends a line."""
    if not text.isprintable() or text != text.strip() or text.endswith("\\"):
        raise UsageError(
            f"service: {text!a} cannot be written into a unit of systemd; choose a folder with another name"
        )
    return text.replace("%", "%%")


def _words(command: Sequence[str]) -> str:
    """As a command: each word in quotes, with C's escapes. The colon says that $ means nothing."""
    if any("\0" in word for word in command):
        raise UsageError("service: a word of the command has a zero byte; leave it out")
    escaped = (re.sub(r'["\\]', r"\\\g<0>", word).replace("%", "%%") for word in (f":{command[0]}", *command[1:]))
    return " ".join('"' + re.sub(r"[\n\r\t]", lambda found: f"\\x{ord(found[0]):02x}", word) + '"' for word in escaped)


def launchd(name: str, command: Sequence[str], at: Path) -> bytes:
    """The agent, called `name`. Parameters as of `systemd`."""
    return plistlib.dumps(
        {
            "Label": name,
            "ProgramArguments": ["/bin/sh", "-c", _AGAIN, "sh", *command],
            "WorkingDirectory": str(at),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": STOP_SECONDS,
        }
    )
