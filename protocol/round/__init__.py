"""The state machines of a round: the leading node's and a volunteer's, and the rules that they share.

Front door: `leader.Leader` with `leader_events`, `member.Member` with `member_events`, `fairness` (votes on commits),
`judging.judge` (contribution screening), `handover` (error feedback that moves).
"""
