"""The guide states the bounds of the manifest's fields and of the options of `potluck init` as the code has them."""

from __future__ import annotations

import copy
import dataclasses
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.models import OptionInfo

from peer.cli import init
from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import framing
from protocol.wire.schema import SchemaError, build, plain
from tests.support import tiny

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "manifest.md").read_text(encoding="utf-8")
FIELDS: list[tuple[str, str, str]] = re.findall(
    r"^\| ((?:\(run\) )?`[\w.]+`) \| (.*?) \| (?:(.*?) )?\|$", GUIDE.partition("### Bounds")[2], re.MULTILINE
)
OPTIONS: list[tuple[str, str, str]] = re.findall(r"^\| `--([\w-]+)` \| (\d+) \| (\d+) \|$", GUIDE, re.MULTILINE)
LARGE = 10**15
"""Is taken where no upper bound is stated."""
SMALL: dict[str, Any] = {
    "model": {"vocab_size": 2, "d_model": 2, "n_layers": 1, "n_heads": 1, "d_ff": 1, "context": 8},
    "train": {"rows": 1, "sequence": 1},
}
"""A manifest in which one field may be as large as its own bound lets it."""
WITH: dict[str, dict[str, Any]] = {
    "n_heads": {"model": {"d_model": 1 << 13, "n_heads": 1 << 12}},
    "num_key_value_heads": {"model": {"d_model": 8, "n_heads": 4}},
    "rope_scaling": {
        "model": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}}
    },
    "quorum": {"operators": [key.peer_id for key in tiny.OPERATORS]},
    "values": {"outer": {"topk": 4096}},
    "sample": {"outer": {"topk": 1}},
    "optimizer": {"outer": {"topk": 4096, "values": "fp32"}},
    "residual_width": {"model": {"d_model": 64, "n_heads": 1}, "chains": {"forward": "bf16", "backward": "bf16"}},
    "forward": {"model": {"d_model": 16, "n_heads": 1}},
    "backward": {"model": {"d_model": 16, "n_heads": 1}},
}
"""What else is changed for one of them."""


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for part in parts:
        for key, value in copy.deepcopy(part).items():
            made[key] = merged(made.get(key) or {}, value) if isinstance(value, dict) else value
    return made


def path_of(name: str) -> list[str]:
    return re.sub(r"\(run\) |`", "", name).split(".")


def base_of(path: list[str]) -> dict[str, Any]:
    more = next((change for word, change in WITH.items() if word in path), {})
    return merged(plain(tiny.manifest()), SMALL, more)


