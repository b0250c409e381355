"""The page of tests/benchmarks/evidence.py: the paper's figures, and ours beside them.

An ordering says that one arm ends below another: yes where the mean difference over seeds that both have is below 0 by
more than twice its standard error, no where it is above 0 by as much, else undecided, as with less than three seeds.
Where the paper has no difference: yes if mean and twice the error are within ALIKE, no if the mean is beyond both.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.codec import topk
from protocol.run import layout
from tests.benchmarks.plot import Mark, Panel, svg

if TYPE_CHECKING:
    from tests.benchmarks.evidence_arms import Scale

ALIKE = 0.01
"""The paper's losses have two digits."""
LEAST_SEEDS = 3
Losses = Mapping[str, Mapping[int, Mapping[str, float]]]
"""By arm and seed: plain, through, own."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the paper: what it calls each of our arms, and its loss. The first row is the baseline."""

    title: str
    rows: tuple[tuple[str, str, float | None], ...]
    note: str = ""


TABLES = (
    Table(
        "Tables 1 and 2: cuts of all replicas, and of half of them",
        (
            ("full", "SparseLoCo, 0 %", 2.73),
            ("all 1/8", "PP-Compress, 1/8", 2.84),
            ("half 1/8", "Het-PP-Compress, 1/8", 2.82),
            ("all 1/32", "PP-Compress, 1/24", 2.89),
            ("half 1/32", "Het-PP-Compress, 1/24", 2.88),
            ("all 1/64", "PP-Compress, 1/96", 2.96),
            ("half 1/64", "Het-PP-Compress, 1/96", 2.94),
            ("all 1/768", "PP-Compress, 1/768", 3.07),
            ("half 1/768", "Het-PP-Compress, 1/768", 3.00),
            ("alone", "not in the paper", None),
            ("all 1/8 tuned", "PP-Compress*, 1/8", 2.82),
            ("half 1/8 tuned", "Het-PP-Compress*, 1/8", 2.80),
        ),
        "`alone`: the two full replicas of `half` without the chains, so half of the tokens. `tuned`: warm-up of 20 %,"
        " outer rate 0.8. Width 64 has no 1/24 and 1/96; the nearest are 1/32 and 1/64.",
    ),
    Table(
        "Table 1: 178M parameters",
        (("full", "SparseLoCo, 0 %", 3.07), ("all 1/8", "PP-Compress, 1/8", 3.14), ("half 1/8", "Het, 1/8", 3.12)),
    ),
    Table(
        "Table 3: 20 % more tokens",
        (
            ("full", "SparseLoCo, 10B", 2.73),
            ("half 1/8", "Het-PP-Compress, 10B (Table 1)", 2.82),
            ("all 1/8 +20 %", "PP-Compress, 12B", 2.78),
            ("half 1/8 +20 %", "Het-PP-Compress, 12B", 2.75),
        ),
        "So short a training gains far more by 20 % of tokens than a compute-optimal one: this ordering shows easily.",
    ),
    Table(
        "Table 4: AdamW, H = 1, averaged gradients",
        (
            ("ddp", "AdamW", 2.75),
            ("ddp all 1/8", "PP-Compression, 1/8", 2.81),
            ("ddp half 1/8", "Heterogeneous, 1/8", 2.83),
        ),
    ),
    Table(
        "Table 5: ablations, 1/8",
        (
            ("full", "SparseLoCo (Table 1)", 2.73),
            ("half 1/8", "5a: with adaptation of the embedding", 2.82),
            ("half 1/8 fixed", "5a: without", 2.89),
            ("all 1/8", "5b-d: uniform, none of these", 2.84),
            ("all 1/8 weights", "5b: uniform, weight projection", 2.88),
            ("half 1/8 weights", "5b: heterogeneous, weight projection", 2.87),
            ("all 1/8 grassmann", "5c: uniform, Grassmann", 2.84),
            ("half 1/8 grassmann", "5c: heterogeneous, Grassmann", 2.82),
            ("all 1/8 rowwise", "5d: uniform, modified AdamW", 2.84),
            ("half 1/8 rowwise", "5d: heterogeneous, modified AdamW", 2.82),
        ),
        "The paper gives no equations for Grassmann updates and the modified AdamW; ours are in"
        " `tests/benchmarks/subspace.py`. An embedding of bytes has 257 rows, so 5a has less to lose here.",
    ),
    Table(
        "SparseLoCo (arXiv 2508.15706): densities and baselines",
        tuple(
            (name, words, None)
            for name, words in (
                ("full", "k = 32 of 4096 (0.8 %), 2 bits (sym2)"),
                ("k 64", "k = 64 (1.6 %)"),
                ("k 128", "k = 128 (3.1 %)"),
                ("k 512", "k = 512 (12.5 %)"),
                ("ref2", "k = 32, 2 bits of the reference code"),
                ("fp32", "k = 32, fp32 values"),
                ("diloco", "DiLoCo: dense, Nesterov 0.9, outer rate 0.7"),
                ("ddp", "AdamW, H = 1, averaged gradients"),
            )
        ),
        "Its abstract says that 1 to 3 % density and 2 bits give lower losses than dense updates; it has no figures.",
    ),
    Table(
        "The product's cuts",
        tuple(
            (name, words, None)
            for name, words in (
                ("full", "four full replicas, AdamW"),
                ("full w", "four full replicas whose blocks write w columns"),
                ("all w 1/8", "four chains, int8 and int4"),
                ("half w 1/8", "two full replicas, two chains"),
                ("alone w", "the two full replicas alone"),
                ("all w 1/32", "four chains, int4 both ways"),
                ("half w 1/32", "half of them"),
                ("all w 1/64", "four chains, bf16 both ways"),
                ("half w 1/64", "half of them"),
                ("full muon", "four full replicas, Muon"),
                ("all w 1/8 muon", "four chains, Muon"),
                ("half w 1/8 muon", "two full replicas, two chains, Muon"),
                ("alone w muon", "the two full replicas alone, Muon"),
            )
        ),
        "Fractions are of the bytes of bf16 at a cut, both directions ([adr/0066](../adr/0066-anchors.md)).",
    ),
)


