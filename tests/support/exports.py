"""Exports of a small model that was not trained, with a tokenizer that llama.cpp knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peer.log import export
from peer.log.replay import State
from peer.net.disk import Disk
from protocol.run import layout
from protocol.run.layout import ModelSpec
from tests.support import tiny
from tests.support.chains import random_theta

TEXTS = ("We the people's 1234 ways, they'LL say: naïve Größe!\n\n  two  spaces\t", "ハムレット 🎉 x=y+z; 3.14 ½")
PLAIN = ModelSpec(vocab_size=300, d_model=64, n_layers=2, n_heads=4, d_ff=96, context=64, rope_theta=500.0)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def tokenizer(
    pre: Any = GPT2, change: Callable[[dict[str, Any]], object] = lambda found: None, whole_words: bool = False
) -> bytes:
    """One of 300 ids, of which 0 ends a text and 1 is a word of its own.

    change: of its file.
    whole_words: whether words of the vocabulary need no merges.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|own|>"]
    made.train_from_iterator(
        TEXTS * 9, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    found = json.loads(made.to_str())
    found["added_tokens"][1]["special"] = False
    found["model"]["ignore_merges"] = whole_words
    change(found)
    return json.dumps(found).encode()


def written(
    folder: Path,
    spec: ModelSpec = PLAIN,
    raw: bytes | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """The folder, with a GGUF file. raw: the tokenizer's file (default: the usual one)."""
    state = State(7, random_theta(spec), dict.fromkeys(layout.shard_names(spec), "0" * 64))
    manifest = tiny.manifest(model=spec, name="a name")
    export.write(manifest, state, tokenizer() if raw is None else raw, folder, Disk(), beside, with_gguf=True)
    return folder
