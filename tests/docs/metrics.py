"""docs/metrics.md, made from the metrics: `python -m tests.docs.metrics` writes it."""

from __future__ import annotations

from pathlib import Path

from peer.ui.metrics import METRICS

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

<!-- made by `python -m tests.docs.metrics` from peer/ui/metrics.py; do not edit -->

`potluck monitor ADDRESS --metrics 9100` serves a run's main figures in Prometheus' text format, under `/metrics`
([guides/watch.md](guides/watch.md)). Each has the label `run`, the first twelve digits of the run's id. What is not
known is left out. There is none for each peer, of which there may be thousands.

Those with a column are kept of each round by `--csv`, `--tensorboard` and `--wandb`, under the column's name; the
newest round is then the row's, and a held-out loss is in the row of the round whose commit brought it.

| metric | type | more labels | column | meaning |
|---|---|---|---|---|
"""


def documentation() -> str:
    """The whole document."""
    rows = (
        (f"`{m.name}`", m.kind, f"`{m.label}`" if m.label else "", f"`{m.column}`" if m.of_round else "", m.about)
        for m in METRICS
    )
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PATH.write_text(documentation(), encoding="utf-8")