@dataclass(frozen=True, slots=True)
class Ordering:
    """`sum`: arms with a factor each; of their losses the sum is below 0 if the ordering holds, or 0 if `is_alike`.

    table: where the paper's losses are. theirs: the sum in the paper, where it has other arms. kind: of our losses.
    """

    words: str
    sum: Mapping[str, float]
    table: int
    is_alike: bool = False
    theirs: Mapping[str, float] | None = None
    kind: str = "own"

    @property
    def paper(self) -> float | None:
        """The sum of the paper's losses; None where it has not all of them."""
        known = {name: loss for name, _, loss in TABLES[self.table].rows if loss is not None}
        wanted = self.theirs or self.sum
        return sum(factor * known[name] for name, factor in wanted.items()) if wanted.keys() <= known.keys() else None


def _below(table: int, *pairs: tuple[str, str]) -> tuple[Ordering, ...]:
    return tuple(Ordering(f"`{a}` below `{b}`", {a: 1.0, b: -1.0}, table) for a, b in pairs)


def _alike(table: int, *pairs: tuple[str, str]) -> tuple[Ordering, ...]:
    return tuple(Ordering(f"`{a}` as `{b}`", {a: 1.0, b: -1.0}, table, True) for a, b in pairs)


def _gain(ratio: str) -> Mapping[str, float]:
    """What half of the replicas without cuts gain at 1/8, without what they gain at another ratio."""
    return {"all 1/8": 1.0, "half 1/8": -1.0, f"all {ratio}": -1.0, f"half {ratio}": 1.0}


