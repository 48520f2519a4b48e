"""Slices of every architecture: what comes out is loaded whole, and computes what the layers computed where they were.

The judge takes the layers of a model apart in transformers and puts them together in the order of the slices, with the
lists of its config, and compares the logits of that with those of the merged checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.helpers.command import Done, ckpttool  # noqa: E402
from tests.peers.families.forward import compute, difference, inputs, load, runnable  # noqa: E402
from tests.peers.families.tiny import Architecture, architectures, find, save, tiny_config  # noqa: E402

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
TEXTS = ("text_config", "llm_config", "thinker_config", "decoder")
LONGER = 5
NOT_OF_LAYERS = {"quantiles"}
ALWAYS_LISTED = {"layer_types", "mlp_layer_types", "layers_block_type"}
MASKED_BY = {"attn_layer_period", "attn_layer_offset"}
"""Fields by which a model chooses the masks that it gives to its layers; the layers are those that they were."""


def text_part(config: Any) -> tuple[str, Any]:
    """The part of a config that is the language model's, and the path that leads to it."""
    path = ""
    while inner := next((n for n in TEXTS if hasattr(getattr(config, n, None), "to_dict")), None):
        config, path = getattr(config, inner), f"{path}{inner}."
    return path, config


def counted(config: Any) -> str:
    return next((n for n in COUNTS if isinstance(config.__dict__.get(n), int)), "")


def listed(architecture: Architecture) -> set[str]:
    """Fields of a config's language model with an entry for each layer, as its class makes them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _, config = text_part(CONFIG_MAPPING[architecture.model_type]())
    count = config.__dict__.get(counted(config), 0)
    lists = {k: v for k, v in config.__dict__.items() if isinstance(v, list)}
    return {k for k, v in lists.items() if len(v) == count and k not in NOT_OF_LAYERS} | ALWAYS_LISTED


def longer(architecture: Architecture) -> dict[str, Any]:
    """Changes that give a tiny model some more layers."""
    path, config = text_part(tiny_config(architecture.model_type, None, architecture.group))
    field = counted(config)
    count = config.__dict__.get(field, 0)
    if not field or count >= LONGER - 1:
        return {}
    out: dict[str, Any] = {f"{path}{field}": LONGER}
    for name in listed(architecture):
        if value := config.__dict__.get(name):
            numbers = [*range(LONGER)] if value == [*range(count)] else (value * LONGER)[:LONGER]
            out[f"{path}{name}"] = numbers
    return out


def in_order(model: Any, count: int, order: list[int], lists_of: set[str]) -> None:
    """Put the layers of a model's language model in another order."""
    part = runnable(model)
    lists = {
        name: m
        for name, m in part.named_modules()
        if isinstance(m, torch.nn.ModuleList)
        and len(m) == count
        and not any(w in name for w in ("visi", "visual", "audio", "experts", "tower"))
    }
    lists = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    if len(lists) > 1:
        lists = {n: m for n, m in lists.items() if "encoder" not in n} or lists
    if len(lists) != 1:
        raise LookupError(f"{len(lists)} lists of layers")
    ((name, layers),) = lists.items()
    parent = part.get_submodule(name.rpartition(".")[0])
    _, config = text_part(part.config)
    moved = [deepcopy(layers[i]) for i in order]
    for i, layer in enumerate(moved):
        for m in layer.modules():
            for attribute in ("layer_idx", "layer_id", "layer_number"):
                if isinstance(m.__dict__.get(attribute), int):
                    m.__dict__[attribute] = i
            if hasattr(m, "config"):
                m.config = config
    setattr(parent, name.rpartition(".")[2], torch.nn.ModuleList(moved))
    for key, value in list(config.__dict__.items()):
        if isinstance(value, list) and key in lists_of and len(value) == count:
            config.__dict__[key] = [value[i] for i in order]
        elif isinstance(value, list) and value and all(type(v) is int and v < count for v in value) and "layer" in key:
            config.__dict__[key] = [i for i, source in enumerate(order) if source in value]
    if field := counted(config):
        config.__dict__[field] = len(order)
    for m in part.modules():
        for key in ("cross_attention_layers",):
            if isinstance(m.__dict__.get(key), list):
                m.__dict__[key] = config.__dict__[key]