def inner(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for word in path[:-1]:
        data = data[word]
    return data


def takes(path: list[str], value: object) -> bool:
    """Whether a manifest may have this value there."""
    data = base_of(path)
    inner(data, path)[path[-1]] = value
    try:
        build(Manifest, data)
    except SchemaError:
        return False
    return True


def bound(text: str, path: list[str]) -> tuple[float, bool] | None:
    """The number that a cell states, and whether it is not reached itself."""
    found = re.match(r"(less than |more than )?(?:(-?[\d.]+)(?: of `(\w+)`)?|`([\w.]+)`)", text)
    if found is None:
        return None
    strict, number, of, named = found.groups()
    data = base_of(path)
    if named is not None and "." in named:
        value = inner(data, named.split("."))[named.split(".")[1]]
    elif named is not None:
        value = beside(data, path, named)
    else:
        value = float(number) * (beside(data, path, of) if of else 1)
    return value, strict is not None


def beside(data: dict[str, Any], path: list[str], name: str) -> Any:
    found = inner(data, path)
    if name in found:
        return found[name]
    return next(f.default for f in dataclasses.fields(kind_of(path[:-1])) if f.name == name)


def kind_of(path: list[str]) -> Any:
    kind: Any = Manifest
    for word in path:
        hint = typing.get_type_hints(kind)[word]
        kind = next((k for k in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(k)), None)
    return kind


def is_whole(path: list[str]) -> bool:
    hint = typing.get_type_hints(kind_of(path[:-1]))[path[-1]]
    return hint is int or int in typing.get_args(hint)


def shaped(path: list[str]) -> Callable[[float], object]:
    """How a number becomes a value of the field."""
    return int if is_whole(path) else float


def check_end(path: list[str], text: str, side: int) -> None:
    """`side`: 1 for the upper end, -1 for the lower one."""
    found, value = bound(text, path), shaped(path)
    if found is None:
        assert text in ("", "what fits into a frame"), f"{path}: {text}"
        assert takes(path, value(LARGE)) == (not text)
        return
    end, strict = found
    step = 1 if is_whole(path) else max(1e-9, abs(end) * 1e-9)
    # which numbers fit with d_model and n_heads is another bound
    if path[-1] in ("n_heads", "d_model", "vocab_size", "d_ff", "num_key_value_heads") and side > 0:
        assert not takes(path, value(end + step))
        return
    assert takes(path, value(end)) != strict, (path, end)
    assert takes(path, value(end - side * step)) or not strict, (path, end)
    assert not takes(path, value(end + side * step)), (path, end)


@pytest.mark.parametrize(("name", "least", "most"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_a_field_has_the_bounds_that_the_guide_states(name: str, least: str, most: str) -> None:
    path = path_of(name)
    if least.startswith("one of "):
        allowed = [w if not w.isdigit() else int(w) for w in re.findall(r"`([\w.]+)`", least)]
        assert all(takes(path, value) for value in allowed)
        assert not any(takes(path, value) for value in (max(allowed, key=str) * 2, -1, "", 12) if value not in allowed)
    elif "character" in least:
        assert [takes(path, "x" * n) for n in (0, 1, 64, 65)] == [False, True, True, False]
    elif path == ["operators"]:
        some = [Identity(bytes([9, i] * 16)).peer_id for i in range(17)]
        assert [takes(path, some[:n]) for n in (0, 1, 16, 17)] == [False, True, True, False]
    elif "entries" in least:
        item = {"mirrors": "https://a.example/", "bootstrap": "x", "keys": tiny.OPERATOR.peer_id}[path[-1]]
        most_entries = int(most.split()[0])
        assert [takes(path, [item] * n) for n in (0, most_entries, most_entries + 1)] == [True, True, False]
    elif ", or 0" in least:
        assert takes(path, 0) != ("linear" in least)
        check_end(path, least.partition(",")[0], -1)
        check_end(path, most, 1)
    else:
        check_end(path, least.removesuffix(", each"), -1)
        check_end(path, most.removesuffix(", each"), 1)


def test_every_number_choice_and_list_of_a_manifest_is_in_the_table() -> None:
    def numbers(kind: Any, path: tuple[str, ...]) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for name, hint in typing.get_type_hints(kind).items():
            within = next((k for k in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(k)), None)
            if within is not None:
                found |= numbers(within, (*path, name))
            elif hint in (int, float):
                found.add((*path, name))
        return found

    stated = {tuple(path_of(name)) for name, _, _ in FIELDS}
    assert len(stated) == len(FIELDS)
    assert numbers(Manifest, ()) <= stated


def test_the_bounds_in_the_sentences_are_those_of_the_code() -> None:
    text = " ".join(GUIDE.split())
    assert f"has more than {blob_hash.MAX_BLOB_BYTES / 1e9:.1f} GB" in text
    assert f"a frame of {framing.MAX_FRAME >> 20} MiB" in text
    assert f"at most {manifests.MAX_MANIFEST_BYTES >> 10} KiB" in text
    assert f"is at most {manifests.MAX_STEP_TOKENS}, whose ids are {8 * manifests.MAX_STEP_TOKENS >> 20} MiB" in text
    assert f"is at most {layout.MAX_ROTATIONS}, the values" in text
    assert f"`gone_after` is at least {manifests.LEAST_SECONDS:g} s" in text
    assert f"at most {manifests.MAX_MIRROR} characters, and `tokenizer.file` {manifests.MAX_FILE}" in text
    assert f"to be read {init.MOST_EPOCHS:,} times at most" in text
    assert not takes(["model", "d_model"], 3), "RoPE turns pairs"


def test_the_options_of_init_have_the_bounds_that_the_guide_states() -> None:
    bounds = {}
    for name, hint in typing.get_type_hints(init.InitOptions, include_extras=True).items():
        option = next((given for given in getattr(hint, "__metadata__", ()) if isinstance(given, OptionInfo)), None)
        if option is not None and option.min is not None:
            bounds[name.replace("_", "-")] = (option.min, option.max)
    assert {name: (int(least), int(most)) for name, least, most in OPTIONS} == bounds