ORDERINGS: dict[str, tuple[Ordering, ...]] = {
    "Table 1": _below(
        0,
        ("full", "all 1/8"),
        ("full", "half 1/8"),
        ("half 1/8", "all 1/8"),
        ("all 1/8 tuned", "all 1/8"),
        ("half 1/8 tuned", "half 1/8"),
    ),
    "Table 2": (
        *_below(
            0,
            ("half 1/32", "all 1/32"),
            ("half 1/64", "all 1/64"),
            ("all 1/8", "all 1/32"),
            ("all 1/32", "all 1/64"),
        ),
        Ordering(
            "`half` gains more over `all` at 1/64 (paper: 1/768) than at 1/8", _gain("1/64"), 0, False, _gain("1/768")
        ),
    ),
    "control, as plain models": tuple(
        replace(ordering, kind="plain")
        for ordering in _below(
            6,
            ("half 1/8", "alone"),
            ("half 1/64", "alone"),
            ("half w 1/8", "alone w"),
            ("half w 1/8 muon", "alone w muon"),
        )
    ),
    "Table 3": _below(
        2, ("half 1/8 +20 %", "half 1/8"), ("half 1/8 +20 %", "all 1/8 +20 %"), ("full", "half 1/8 +20 %")
    ),
    "Table 4": _below(3, ("ddp", "ddp all 1/8"), ("ddp all 1/8", "ddp half 1/8")),
    "Table 5": (
        *_below(4, ("half 1/8", "half 1/8 fixed"), ("all 1/8", "all 1/8 weights"), ("half 1/8", "half 1/8 weights")),
        *_alike(
            4,
            ("all 1/8 grassmann", "all 1/8"),
            ("half 1/8 grassmann", "half 1/8"),
            ("all 1/8 rowwise", "all 1/8"),
            ("half 1/8 rowwise", "half 1/8"),
        ),
    ),
    "SparseLoCo": _below(
        5,
        ("full", "diloco"),
        ("k 64", "diloco"),
        ("k 128", "diloco"),
        ("full", "ddp"),
        ("k 64", "ddp"),
        ("k 128", "ddp"),
        ("full", "ref2"),
        ("full", "fp32"),
    ),
    "the product": _below(
        6,
        ("all w 1/8", "all 1/8"),
        ("half w 1/8", "half 1/8"),
        ("all w 1/32", "all 1/32"),
        ("all w 1/64", "all 1/64"),
        ("all w 1/8", "full"),
        ("half w 1/8", "all w 1/8"),
        ("all w 1/8 muon", "full muon"),
    ),
}
COLOURS = {
    "no cuts": "#7d8590",
    "the paper's cuts, all replicas": "#d1540a",
    "the paper's cuts, half": "#2f81f7",
    "the product's cuts": "#2da44e",
}
PAPER_TOKENS, PAPER_WIDTH, PAPER_PARAMETERS, PAPER_REPLICAS = 10e9, 1536, 512e6, 8
PAPER_ROUNDS, PAPER_STEPS, PAPER_CUTS, PAPER_TOPK = 391, 19_500, 3, 32
"""Of its 512M model: Tables 6 and 9, and section 3."""


# --- what is known


def losses_of(rows: Sequence[Mapping[str, Any]], scale: Scale) -> Losses:
    """Of the arms of a scale, by name and seed."""
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for name in scale.arms:
        key = scale.key(name)
        for row in rows:
            if key.items() <= row.items():
                for place, seed in enumerate(row["seeds"]):
                    three = {kind: row[kind][place] for kind in ("plain", "through", "own")}
                    found.setdefault(name, {})[seed] = three
    return found


def differences(ordering: Ordering, losses: Losses) -> list[float]:
    """The sums of the seeds that all of its arms have."""
    seeds = set.intersection(*(set(losses.get(name, {})) for name in ordering.sum))
    return [sum(f * losses[name][seed][ordering.kind] for name, f in ordering.sum.items()) for seed in sorted(seeds)]