def judge(architecture: Architecture, folder: Path, *, mixed: bool) -> str:
    """ok, refused (with the error), wrong or skipped, for an architecture with its layers in another order, or with one
    left out and the first one twice."""
    cls = getattr(transformers, architecture.cls)
    source = folder / "m"
    try:
        saved(architecture, source)
        model = load(cls, source)
        part = runnable(model)
        _, config = text_part(part.config)
        count = int(config.num_hidden_layers)
    except Exception as e:  # noqa: BLE001 - of many classes
        return f"skipped: {type(e).__name__} {str(e)[:100]}"
    order = [2, 3, 0, 4] if count > 4 else [count - 1, *range(count)]
    if not mixed:
        order = [0, 0, *range(2, count)]
    done = sliced(source, order, folder / "out")
    if done.code:
        return f"refused: {done.err.strip()[:300]}"
    try:
        out = runnable(load(cls, folder / "out"))
        given = inputs(part)
        found = compute(out, given)
    except Exception as e:  # noqa: BLE001 - what transformers says of a wrong config
        return f"wrong: {type(e).__name__} {str(e)[:200]}"
    try:
        in_order(model, count, order, listed(architecture))
        _, config = text_part(part.config)
        config.__dict__ |= {k: v for k, v in text_part(out.config)[1].__dict__.items() if k in MASKED_BY}
        wanted = compute(part, given)
    except Exception as e:  # noqa: BLE001 - modules that cannot stand elsewhere
        return f"skipped: {type(e).__name__} {str(e)[:100]}"
    off = difference(found, wanted)
    return "ok" if off < 1e-4 else f"wrong: logits off by {off:.2g}"


def saved(architecture: Architecture, folder: Path) -> None:
    """Write a tiny model, with more layers if its class allows it. Raises what the class raises."""
    try:
        save(architecture, folder, longer(architecture))
    except Exception:  # noqa: BLE001 - of many classes
        save(architecture, folder)


def sliced(source: Path, order: list[int], out: Path) -> Done:
    """A merge of slices of the language model, which may be one of several stacks."""
    slices = [{"sources": [{"model": str(source), "layer_range": [i, i + 1]}]} for i in order]
    recipe = out.with_suffix(".yml")
    done = Done(1, "", "")
    for stack in ("", "language_model", "decoder", "text_model", "layers"):
        more = {"stack": stack} if stack else {}
        recipe.write_text(json.dumps({"merge_method": "passthrough", "slices": [more | s for s in slices]}))
        done = ckpttool("merge", recipe, "-o", out)
        if done.code == 0 or not re.search(r"does not say which|fits (?:none|\d)", done.err):
            break
    return done


EXPECTED = {
    **dict.fromkeys(("bamba", "gemma3_text", "gpt_neo", "jamba", "llama4_text", "nemotron_h"), ("ok", "ok")),
    **dict.fromkeys(("kimi_linear", "qwen3_next", "smollm3"), ("ok", "ok")),
    "deepseek_v3": ("refused", "ok"),
    "ernie4_5_moe": ("refused", "ok"),
    "minicpm3": ("refused", "ok"),  # as many layers as before
    **dict.fromkeys(("beam", "diffllama", "gemma3n_text", "modernbert-decoder", "zamba2"), ("refused", "refused")),
}
"""What becomes of layers in another order, and of some of them in theirs."""
TIED = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus"),
    *("plbart", "trocr"),
}
"""Decoders alone whose only embedding any merge writes under the name that it has in the whole model."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: what is computed here is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "dropped"])
def test_layers_are_what_they_were(name: str, mixed: bool, tmp_path: Path) -> None:
    (architecture,) = (a for a in find(name) if a.group == "causal")
    result = judge(architecture, tmp_path, mixed=mixed)
    assert result.partition(":")[0] == EXPECTED[name][not mixed], result


OTHERS = [a for a in architectures() if a.group == "causal" and a.name not in {*EXPECTED, *TIED}]


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", OTHERS, ids=lambda a: a.name)
def test_no_architecture_is_wrong(architecture: Architecture, tmp_path: Path) -> None:
    """Many of transformers' are built alike; those above are of every way to tell layers apart."""
    assert not judge(architecture, tmp_path, mixed=True).startswith("wrong")
