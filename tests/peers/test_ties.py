"""All ties of all classes of transformers: what is one tensor in a class is merged once, and nothing else is.

``python -m tests.peers.test_ties`` lists the classes that are not right, which then need a row in
ckpttool/layout/ties.yaml, or a tie in their family.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ckpttool.formats.base import OpenOptions
from ckpttool.layout.ties import FILE
from ckpttool.ops.merge.models import Models
from ckpttool.recipe.model import ModelRef
from tests.peers.families import timm_stub, tiny
from tests.peers.families.settings import PLAIN_HEADS, SETTINGS

DTYPES = {
    "torch.float32": ("F32", 4), "torch.int64": ("I64", 8), "torch.bool": ("BOOL", 1), "torch.float64": ("F64", 8),
    "torch.complex64": ("C64", 8), "torch.int32": ("I32", 4), "torch.bfloat16": ("BF16", 2),
}  # fmt: skip
CHOSEN = [
    ("bart", "BartModel"),
    ("blt", "BltForCausalLM"),
    ("cpmant", "CpmAntForCausalLM"),
    ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion"),
    ("funnel", "FunnelForMaskedLM"),
    ("led", "LEDForConditionalGeneration"),
    ("luke", "LukeForMaskedLM"),
    ("marian", "MarianForCausalLM"),
    ("pix2struct", "Pix2StructForConditionalGeneration"),
    ("pop2piano", "Pop2PianoForConditionalGeneration"),
    ("speech_to_text", "Speech2TextForConditionalGeneration"),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration"),
    ("trocr", "TrOCRForCausalLM"),
    ("udop", "UdopForConditionalGeneration"),
    ("zamba", "ZambaForCausalLM"),
    ("zamba2", "Zamba2ForCausalLM"),
]
"""Of the tests. All classes are a few minutes."""


def classes() -> Iterator[tuple[str, type[Any]]]:
    """All models that can be made without other packages."""
    import transformers.models
    from transformers.modeling_utils import PreTrainedModel

    timm_stub.install()
    for found in pkgutil.iter_modules(transformers.models.__path__):
        for file in sorted(Path(transformers.models.__path__[0], found.name).glob("modeling_*.py")):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(f"transformers.models.{found.name}.{file.stem}")
                for cls in vars(module).values():
                    own = (
                        isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
                    )
                    if own and "__init__" in vars(cls) and cls.config_class:
                        yield found.name, cls


def meta(cls: type[Any], *, tied: bool) -> Any:
    """A small model without memory whose config says of all its parts whether they are tied."""
    import torch

    kind = cls.config_class.model_type
    settings = SETTINGS.get(kind, {})
    try:
        whole = cls.config_class()
    except Exception:  # noqa: BLE001 - a class whose defaults are not valid together
        whole = cls.config_class(**{k: v for k, v in settings.items() if "." not in k and v is not ...})
    fields = tiny.shrink(whole, 8 if kind in PLAIN_HEADS else 16)
    tiny._merge(fields, settings)
    fields.pop("model_type", None)
    config = cls.config_class(**fields)
    _tie(config, tied=tied)
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):
        model = cls(config)
        model.tie_weights()
    return model


def _tie(config: Any, *, tied: bool) -> None:
    with contextlib.suppress(Exception):
        config.tie_word_embeddings = tied
    for part in vars(config).values():
        if tiny._is_config(part):
            _tie(part, tied=tied)


def saved(model: Any, name: str, tensor: Any) -> str:
    """The name in a file."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        names = list(revert_weight_conversion(model, {name: tensor}))
    except Exception:  # noqa: BLE001 - conversions that need other tensors beside it
        return name
    return names[0] if len(names) == 1 else name


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> ModelRef:
    """A checkpoint of zeros, which takes no space."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        dtype, width = DTYPES[str(tensor.dtype)]
        header[name] = {
            "dtype": dtype,
            "shape": [*tensor.shape],
            "data_offsets": [at, at := at + width * tensor.numel()],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelRef(str(folder))


def views(*refs: ModelRef) -> list[set[str]]:
    models = Models(OpenOptions())
    models.open(refs)
    return [set(models[r].views) for r in refs]


def wrong(cls: type[Any], folder: Path, *, tied: bool) -> tuple[int, list[str]]:
    """How many tensors have copies, and what is wrong with them."""
    model = meta(cls, tied=tied)
    state = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    names = {n: saved(model, n, t) for n, t in state.items()}
    stored = {names[n]: t for n, t in state.items()}
    several: list[set[str]] = []
    for group in groups.values():
        held = {names[n] for n in group}
        if len(held) > 1:
            several.append(held)
    copies = model.all_tied_weights_keys
    kept = {names[n]: state[n] for g in groups.values() for n in [next((n for n in g if n not in copies), g[0])]}
    model.config.architectures = [cls.__name__]
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    whole, once = write(folder / "all", config, stored), write(folder / "kept", config, kept)
    (from_all,), (from_kept,), both = views(whole), views(once), views(whole, once)
    out = []
    if lost := stored.keys() - from_all - {n for g in several for n in g}:
        out.append(f"{sorted(lost)[:3]} are taken for copies")
    for one in several:
        left: Sequence[set[str]] = [one & v for v in (from_all, from_kept, *both)]
        if any(len(held_in) != 1 for held_in in left) or left[2] != left[3]:
            out.append(f"{sorted(one)} become {[sorted(held_in) for held_in in left]}")
    return len(several), out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("module", "name"), CHOSEN, ids=[c[1] for c in CHOSEN])
def test_what_is_one_tensor_is_merged_once(tmp_path: Path, module: str, name: str, *, tied: bool) -> None:
    timm_stub.install()
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    count, problems = wrong(getattr(found, name), tmp_path, tied=tied)
    assert problems == []
    assert count > 0 or not tied or name in ("CpmAntForCausalLM", "Pop2PianoForConditionalGeneration")


@pytest.mark.filterwarnings("ignore")
def test_classes_that_are_recorded_are_those_of_transformers() -> None:
    import yaml

    recorded = {*yaml.safe_load(FILE.read_text(encoding="utf-8"))["ties"]}
    assert recorded - {cls.__name__ for _, cls in classes()} == set()


def main() -> None:
    """List what is wrong."""
    done = 0
    for _, cls in classes():
        for tied in (True, False):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    count, problems = wrong(cls, Path(scratch), tied=tied)
                except Exception as e:  # noqa: BLE001 - a class that is not made from its config alone
                    sys.stdout.write(f"{cls.__name__}: not tried, {str(e)[:80]}\n")
                    break
            done += count > 0
            sys.stdout.writelines(f"{cls.__name__}, {tied}: {problem}\n" for problem in problems)
            sys.stdout.flush()
    sys.stdout.write(f"{done} configs of classes have copies\n")


if __name__ == "__main__":
    main()
