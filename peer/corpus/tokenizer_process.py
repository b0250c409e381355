"""A tokenizer in a process of its own, with limits of processor time and memory.

A tokenizer's file is a program: its normalizers, patterns and decoders can take any time and memory, and it comes with
a run. So a run's tokenizer is read and used in a child, `python -m peer.corpus.tokenizer_process`. The child
answers msgpack messages from its standard input on its standard output, both with their length in front, and ends with
its input.

    -> the tokenizer's file       <- [vocabulary, id of the end of text or nil, its name]
    -> ["decode", ids]            <- text
    -> ["ids", text]              <- ids
    -> ["pieces", texts, begins]  <- [ids of each text]
    -> ["unit", pieces, for each whether a document ends with it, whether the first begins one, bytes of an id]
                                  <- [ids of all pieces (little-endian), how many there are of each piece (int64)]

An answer is [true, answer], or [false, reason]. A request that takes more than its limit ends the child.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from array import array
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import msgpack

from protocol.errors import UsageError, first_line
from protocol.run.layout import ModelSpec
from protocol.wire.endpoints import MAX_TOKENIZER

if TYPE_CHECKING:
    from peer.corpus.tokenizer import TextEncoder

READING_SECONDS, DECODING_SECONDS = 20, 1
"""Of a processor: for the file, and for a request. The largest tokenizers in use take 3 to read."""
ENCODING_SECONDS, ENCODING_BYTES_A_SECOND = 2, 50_000
"""So long, and as long as its text takes at this rate; usual is a million and more."""
READING_BYTES, ENCODING_BYTES, DECODING_BYTES = 64 << 20, 1 << 30, 16 << 20
"""Of memory, above what the child has; for the file READING_TIMES its size more."""
READING_TIMES = 40
MAX_TEXT = 1 << 20
"""Characters of decoded text."""
MAX_ANSWER = 256 << 20
_LENGTH = 8
Facts = tuple[int, int | None, str | None]
"""vocabulary, end, end_name."""


class Ended(Exception):
    """The child ended in the middle of a request. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class TokenizerProcess:
    """The tokenizer in a file's bytes; a context manager. Its methods block, one request at a time.

    name: names it in errors
    """

    def __init__(self, raw: bytes, name: str = "tokenizer") -> None:
        if not 0 < len(raw) <= MAX_TOKENIZER:
            raise UsageError(f"{name}: has {len(raw)} bytes, not 1 to {MAX_TOKENIZER}; use another tokenizer.json")
        self._name = name
        self._facts: Facts | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peer.corpus.tokenizer_process", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the library says when it runs out of memory
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        self.close = weakref.finalize(self, _end, self._process)
        with contextlib.suppress(OSError):  # it shows in the first answer
            _send(self._in, raw)

    def __enter__(self) -> TokenizerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def vocabulary(self) -> int:
        """All ids are smaller than this. Raises UsageError."""
        return self._known()[0]

    @property
    def end(self) -> int | None:
        """The id that ends a document. Raises UsageError."""
        return self._known()[1]

    @property
    def end_name(self) -> str | None:
        return self._known()[2]

    def decode(self, ids: Sequence[int]) -> str:
        """Raises UsageError."""
        return str(self._request("decode", list(ids)))

    def ids(self, text: str) -> list[int]:
        """See TextEncoder. Raises UsageError."""
        found: list[int] = self._request("ids", text)
        return found

    def pieces(self, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
        """See TextEncoder. Raises UsageError."""
        found: list[list[int]] = self._request("pieces", list(texts), list(begins))
        return found

    def unit(self, pieces: Sequence[bytes], ends: Sequence[bool], begins: bool, id_bytes: int) -> tuple[bytes, bytes]:
        """Tokenizes the pieces of a unit (peer/corpus/sources.py). Raises Ended, UsageError."""
        ids, lengths = self._ask("unit", pieces, ends, begins, id_bytes)
        return ids, lengths

    def _known(self) -> Facts:
        try:
            return self._read()
        except Ended:
            raise self._too_dear("to read it") from None

    def _request(self, *request: Any) -> Any:
        self._known()
        try:
            return self._ask(*request)
        except Ended:
            raise self._too_dear("to use it") from None

    def _too_dear(self, what: str) -> UsageError:
        return UsageError(
            f"{self._name}: {what} takes more time or memory than other tokenizers take; use another run, and tell the"
            " operators of this one"
        )

    def _read(self) -> Facts:
        """Waits until the file was read. Raises Ended, UsageError."""
        if self._facts is None:
            vocabulary, end, end_name = self._answer()
            self._facts = vocabulary, end, end_name
        return self._facts

    def _ask(self, *request: Any) -> Any:
        """Raises Ended, UsageError."""
        self._read()
        with contextlib.suppress(OSError):  # it shows in the answer
            _send(self._in, msgpack.packb(request))
        return self._answer()

    def _answer(self) -> Any:
        """Raises Ended, UsageError."""
        assert self._process.stdout is not None
        try:
            raw = _receive(self._process.stdout, MAX_ANSWER)
        except (OSError, ValueError):  # ValueError: it was closed meanwhile
            raw = b""
        if not raw:
            self._process.kill()
            raise Ended(self._process.wait())
        is_good, answer = msgpack.unpackb(raw)
        if not is_good:
            raise UsageError(answer)
        return answer

    @property
    def _in(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


def check_document_end(model: ModelSpec, raw: bytes) -> None:
    """Raises UsageError if the model's `document_end_id` is not what this tokenizer ends documents with."""
    said = model.document_end_id
    if said < 0:
        return
    with TokenizerProcess(raw) as tokenizer:
        end = tokenizer.end
    if said == end:
        return
    what, remedy = (
        ("no id", "leave it out") if end is None else (f"id {end}", f"write {end} under [model], or leave it out")
    )
    raise UsageError(
        f"manifest: document_end_id is {said}, but the run's tokenizer ends documents with {what}; {remedy}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes], limit: int) -> bytes:
    head = pipe.read(_LENGTH)
    size = int.from_bytes(head, "little") if len(head) == _LENGTH else 0
    return pipe.read(size) if size <= limit else b""


# --- the child


def _allow(seconds: int, memory: int) -> None:
    """Limits this process to so much more of a processor, and of memory where the system can say what it has."""
    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


class _Child:
    """Its public methods answer the requests. name: of the tokenizer, in errors."""

    def __init__(self, raw: bytes, name: str) -> None:
        from peer.corpus.tokenizer import parse_tokenizer

        self._most = READING_BYTES + READING_TIMES * len(raw)
        _allow(READING_SECONDS, self._most)
        self._tokenizer = parse_tokenizer(raw, name)

    def facts(self) -> list[Any]:
        from peer.corpus.tokenizer import end_of_text, vocabulary

        end = end_of_text(self._tokenizer)
        return [vocabulary(self._tokenizer), end, None if end is None else self._tokenizer.id_to_token(end)]

    @functools.cached_property
    def _encoder(self) -> TextEncoder:
        from peer.corpus.tokenizer import TextEncoder

        _allow(3 * READING_SECONDS, self._most)  # it makes two copies
        return TextEncoder(self._tokenizer)

    def _encoder_for(self, size: int) -> TextEncoder:
        encoder = self._encoder
        _allow(ENCODING_SECONDS + size // ENCODING_BYTES_A_SECOND, ENCODING_BYTES)
        return encoder

    def decode(self, ids: list[int]) -> str:
        _allow(DECODING_SECONDS, DECODING_BYTES)
        text = str(self._tokenizer.decode(ids))
        if len(text) > MAX_TEXT:
            raise ValueError(f"makes {len(text)} characters of {len(ids)} ids")
        return text

    def ids(self, text: str) -> list[int]:
        return self._encoder_for(len(text)).ids(text)

    def pieces(self, texts: list[str], begins: list[bool]) -> list[list[int]]:
        return self._encoder_for(sum(map(len, texts))).pieces(texts, begins)

    def unit(self, pieces: list[bytes], ends: list[bool], begins: bool, id_bytes: int) -> list[bytes]:
        from peer.corpus.tokenizer import encode

        found = encode(self._encoder_for(sum(map(len, pieces))), pieces, ends, begins)
        ids = array("H" if id_bytes == 2 else "I", itertools.chain.from_iterable(found))
        lengths = array("q", map(len, found))
        if sys.byteorder == "big":
            ids.byteswap()
            lengths.byteswap()
        return [ids.tobytes(), lengths.tobytes()]


def _serve(name: str) -> None:
    """Runs the child process until its input ends."""
    child: _Child | None = None
    while raw := _receive(sys.stdin.buffer, MAX_ANSWER):
        try:
            if child is None:
                child = _Child(raw, name)
                answer = child.facts()
            else:
                method, *arguments = msgpack.unpackb(raw)
                answer = getattr(child, method)(*arguments)
            result = msgpack.packb([True, answer])
        except UsageError as error:
            result = msgpack.packb([False, str(error)])
        except BaseException as error:  # the library's panics are no Exception
            result = msgpack.packb([False, f"{name}: {first_line(error)}; use another tokenizer.json"])
        _send(sys.stdout.buffer, result)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which are for the process that asks us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends us silently when that process has died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.argv[1])
