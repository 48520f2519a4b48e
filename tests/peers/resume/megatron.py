"""megatron-core's GPTModel and distributed optimizer train, save and resume as in Megatron-LM. Runs on ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from tests.peers import megatron_ranks
from tests.peers.megatron_ranks import Case
from tests.peers.resume import task
from tests.peers.resume.held import MOMENTS, Bits, Digests, Ran, named
from tests.peers.resume.task import Job, qkv_rows
from tests.peers.resume.torch_side import bits, digested

MULTIPLE = 65
"""Of the vocabulary. Its 130 rows are not padded then: Megatron's softmax counts padding, and no other's has any."""


def run(job: Job, mesh: Mapping[str, Any], form: str, sharding: str = "fully_reshardable") -> Ran:
    """``form``: dist or legacy, of the save; what is loaded says itself what it is."""
    made = _start(job, mesh)
    if job.load:
        # --override-opt_param-scheduler: the trainer's own rates hold, and not those that are saved.
        made.schedule.override_opt_param_scheduler = True
        with torch.no_grad():  # without, megatron-core loads no distributed optimizer of a float32 model
            megatron_ranks.load(made, job.load)
    counters = {"iteration": made.iteration, "consumed_samples": made.args.consumed_train_samples}
    begun, losses, saved = _held(job, made) if job.load else {}, [], {}
    for step in range(job.first, job.last):
        losses.append(_step(made, step))
        if job.save and step + 1 == task.STEPS:
            megatron_ranks.save(made, job.save, form, sharding)
            saved = _held(job, made)
    return Ran(begun, saved, losses, counters)


def _start(job: Job, mesh: Mapping[str, Any]) -> Any:
    adam = {
        "lr": task.LR,
        "min_lr": task.LR,
        "weight_decay": task.DECAY,
        "adam_beta1": task.BETAS[0],
        "adam_beta2": task.BETAS[1],
        "adam_eps": task.EPS,
    }
    dtype = "bfloat16" if job.bf16 else "float32"
    made = megatron_ranks.Trainer(
        Case(job.weights, **mesh, dtype=dtype, optimizer="distributed", multiple=MULTIPLE, adam=adam, overrides={})
    )
    first = load_file(f"{job.weights}/model.safetensors")
    for parameter, place in megatron_ranks.places(made):
        whole = torch.from_numpy(_megatrons(place.name, first, job.model))
        halves = whole.chunk(place.halves, place.axis)
        mine = torch.cat([h.chunk(place.ways, place.axis)[place.index] for h in halves], place.axis)
        with torch.no_grad():
            parameter.copy_(mine)
    made.optimizer.reload_model_params()
    return made


def _step(made: Any, step: int) -> float:
    from megatron.core import parallel_state as ps

    ranks, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    mine = torch.from_numpy(task.sentences(step)).chunk(ranks)[rank]
    losses = megatron_ranks.train(made, mine.tolist())
    counts = bool(losses) and ps.get_tensor_model_parallel_rank() == 0
    total = torch.tensor(losses[0] if counts else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / float(ranks)


def _held(job: Job, made: Any) -> Digests:
    every = megatron_ranks.held(made)
    out: dict[str, Bits] = {}
    for name in [n for n in every if "/" not in n]:
        moments = {k: bits(every[f"optimizer/{k}/{name}"]) for k in MOMENTS if f"optimizer/{k}/{name}" in every}
        step = float(every.get(f"optimizer/step/{name}", torch.zeros(1)).reshape(()))
        weights, master = bits(every[name]), every.get(f"master_weights/{name}")
        full = weights if master is None else bits(master)
        parts = named(
            name, full, None if master is None else weights, moments, step, lambda n, v: _published(n, v, job.model)
        )
        out |= parts
    return digested(out)


_PLACES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "output_layer": "lm_head",
    "decoder.final_layernorm": "model.norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.router": "mlp.gate",
    "linear_fc2": "down_proj",
    "decoder.layers": "model.layers",
    "local_experts.": "",
}


def _published(name: str, array: Bits, model: str) -> dict[str, Bits]:
    """The published tensors of a parameter."""
    return {n: array[rows] for n, rows in _rows(name, model).items()}


def _rows(name: str, model: str) -> dict[str, Any]:
    at = name.removesuffix(".weight")
    for theirs, ours in _PLACES.items():
        at = at.replace(theirs, ours)
    if at.endswith("linear_qkv"):
        return qkv_rows(re.sub(r"self_attention\.linear_qkv$", "self_attn", at), model)
    if at.endswith("linear_fc1"):
        gate, up = (at.replace("linear_fc1", f"{x}_proj") + ".weight" for x in ("gate", "up"))
        n = task.shapes(model)[gate][0]
        return {gate: slice(0, n), up: slice(n, 2 * n)}
    return {f"{at}.weight": slice(0, task.shapes(model)[f"{at}.weight"][0])}


def _megatrons(name: str, first: Mapping[str, Bits], model: str) -> Bits:
    """A parameter, whole, of the published tensors."""
    parts = _rows(name, model)
    outputs = sum(len(first[n]) for n in parts)
    out = np.empty((outputs, *first[next(iter(parts))].shape[1:]), "<f4")
    for n, rows in parts.items():
        out[rows] = first[n]
    return out
