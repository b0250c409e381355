"""A run's model as a folder that the library transformers loads: LlamaForCausalLM, fp32, and the run's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from peer.corpus.tokenizer import end_of_text, parse_tokenizer
from peer.log.replay import State
from peer.net.disk import Disk
from peer.state import tensor_file
from protocol.errors import UsageError
from protocol.run import layout
from protocol.run.manifest import Manifest

WEIGHTS = "model.safetensors"


def config(manifest: Manifest, end: int | None) -> dict[str, object]:
    """What transformers calls the configuration of the run's model. `end`: the id that ends a text."""
    spec = manifest.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_heads,
        "head_dim": spec.d_model // spec.n_heads,
        "max_position_embeddings": spec.context,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": "float32",
    }


def write(manifest: Manifest, state: State, tokenizer: bytes, folder: Path, disk: Disk) -> None:
    """Makes `folder`, which must not exist, or is left as it was. The same state gives the same bytes. Raises UsageError."""
    if folder.exists():
        raise UsageError(f"--out {folder}: is there already; choose another folder")
    spec = manifest.model
    tensors = {
        name: array
        for shard in layout.shard_names(spec)
        for (name, _), array in zip(layout.tensors(spec, shard), state.theta[shard], strict=True)
    }
    parsed = parse_tokenizer(tokenizer, "tokenizer")
    end = end_of_text(parsed)
    about = {
        "format": "pt",
        "run": manifest.run_id,
        "round": str(state.round),
        "state": layout.state_digest(spec, state.digests),
    }
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.context}
    if end is not None:
        words["eos_token"] = parsed.id_to_token(end)
    temporary = folder.with_name(f".{folder.name}.part")
    disk.remove(temporary)
    disk.make_folder(temporary)
    try:
        disk.write(temporary / WEIGHTS, *tensor_file.pieces(tensors, about))
        disk.write(temporary / "tokenizer.json", tokenizer)
        for name, content in (
            ("config.json", config(manifest, end)),
            ("tokenizer_config.json", words),
            ("generation_config.json", {"eos_token_id": end} if end is not None else {}),
        ):
            disk.write(temporary / name, json.dumps(content, indent=1).encode() + b"\n")
        disk.rename(temporary, folder)
    finally:
        disk.remove(temporary)
