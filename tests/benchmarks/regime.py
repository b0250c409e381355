"""The training that experiments with learning share: the demo's speeches by bytes (docs/results/learning.md).

A model of the demo's width with 257 token ids (bytes, and the end of a document) and sequences of 256 reads 2,048 bytes
an inner step. Training is so long that context matters: the loss ends far below the bigram entropy of the text, and a
cut that passes little context costs loss. Control arms check this. In one, attention sees the present token only; in
others each of three cuts passes 4, 16 or 64 values a token.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from filelock import FileLock

from peer.config import cache_folder
from peer.corpus import sources
from peer.corpus.build import Request, build
from peer.corpus.text import CorpusReader
from peer.demo import recipe
from peer.net.disk import Disk
from protocol.run.corpus import INDEX
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from tests.e2e.swarms import options

END = "<|endoftext|>"
SEQUENCE = 256
MODEL = ModelSpec(vocab_size=257, d_model=128, n_layers=4, n_heads=4, d_ff=352, context=SEQUENCE)
INNER_STEPS, ROUNDS = 15, 60
ROWS = 8
RATES = {"adamw": 3e-3, "muon": 6e-3}


@cache
def tokenizer() -> bytes:
    """Returns a tokenizer whose tokens are the 256 bytes and the end of a document."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    return made.to_str().encode()


@cache
def text(sequence: int = SEQUENCE, name: str = "sotu") -> CorpusReader:
    """Returns a source, the speeches if none is named, by bytes, from the user's cache folder."""
    source, disk = sources.parse(name), Disk()
    key = json.dumps([sources.fingerprint(source), hashlib.sha256(tokenizer()).hexdigest(), sequence])
    folder = cache_folder() / f"bytes-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / INDEX).exists():
            request = Request(
                sources=(source,), tokenizer=tokenizer(), sequence=sequence, out=folder, workers=os.cpu_count() or 1
            )
            build(request, disk, lambda line: None, threading.Event())
    return CorpusReader(folder, disk)


def bigram_entropy(of: CorpusReader | None = None) -> float:
    """Returns nats per token of the held-out text under its own bigram counts, a bound for models of pairs."""
    windows = (of or text()).held_out(10**9).astype(np.int64)
    first, second = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    total = np.bincount(first)
    pairs, counts = np.unique(first * (windows.max() + 1) + second, return_counts=True)
    return float(-(counts * np.log(counts / total[pairs // (windows.max() + 1)])).sum() / first.size)


def manifest(seed: int, optimizer: str, rounds: int = ROUNDS, model: ModelSpec = MODEL) -> Manifest:
    """Returns the demo's recipe with another text, model, optimizer and pace. It names no corpus."""
    made = recipe.make_manifest(options(Path("run"), full=1, rounds=rounds, seed=seed), "0" * 64, MODEL)
    train = replace(
        made.train, inner_steps=INNER_STEPS, micro_batches=1, rows=ROWS, sequence=model.context, optimizer=optimizer,
        lr=RATES[optimizer], warmup_steps=rounds * INNER_STEPS // 20, total_steps=rounds * INNER_STEPS,
    )  # fmt: skip
    return replace(made, model=model, train=train)
