"""What one TCP connection carries with both directions full: acknowledgements wait behind data, so it is less than a link has.

Plain sockets, nothing of Potluck. `measure` runs one process of this module at each end.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

from tests.lab import Place

SECONDS = 20.0
WARM_UP = 0.25
"""Share of that which does not count: windows open first."""
PORT = 5001


def measure(here: Place, there: Place, seconds: float = SECONDS) -> float:
    """Bits a second of payload in one direction, mean of the two."""
    module = [sys.executable, "-m", "tests.benchmarks.tcp", here[0], str(seconds)]
    ends = [subprocess.Popen([*place[1], *module, role], stdout=subprocess.PIPE, text=True) for place, role in ((here, "serve"), (there, "dial"))]  # fmt: skip
    said = [end.communicate(timeout=seconds + 60)[0] for end in ends]
    return sum(float(text) for text in said) / 2


def main() -> int:
    host, seconds, role = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    with _serve(host) if role == "serve" else _dial(host) as connection:
        begin, received = time.monotonic(), [0]
        threads = [
            threading.Thread(target=_send, args=(connection, begin + seconds)),
            threading.Thread(target=_receive, args=(connection, received)),
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds * WARM_UP)
        since, before = time.monotonic(), received[0]
        time.sleep(max(0.0, begin + seconds - since))
        print(8 * (received[0] - before) / (time.monotonic() - since))
        for thread in threads:
            thread.join()
    return 0


def _serve(host: str) -> socket.socket:
    with socket.create_server((host, PORT)) as server:
        server.settimeout(30)
        return server.accept()[0]


def _dial(host: str) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _send(connection: socket.socket, end: float) -> None:
    block = bytes(1 << 16)
    while time.monotonic() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, received: list[int]) -> None:
    while data := connection.recv(1 << 18):
        received[0] += len(data)


if __name__ == "__main__":
    raise SystemExit(main())
