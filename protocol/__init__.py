"""The pure core of Potluck: bytes, events, `now` and seeds in; bytes and effects out.

No sockets, files, clock, randomness or torch. Lowest first: errors, identity, wire and codec, run, planning, ledger,
quorum, round. The docstring of each package names its front door.
"""