def error(values: Sequence[float]) -> float:
    """Standard error of the mean; infinite for less than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def verdict(values: Sequence[float], is_alike: bool) -> str:
    """Whether an ordering holds: yes, no or undecided."""
    if len(values) < LEAST_SEEDS:
        return f"undecided: n = {len(values)}"
    mean, spread = statistics.mean(values), 2 * error(values)
    if is_alike:
        return "no" if abs(mean) > max(spread, ALIKE) else "yes" if abs(mean) + spread <= ALIKE else "undecided"
    return "yes" if mean < -spread else "no" if mean > spread else "undecided"


def bytes_sent(scale: Scale, name: str) -> float:
    """Bytes that a replica sends in the whole training, mean over replicas: updates by the least size of their indices,
    and what crosses cuts. A full replica is one machine."""
    arm = scale.arm(name)
    made = scale.manifest(arm)
    spec, rounds = made.model, scale.rounds_of(arm)
    share = arm.replicas.count("c") / len(arm.replicas)
    shapes = [(shard, shape) for shard in layout.shard_names(spec) for shape in layout.shapes(spec, shard)]
    update = 0.0
    for shard, shape in shapes:
        copies = 1 + share * len(scale.cuts) * (shard == "anchor")
        update += copies * (_sparse_bytes(shape, made.outer.topk, arm.word("values", "sym2")) if arm.is_sparse else
                            4 * math.prod(shape))  # fmt: skip
    times = rounds * (made.train.inner_steps if "average" in arm.options else 1)
    return update * times + share * len(scale.cuts) * scale.tokens(arm) * arm.cut_bytes(spec)


def _sparse_bytes(shape: tuple[int, ...], keep: int, values: str) -> float:
    tiling = topk.tiling(shape, keep)
    subsets = math.lgamma(tiling.n + 1) - math.lgamma(tiling.keep + 1) - math.lgamma(tiling.n - tiling.keep + 1)
    return (tiling.tiles * subsets / math.log(2) + tiling.entries * (32 if values == "fp32" else 2)) / 8


def paper_bytes(name: str) -> float:
    """As `bytes_sent`, of the paper's 512M model: no quantization, cuts in bf16."""
    words = name.removeprefix("ddp ").split()
    share = {"all": 1.0, "half": 0.5}.get(words[0], 0.0)
    rank = PAPER_WIDTH / float(words[1].partition("/")[2]) if share else 0.0
    cuts = share * PAPER_CUTS * PAPER_TOKENS / PAPER_REPLICAS * 4 * rank
    update = PAPER_PARAMETERS / 4096 * _sparse_bytes((64, 64), PAPER_TOPK, "fp32")
    updates = PAPER_STEPS * 4 * PAPER_PARAMETERS if name.startswith("ddp") else PAPER_ROUNDS * update
    return (1.2 if name.endswith("+20 %") else 1.0) * (updates + cuts)


# --- the page


def group_of(name: str) -> str:
    words = name.removeprefix("ddp ").split()
    if "w" in words:
        return "the product's cuts"
    if words[0] not in ("all", "half"):
        return "no cuts"
    return "the paper's cuts, all replicas" if words[0] == "all" else "the paper's cuts, half"


def picture(losses: Losses, scale: Scale) -> str:
    """Ours over theirs."""
    ours = [
        Mark(name, bytes_sent(scale, name), statistics.mean(x["own"] for x in of.values()), group_of(name))
        for name, of in losses.items()
    ]
    theirs = {name: loss for table in (0, 2, 3, 4) for name, _, loss in TABLES[table].rows if loss is not None}
    marks = [
        Mark(PAPER_NAMES.get(name, name), paper_bytes(name), loss, group_of(name)) for name, loss in theirs.items()
    ]
    return svg(
        [
            Panel(f"Ours: {scale.name} parameters, bytes", "nats per byte of held-out text", ours),
            Panel("The paper: 512M parameters, 10B tokens", "nats per token", marks),
        ],
        COLOURS,
    )


PAPER_NAMES = {"all 1/32": "all 1/24", "half 1/32": "half 1/24", "all 1/64": "all 1/96", "half 1/64": "half 1/96"}


