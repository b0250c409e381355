"""The planner, and its models of memory, speed, links and pipelines.

Front door: `planner.make_plan`, `partition.Candidate`, `memory` and `budget` (bytes of a stage), `speed.Speedometer`,
`pipeline_model.pick_depth`, `explain.explain`.
"""
