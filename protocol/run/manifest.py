"""The manifest: the immutable description of a run. Its digest is the run id.

Written as TOML and read strictly: an unknown, missing or ill-typed field is refused by name. All that changes the
mathematics or the rules is here; the command line sets what is local to a machine. `[hints]` (addresses) may change
during a run and is not in the digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from protocol import identity
from protocol.codec import blob_hash, formats
from protocol.codec.formats import DENSE, INDICES, TILE, VALUES, Codec
from protocol.errors import UsageError, shown
from protocol.run import hosts, layout
from protocol.run.layout import MAX_CONTEXT, ModelSpec
from protocol.wire import bounds, framing
from protocol.wire.schema import LATER, AtMost, Digest, SchemaError, Within, brief, build

TRAINING_SHARE = 0.8
"""Share of a round's deadline that replicas may train for: the rest is for their offers."""
AGGREGATE_WORTH = 2
"""Least ratio of the updates' bytes to the aggregates' in a round that has aggregates."""
FORMAT = 1
QUORUMS = (1, 4, 7)
"""The numbers of nodes that may decide, 3f + 1: they go on with f of them lost, and f dishonest ones do no harm."""
MAX_MANIFEST_BYTES = 64 * 1024
ADMISSIONS = ("open", "listed")
OPTIMIZERS = ("adamw", "muon")
OUTER_OPTIMIZERS = ("sgd", "nesterov")
MAX_KEYS = 500
MAX_EVALUATED = 1 << 20
EVALUATED_SHARE = 0.06
"""Most sequences measured, as a share of those trained between two evaluations; a third of the cost each."""
EVALUATED_TIME = EVALUATED_SHARE / 3
"""Of a replica's time."""
MAX_MIRRORS = 8
MAX_MIRROR = 512
"""Characters."""
MAX_HINTS = 64
MAX_FILE = 128
"""Characters of a file's name."""
MAX_PEERS, MAX_SEED = 10**6, 2**64 - 1
MAX_CHECKPOINT_ROUNDS = 10_000
"""Peers keep payloads since the last checkpoint, as far as their disk limits let them."""
MAX_INNER_STEPS = 10**6
MAX_MICRO_BATCHES, MAX_ROWS = 1 << 16, 1 << 16
MAX_STEP_TOKENS = 1 << 24
"""Of an inner step, whose text a peer has in memory: 128 MiB."""
MAX_RATE = 10.0
"""Of learning, inner and outer, and of weight decay."""
MAX_CLIP = 1e6
MAX_SCORE_SHARE = 0.5
LEAST_HEARTBEAT = 0.1
LEAST_SECONDS = 1.0
"""Of a round's training, and until a silent process counts as gone."""
MAX_DEADLINE = 30 * 86_400.0
FRAME_HEAD_BYTES = 256
"""Bytes of a frame that a micro-batch's values leave free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """The tokenizer. digest: sha256 (hex) of its JSON file; file: its name beside the manifest or in the package."""

    digest: str
    file: str = ""

    def __post_init__(self) -> None:
        _hex(self.digest, "digest")
        if not (self.file.isprintable() and len(self.file) <= MAX_FILE) or self.file.startswith("."):
            raise ValueError(f"file must have at most {MAX_FILE} printable characters, the first one no dot")
        if "/" in self.file or "\\" in self.file:
            raise ValueError("file must be a plain file name")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The text. corpus: digest of its index (protocol/run/corpus.py); mirrors: `https://…`, `hf://datasets/…`."""

    corpus: str
    mirrors: Annotated[tuple[Annotated[str, AtMost(MAX_MIRROR)], ...], AtMost(MAX_MIRRORS)] = ()

    def __post_init__(self) -> None:
        _hex(self.corpus, "corpus")
        for mirror in self.mirrors:
            plain_text = mirror.isascii() and mirror.isprintable() and " " not in mirror
            if not (plain_text and mirror.startswith(("https://", "hf://"))):
                raise ValueError(f'mirrors must begin with "https://" or "hf://", without blanks, not "{mirror[:80]}"')
            if mirror.startswith("https://") and not _is_on_the_internet(mirror):
                raise ValueError(f'mirrors must be hosts of the internet, not "{mirror[:80]}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The inner optimizer, with global-norm clip, linear warm-up and a cosine to a tenth.

    inner_steps: most of a round; the learning rate counts as many for each round, however many a replica does
    micro_batches x rows: sequences of an inner step, each of `sequence` tokens; slow replicas have fewer
    optimizer: adamw, or muon for the matrices inside blocks; momentum: of Muon (peer/training/optimizer.py)
    """

    inner_steps: Annotated[int, Within(1, MAX_INNER_STEPS)]
    micro_batches: Annotated[int, Within(1, MAX_MICRO_BATCHES)]
    rows: Annotated[int, Within(1, MAX_ROWS)]
    sequence: Annotated[int, Within(1, MAX_CONTEXT)]
    lr: float
    warmup_steps: bounds.Steps
    total_steps: bounds.Steps
    weight_decay: Annotated[float, Within(0, MAX_RATE)] = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    optimizer: str = field(default="adamw", metadata=LATER)
    momentum: float = field(default=0.95, metadata=LATER)

    def __post_init__(self) -> None:
        if self.step_tokens > MAX_STEP_TOKENS:
            raise ValueError(f"micro_batches x rows x sequence must be at most {MAX_STEP_TOKENS}")
        if self.warmup_steps >= self.total_steps:
            raise ValueError("warmup_steps must be less than total_steps")
        if not (0 < self.lr <= MAX_RATE and 0 < self.clip <= MAX_CLIP):
            raise ValueError(f"lr must be more than 0 and at most {MAX_RATE:g}, clip at most {MAX_CLIP:g}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be in [0, 1)")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f'optimizer must be one of {", ".join(OPTIMIZERS)}, not "{self.optimizer}"')
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum must be in [0, 1)")

    def has_one_moment(self, shard: str, shape: Sequence[int]) -> bool:
        """Returns whether Muon trains this tensor, with one moment instead of two: a matrix inside a block."""
        return self.optimizer == "muon" and len(shape) == 2 and shard.startswith("block.")

    @property
    def step_rows(self) -> int:
        """Sequences in one whole inner step of one replica."""
        return self.micro_batches * self.rows

    @property
    def step_tokens(self) -> int:
        return self.step_rows * self.sequence

    def tokens(self, steps: int, micro_batches: int) -> int:
        return steps * micro_batches * self.rows * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSpec:
    """The outer step of SparseLoCo. topk: entries of every 4096; values: their format (protocol/codec/sparse.py).

    transform: of the tiles whose entries are sent, none or dct (protocol/codec/dct.py)
    sample: the share of the elements, another random one in each round, of which the largest are sent (CocktailSGD)

    overlap: 1: replicas train the next round while this one is decided and applied (peer/node/rounds.py)
    optimizer: sgd, or nesterov with `momentum` (DiLoCo, arXiv:2311.08105)
    aggregate_topk: entries of every 4096 of an aggregate (protocol/ledger/aggregation.py); 0: peers add all updates
    """

    topk: int = 32
    values: str = VALUES[0]
    indices: str = INDICES
    beta: float = 0.95
    eta: float = 1.0
    overlap: Annotated[int, Within(0, 1)] = 0
    transform: str = field(default="none", metadata=LATER)
    sample: float = field(default=1.0, metadata=LATER)
    optimizer: str = field(default="sgd", metadata=LATER)
    momentum: float = field(default=0.9, metadata=LATER)
    aggregate_topk: Annotated[int, Within(0, TILE)] = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        is_dense = self.codec.is_dense  # raises where there is no such codec
        if self.indices != INDICES:
            raise ValueError(f'indices must be {INDICES}, not "{self.indices}"')
        if self.optimizer not in OUTER_OPTIMIZERS:
            raise ValueError(f'optimizer must be one of {", ".join(OUTER_OPTIMIZERS)}, not "{self.optimizer}"')
        if self.has_momentum and not is_dense:
            raise ValueError(
                f'optimizer must be sgd where values is "{self.values}": the error feedback of a sparse update is its'
                f" momentum; nesterov needs values = {' or '.join(DENSE)}"
            )
        if self.aggregate_topk and is_dense:
            raise ValueError(
                f'aggregate_topk must be 0 where values is "{self.values}": of dense updates there are none'
            )
        if not 0 < self.momentum < 1:
            raise ValueError("momentum must be more than 0 and less than 1")
        if not (0 <= self.beta <= 1 and 0 < self.eta <= MAX_RATE):
            raise ValueError(f"beta must be in [0, 1], eta more than 0 and at most {MAX_RATE:g}")

    @property
    def codec(self) -> Codec:
        return Codec(topk=self.topk, values=self.values, transform=self.transform, sample=self.sample)

    @property
    def has_momentum(self) -> bool:
        return self.optimizer == "nesterov"

    @property
    def aggregate_codec(self) -> Codec:
        """Of aggregates; only where `aggregate_topk` is not 0."""
        return Codec(topk=self.aggregate_topk)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingSpec:
    """Contribution screening (protocol/round/judging.py).

    clip: most norm, in medians, 0: no limit; agreement: least, as a share of the median's, 0: none
    copies: least cosine of updates that count as one
    score_share: of a replica's time for scoring (protocol/ledger/scoring.py)
    """

    clip: float = 1.0
    agreement: float = 0.1
    copies: float = 0.5
    score_share: Annotated[float, Within(0, MAX_SCORE_SHARE)] = field(default=0.02, metadata=LATER)

    def __post_init__(self) -> None:
        if not ((self.clip == 0 or 0.01 <= self.clip <= 100) and 0 <= self.agreement < 1 and 0 < self.copies <= 1):
            raise ValueError(
                "clip must be 0 or in 0.01..100, agreement at least 0 and less than 1, copies more than 0 and at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """Stage boundaries. forward, backward: number formats of `model.residual_width` values a token."""

    forward: str = "int8"
    backward: str = "int4"

    def __post_init__(self) -> None:
        for name, value in (("forward", self.forward), ("backward", self.backward)):
            if value not in formats.FORMATS:
                raise ValueError(f'{name} must be one of {", ".join(formats.FORMATS)}, not "{value}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSpec:
    """Seconds. round_seconds: training time of a round, 0: TRAINING_SHARE of the deadline, by which it is decided."""

    round_deadline: Annotated[float, Within(LEAST_SECONDS, MAX_DEADLINE)] = 600.0
    round_seconds: float = 0.0
    heartbeat: Annotated[float, Within(LEAST_HEARTBEAT, MAX_DEADLINE)] = 2.0
    gone_after: Annotated[float, Within(LEAST_SECONDS, MAX_DEADLINE)] = 15.0

    def __post_init__(self) -> None:
        if not self.heartbeat < self.gone_after < self.round_deadline:
            raise ValueError("heartbeat < gone_after < round_deadline must hold")
        if self.round_seconds and not LEAST_SECONDS <= self.round_seconds <= TRAINING_SHARE * self.round_deadline:
            raise ValueError(f"round_seconds must be 0 or in {LEAST_SECONDS:g}..{TRAINING_SHARE:g} round_deadline")

    @property
    def training_seconds(self) -> float:
        """Seconds from the beginning of a round to the moment at which replicas offer what they have done."""
        return self.round_seconds or TRAINING_SHARE * self.round_deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSpec:
    """Admission until the operators decree otherwise. mode: "open", or "listed": `keys` only.

    probation: rounds without weight; share: most of a round's weight (protocol/ledger/standing.py)
    range_sessions, range_share: most of a range of addresses, 0 and 1: all (protocol/ledger/ranges.py)
    """

    mode: str = "open"
    keys: tuple[str, ...] = ()
    probation: bounds.Probation = field(default=0, metadata=LATER)
    share: bounds.PartOfAll = field(default=1.0, metadata=LATER)
    range_sessions: bounds.Sessions = field(default=0, metadata=LATER)
    range_share: bounds.PartOfAll = field(default=1.0, metadata=LATER)

    def __post_init__(self) -> None:
        if self.mode not in ADMISSIONS:
            raise ValueError(f'mode must be one of {", ".join(ADMISSIONS)}, not "{self.mode}"')
        if len(self.keys) > MAX_KEYS:
            raise ValueError(f"keys may name at most {MAX_KEYS} peers; admit others with potluck run admit")
        for key in self.keys:
            identity.public_key(key)

    @property
    def is_open(self) -> bool:
        return self.mode == "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """The held-out loss: after `every` so many rounds (0: never), on at most `sequences` sequences."""

    every: Annotated[int, Within(0, MAX_EVALUATED)] = 10
    sequences: Annotated[int, Within(1, MAX_EVALUATED)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HintSpec:
    """The last known multiaddresses of bootstrap nodes, with `/p2p/`. Not part of the run id."""

    bootstrap: Annotated[tuple[bounds.Address, ...], AtMost(MAX_HINTS)] = ()


def is_license(text: str) -> bool:
    """Returns whether this can be the name of a licence, as the Hugging Face hub writes it."""
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,63}", text) is not None


def why_no_quorum(nodes: int) -> str | None:
    """Why this many nodes cannot decide the rounds of a run, None if they can."""
    if nodes in QUORUMS:
        return None
    reason = "cannot decide"
    if nodes in (2, 3):
        reason = "bear no dishonest one, and stop when one is lost"
    elif nodes in (5, 6):
        reason = "bear one dishonest one, as 4 do"
    return f"quorum: {nodes} nodes {reason}; use 1, 4 or 7"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole run.

    license: the model's, as the Hugging Face hub writes it; empty: not said
    operators: ids of the bootstrap nodes; the first `quorum` decide first, the others are spares
    start_peers: ready peers for the first plan; checkpoint_rounds: rounds between checkpoints of a peer
    initial_state: digests of θ(0) by shard, in canonical order; none: θ(0) follows from the seed
    """

    name: str
    license: str = field(default="", metadata=LATER)
    seed: Annotated[int, Within(0, MAX_SEED)]
    rounds: Annotated[int, Within(1, bounds.MAX_ROUNDS)]
    start_peers: Annotated[int, Within(1, MAX_PEERS)]
    operators: tuple[str, ...]
    model: ModelSpec
    tokenizer: TokenizerSpec
    train: TrainSpec
    data: DataSpec
    outer: OuterSpec = field(default_factory=OuterSpec)
    judging: JudgingSpec = field(default_factory=JudgingSpec)
    chains: ChainSpec = field(default_factory=ChainSpec)
    timing: TimingSpec = field(default_factory=TimingSpec)
    admission: AdmissionSpec = field(default_factory=AdmissionSpec)
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    hints: HintSpec = field(default_factory=HintSpec)
    quorum: int = 1
    checkpoint_rounds: Annotated[int, Within(1, MAX_CHECKPOINT_ROUNDS)] = 10
    format: int = FORMAT
    initial_state: tuple[Digest, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known to this version (knows {FORMAT})")
        if not 1 <= len(self.name) <= 64 or not self.name.isprintable():
            raise ValueError("name must have 1 to 64 printable characters")
        if self.license and not is_license(self.license):
            raise ValueError("license must be the name of a licence, written as apache-2.0 or mit")
        if (refused := why_no_quorum(self.quorum)) is not None:
            raise ValueError(refused)
        if not self.quorum <= len(set(self.operators)) == len(self.operators) <= 16:
            raise ValueError("operators must name at least quorum and at most 16 different peer ids")
        for operator in self.operators:
            identity.public_key(operator)
        if self.train.sequence > self.model.context:
            raise ValueError("train.sequence must be at most model.context")
        if self.initial_state and len(self.initial_state) != len(layout.shard_names(self.model)):
            raise ValueError(
                f"initial_state must have a digest of each of the model's {len(layout.shard_names(self.model))} shards"
            )
        if self.initial_state and self.outer.has_momentum:
            raise ValueError("initial_state must be empty where outer.optimizer is nesterov; use sgd")
        if max(self.state_bytes(shard) for shard in layout.shard_names(self.model)) > blob_hash.MAX_BLOB_BYTES:
            raise ValueError(
                "outer.optimizer must be sgd: a shard with its momentum has more bytes than a blob may have"
            )
        tokens, width = self.train.rows * self.train.sequence, self.model.written
        for name in (self.chains.forward, self.chains.backward):
            if not formats.fits(name, width):
                raise ValueError(
                    f"model.residual_width = {width} has no {name}: int4 needs an even number of values per token, tah4"
                    " a multiple of 16"
                )
            if tokens * formats.bytes_per_token(name, width) > framing.MAX_FRAME - FRAME_HEAD_BYTES:
                raise ValueError(
                    f"a micro-batch of {tokens} tokens of {width} values in {name} does not fit in a frame of"
                    f" {framing.MAX_FRAME} bytes; choose smaller train.rows, train.sequence or model.residual_width"
                )

    @property
    def first_members(self) -> tuple[str, ...]:
        return self.operators[: self.quorum]

    @functools.cached_property
    def run_id(self) -> str:
        """sha256 (hex) of the canonical form without `[hints]`. Later fields count only without their defaults."""
        return hashlib.sha256(self._canonical()).hexdigest()

    @functools.cached_property
    def initial_digests(self) -> Mapping[str, str]:
        """Of θ(0), by shard; none if it follows from the seed."""
        return dict(zip(layout.shard_names(self.model), self.initial_state, strict=False))

    def state_shapes(self, shard: str) -> tuple[tuple[int, ...], ...]:
        """The shapes of a shard's tensors, and then those of their momentum, if the outer optimizer has one."""
        return layout.shapes(self.model, shard) * (1 + self.outer.has_momentum)

    def state_bytes(self, shard: str) -> int:
        """The bytes of a shard's state: what its digest is of, and what a newcomer fetches."""
        return layout.shard_bytes(self.model, shard) * (1 + self.outer.has_momentum)

    @property
    def evaluated_sequences(self) -> int:
        """Held-out sequences measured: those of the manifest, or as many as cost about 2 % of a replica's time."""
        trained = self.evaluation.every * self.train.inner_steps * self.train.step_rows
        return max(1, min(self.evaluation.sequences, int(EVALUATED_SHARE * trained)))

    @property
    def seed_bytes(self) -> bytes:
        """The seed of the data order, and of θ(0) unless `initial_state` names that."""
        return b"potluck/" + str(self.seed).encode()

    def sample_seed(self, round: int) -> bytes:
        """The seed of the elements that updates of a round are chosen from, the same ones for all replicas."""
        return self.seed_bytes + f"/sample/{round}".encode()

    def _canonical(self) -> bytes:
        data = brief(self)
        del data["hints"]
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    def to_bytes(self) -> bytes:
        """The form in which a manifest travels: canonical JSON; `from_bytes` reads it."""
        return self._canonical()


def _hex(text: str, name: str) -> None:
    if len(text) != 64 or any(c not in "0123456789abcdef" for c in text):
        raise ValueError(f"{name} must be a sha256 in 64 hexadecimal digits")


def _is_on_the_internet(address: str) -> bool:
    """Returns whether the host of a web address can be one of the internet; a name is resolved when it is asked."""
    try:
        parts = urlsplit(address)
        host, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return False
    is_name = "." in host and host.rpartition(".")[2].isalpha() and not host.endswith((".localhost", ".local"))
    return "@" not in parts.netloc and (is_name or hosts.is_global(host))


def _build(data: Any, source: str) -> Manifest:
    try:
        return build(Manifest, data)
    except SchemaError as error:
        raise UsageError(
            f"manifest {source}: {shown(error.field)}: {shown(error.reason)};"
            " see docs/guides/manifest.md for the fields"
        ) from None


def from_toml(raw: bytes, source: str) -> Manifest:
    """Reads a manifest file's bytes; `source` names it in errors. Raises UsageError."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"manifest {source}: has {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}; is it the right file?"
        )
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"manifest {source}: not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"manifest {source}: not TOML: {shown(error)}; correct that line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise UsageError(f"manifest {source}: {shown(error)}; is it the right file?") from None
    return _build(data, source)


def from_bytes(raw: bytes, source: str) -> Manifest:
    """Reads the travelling form. Raises UsageError."""
    try:
        data = json.loads(raw[: MAX_MANIFEST_BYTES + 1].decode("utf-8")) if len(raw) <= MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError):
        data = None
    return _build(data, source)


def to_toml(manifest: Manifest) -> str:
    return "\n".join(_toml_lines("", brief(manifest))) + "\n"


def _toml_lines(path: str, data: dict[str, Any]) -> Iterator[str]:
    """A table's own fields, then the tables within it; `path`: its name, empty for the whole file."""
    if path:
        yield from ("", f"[{path}]")
    for key, value in data.items():
        if not isinstance(value, dict):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _toml_lines(f"{path}.{key}" if path else key, value)


def parameters(manifest: Manifest) -> int:
    return layout.total_parameters(manifest.model)
