"""A torch_dist checkpoint to Hugging Face and back with megatron-core: a model in memory, its dist_checkpointing.

    python -m bench.peers.megatron_core WORK patch           megatron-core for CPU in the directory WORK
    python -m bench.peers.megatron_core WORK to-hf SRC DST   load a run on one rank, write safetensors
    python -m bench.peers.megatron_core WORK from-hf SRC DST the other way
    python -m bench.peers.megatron_core WORK same A B        whether two runs hold the same model; says how they differ

``to-hf`` and ``from-hf`` are what is measured. What megatron-core does with files is its own
(tests/peers/megatron_cpu.py); names and fusions are what every such script has.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from tests.peers import megatron_cpu
from tests.peers.megatron_ranks import Case, Trainer, iteration_of, save

CONFIG = "config.json"
NORMS = {"linear_qkv": "input_layernorm", "linear_fc1": "post_attention_layernorm"}
PARTS = {
    "linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "linear_proj": ["self_attn.o_proj"],
    "linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "linear_fc2": ["mlp.down_proj"],
}


def _model(config: Path) -> Trainer:
    """A model on one rank that nothing has initialised."""
    case = Case(str(config), dtype="bfloat16", te=True, transformer={"perform_initialization": False})
    return Trainer(case)


def _load(made: Trainer, run: Path) -> None:
    from megatron.core import dist_checkpointing

    (model,) = made.models
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(iteration_of(run)))
    model.load_state_dict(loaded["model"], strict=False)


def _pairs(made: Trainer) -> Iterator[tuple[str, list[str], torch.Tensor]]:
    """(Megatron's name, names of Hugging Face, parameter)."""
    for name, tensor in made.models[0].named_parameters():
        if not name.startswith("decoder.layers."):
            ends = {"embedding": "model.embed_tokens", "decoder": "model.norm", "output_layer": "lm_head"}
            yield name, [f"{ends[name.split('.')[0]]}.weight"], tensor
            continue
        _, _, layer, _, module, kind = name.split(".")
        parts = [NORMS[module]] if kind == "layer_norm_weight" else PARTS[module]
        yield name, [f"model.layers.{layer}.{part}.weight" for part in parts], tensor


def _apart(name: str, tensor: torch.Tensor, made: Trainer) -> list[torch.Tensor]:
    """The tensors of Hugging Face that one of Megatron's is, as views."""
    if name.endswith("linear_qkv.weight"):
        groups, heads = made.hf["num_key_value_heads"], made.hf["num_attention_heads"]
        each = tensor.view(groups, heads // groups + 2, -1, tensor.shape[-1])
        return [part.flatten(0, 2) for part in torch.split(each, [heads // groups, 1, 1], 1)]
    if name.endswith("linear_fc1.weight"):
        return list(tensor.chunk(2))
    if name.startswith(("embedding", "output_layer")):
        return [tensor[: made.hf["vocab_size"]]]
    return [tensor]


def _to_hf(src: Path, dst: Path) -> None:
    made = _model(src)
    _load(made, src)
    out: dict[str, torch.Tensor] = {}
    for name, names, tensor in _pairs(made):
        out |= dict(zip(names, [t.detach().contiguous() for t in _apart(name, tensor, made)], strict=True))
    dst.mkdir()
    save_file(out, dst / "model.safetensors", {"format": "pt"})
    shutil.copy(src / CONFIG, dst / CONFIG)


def _from_hf(src: Path, dst: Path) -> None:
    made = _model(src)
    with safe_open(src / "model.safetensors", "pt") as f, torch.no_grad():
        for name, names, tensor in _pairs(made):
            parts = [f.get_tensor(n) for n in names]
            if name.endswith("linear_qkv.weight"):
                groups = made.hf["num_key_value_heads"]
                each = [p.view(groups, -1, p.shape[-1]) for p in parts]
                tensor.copy_(torch.cat(each, 1).flatten(0, 1))
            elif name.startswith(("embedding", "output_layer")):
                tensor.zero_()
                tensor[: len(parts[0])].copy_(parts[0])
            else:
                tensor.copy_(torch.cat(parts))
    save(made, str(dst), "dist")
    shutil.copy(src / CONFIG, dst / CONFIG)


def _same(a: Path, b: Path) -> str:
    first, second = _model(a), _model(b)
    _load(first, a)
    _load(second, b)
    others = dict(second.models[0].named_parameters())
    rows = first.hf["vocab_size"]
    wrong = [
        name
        for name, tensor in first.models[0].named_parameters()
        if not torch.equal(tensor[:rows].view(torch.int16), others[name][:rows].view(torch.int16))
    ]
    return f"{len(wrong)} tensors differ" if wrong else ""


def main(work: str, what: str, *paths: str) -> None:
    """One of the commands above."""
    megatron_cpu.install(Path(work))
    if what == "patch":
        return
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/meet", rank=0, world_size=1)
        command: dict[str, Any] = {"to-hf": _to_hf, "from-hf": _from_hf, "same": _same}
        found = command[what](*map(Path, paths))
        dist.destroy_process_group()
    if found is not None:
        print(json.loads(json.dumps(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
