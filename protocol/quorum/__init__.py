"""Byzantine consensus on commits among the operators' nodes.

Front door: `paxos.Quorum`, the events and effects of `paxos_events`, and `table.Table`, which all state machines use.
"""
