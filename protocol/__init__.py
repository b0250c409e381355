"""The pure core of Potluck: bytes, events, `now` and seeds in; bytes and effects out.

No sockets, no files, no clock, no randomness and no torch (numpy only). Import order, lowest first:
errors, schema, identity, framing, layout, seeded, subspace, sparse, manifest, messages, planner, quorum, leader, member.
"""
