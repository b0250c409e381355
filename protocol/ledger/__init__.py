"""The log of a run as a replicated state machine: the state after each commit, and the rules for the next one.

Front door: `run_state` (`RunState`, `fold`), `rules.check`, `history` (`History`, `why_not_next`), `claims.Claims`,
`access.Access`, `schedule`, `board`, `part_lists`.
"""