def page(rows: Sequence[Mapping[str, Any]], scales: Sequence[Scale], picture_name: str) -> str:
    """The page in Markdown. The first scale is the one of the picture."""
    main = scales[0]
    parts = [_beginning(rows, main, picture_name), *_scale_tables(losses_of(rows, main), main)]
    for scale in scales[1:]:
        losses = losses_of(rows, scale)
        done = sum(map(len, losses.values()))
        parts.append(f"## {scale.name} parameters, on a GPU\n")
        parts.append(_filled(f"{_regime(rows, scale)} {done} of {scale.wanted} rows are there."))
        parts += [f"#{text}" for text in (_scale_tables(losses, scale) if losses else ())]
    return "\n".join(parts)


def _beginning(rows: Sequence[Mapping[str, Any]], scale: Scale, picture_name: str) -> str:
    losses = losses_of(rows, scale)
    done = sum(map(len, losses.values()))
    paragraphs = (
        '"Heterogeneous Low-Bandwidth Pre-Training of LLMs" (arXiv 2601.02360) and SparseLoCo (arXiv 2508.15706) beside'
        " small models here. `make evidence` writes this page, its picture and its rows: two hours on two cores, and it"
        " goes on where it was stopped. `make evidence-quick` does the first tables with one seed, in a quarter of an"
        " hour; `make evidence-gpu` adds rows of larger models.",
        _regime(rows, scale),
        f"**{done} of {scale.wanted} rows are there**, each an arm and a seed. Losses in the tables are the paper's:"
        " the mean over replicas, each with its own cuts, at θ, on unseen text. Δ: above the table's first row. ±:"
        " standard error over seeds. An ordering holds, yes or no, where the mean difference of seeds is beyond twice"
        " its standard error and there are three seeds or more; else it is undecided.",
    )
    filled = "\n".join(_filled(text) for text in paragraphs)
    return f"# Evidence: the paper's tables again\n\n{filled}\n![Loss by bytes that a replica sends]({picture_name})\n"


def _regime(rows: Sequence[Mapping[str, Any]], scale: Scale) -> str:
    first = scale.arm(scale.arms[0])
    made = scale.manifest(first)
    known = [row for row in rows if row["scale"] == scale.name]
    tokens = scale.tokens(first) * len(first.replicas)
    command = f"--scale {scale.name} --device cuda --corpus FOLDER --keep FILE --page docs/results/evidence.md"
    lines = [
        f"d {scale.width}, {scale.blocks} blocks, {scale.vocabulary} ids, sequences of {scale.sequence}; four replicas,"
        f" chains of four stages; H = {scale.inner_steps}, {scale.rounds} rounds, {tokens / 1e6:.1f}M tokens an arm;"
        f" k = {made.outer.topk} of 4096, β = {made.outer.beta}, η = {made.outer.eta:g}; learning rate"
        f" {scale.rates['adamw']:g} (AdamW), {scale.ddp * scale.rates['adamw']:g} (H = 1),"
        f" {scale.rates['muon']:g} (Muon);"
        " values of updates have 2 bits unless said. An entry can be sent"
        f" {scale.rounds * made.outer.topk / 4096:.1f} times in these rounds,"
        f" {PAPER_ROUNDS * PAPER_TOPK / 4096:.1f} times in the paper's {PAPER_ROUNDS}.",
    ]
    if scale.vocabulary > 257:
        lines.append(f"`python -m tests.benchmarks.evidence {command}`.")
    if known:
        entropy, worst = known[0]["bigram"], max(max(row["own"]) for row in known)
        places = sorted({f"{row['device']}, torch {row['torch']}" for row in known})
        commits = ", ".join(sorted({row["commit"] for row in known}))
        lines.append(
            f"The text's bigram entropy is {entropy:.3f}, and the worst arm ends {abs(entropy - worst):.3f}"
            f" {'below' if worst < entropy else '**above**'} it. Rows: {'; '.join(places)}; commits {commits}."
        )
    return " ".join(lines)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _scale_tables(losses: Losses, scale: Scale) -> list[str]:
    """The orderings, the paper's tables, and all losses, as far as the scale has arms for them."""
    parts = [_orderings(losses, scale)]
    for table in TABLES:
        rows = [row for row in table.rows if row[0] in scale.arms or scale.is_whole]
        if len(rows) > 1 and rows[0] == table.rows[0]:
            parts.append(_table(table, rows, losses))
    return [*parts, _losses(losses, scale)]


def _orderings(losses: Losses, scale: Scale) -> str:
    lines = ["## Orderings\n", "| where | ordering | the paper's difference | ours | seeds | does it hold? |"]
    lines.append("|---|---|---|---|---|---|")
    for where, orderings in ORDERINGS.items():
        for ordering in orderings:
            if not ordering.sum.keys() <= set(scale.arms):
                continue
            found = differences(ordering, losses)
            ours = _with_error(found, "+.3f") if found else "–"
            paper = "–" if ordering.paper is None else f"{ordering.paper:+.2f}"
            holds = verdict(found, ordering.is_alike)
            lines.append(f"| {where} | {ordering.words} | {paper} | {ours} | {len(found)} | {holds} |")
    return "\n".join(lines) + "\n"


def _table(table: Table, rows: Sequence[tuple[str, str, float | None]], losses: Losses) -> str:
    lines = [f"## {table.title}\n"]
    lines += [_filled(table.note)] if table.note else []
    lines += ["| the paper | loss | Δ | ours | loss | Δ | seeds |", "|---|---|---|---|---|---|---|"]
    base, _, base_loss = rows[0]
    for name, words, loss in rows:
        theirs = ["–", "–"] if loss is None else [f"{loss:.2f}", f"{100 * (loss / (base_loss or loss) - 1):+.1f} %"]
        own = losses.get(name, {})
        both = sorted(own.keys() & losses.get(base, {}).keys())
        shares = [100 * (own[seed]["own"] / losses[base][seed]["own"] - 1) for seed in both]
        ours = ["–", "–", "0"]
        if own:
            mean = statistics.mean(x["own"] for x in own.values())
            ours = [f"{mean:.3f}", f"{_with_error(shares, '+.1f')} %" if both else "–", str(len(own))]
        first = "" if name == base else None
        theirs[1] = theirs[1] if first is None else first
        ours[1] = ours[1] if first is None else first
        lines.append(f"| {words} | {' | '.join(theirs)} | `{name}` | {' | '.join(ours)} |")
    return "\n".join(lines) + "\n"


def _losses(losses: Losses, scale: Scale) -> str:
    lines = ["## All losses\n"]
    lines.append(
        _filled("Mean over seeds: `plain`, θ as a plain model; `through`, with a chain's cuts; `own`, the paper's.")
    )
    lines += ["| arm | notation | seeds | plain | through | own | MB a replica |", "|---|---|---|---|---|---|---|"]
    for name, of in losses.items():
        three = [f"{statistics.mean(x[kind] for x in of.values()):.4f}" for kind in ("plain", "through", "own")]
        size = f"{bytes_sent(scale, name) / 1e6:,.2f}"
        lines.append(f"| `{name}` | `{scale.written(name)}` | {len(of)} | {' | '.join(three)} | {size} |")
    return "\n".join(lines) + "\n"


def _with_error(values: Sequence[float], form: str) -> str:
    mean = f"{statistics.mean(values):{form}}"
    return f"{mean} ± {error(values):{form.lstrip('+')}}" if len(values) > 1 else mean


def write(path: Path, rows: Sequence[Mapping[str, Any]], scales: Sequence[Scale]) -> None:
    """Writes the page, and beside it the picture and the rows that both are made of."""
    drawn = path.with_suffix(".svg")
    path.write_text(page(rows, scales, drawn.name), encoding="utf-8")
    drawn.write_text(picture(losses_of(rows, scales[0]), scales[0]), encoding="utf-8")
    path.with_suffix(".jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
