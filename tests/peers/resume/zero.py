"""DeepSpeed's ZeRO trains a model of transformers; it resumes from universal checkpoints. Runs on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tests.peers.deepspeed_side  # noqa: F401  # imports DeepSpeed for processors, before anything else does
from tests.peers.resume import task
from tests.peers.resume.held import MOMENTS, Bits, Digests, Ran, named
from tests.peers.resume.task import Job
from tests.peers.resume.torch_side import bits, digested, loss_of, mean, transformers_model


def run(job: Job, stage: int) -> Ran:
    engine = _start(job, stage)
    if job.load:
        engine.load_checkpoint(job.load)
    counters = {"global_steps": engine.global_steps}
    begun, saved, losses = _held(engine), {}, []
    for step in range(job.first, job.last):
        loss = loss_of(engine, step)
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
        if job.save and step + 1 == task.STEPS:
            engine.save_checkpoint(job.save)
            if not dist.get_rank():
                engine.module.config.save_pretrained(job.save)
            dist.barrier()
            saved = _held(engine)
    engine.destroy()
    return Ran(begun, saved, losses, counters)


def _start(job: Job, stage: int) -> Any:
    import deepspeed

    model = transformers_model(job.weights, torch.bfloat16 if job.bf16 else torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.LR, betas=task.BETAS, eps=task.EPS, weight_decay=task.DECAY
    )
    config = {
        "train_batch_size": task.BATCH,
        "train_micro_batch_size_per_gpu": task.BATCH // dist.get_world_size(),
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": job.bf16},
        "checkpoint": {"load_universal": bool(job.load)},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _held(engine: Any) -> Digests:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out: dict[str, Bits] = {}
    states = [s for s in engine.optimizer.optimizer.state.values() if "step" in s]
    steps = {float(s["step"]) for s in states}
    if len(steps) > 1:
        raise RuntimeError(f"several steps: {steps}")
    for name, p in engine.module.named_parameters():
        shape = getattr(p, "ds_shape", p.shape)
        master = safe_get_full_fp32_param(p)
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            weights = bits(p).reshape(shape)
        moments = {}
        for kind in MOMENTS if steps else ():
            value = safe_get_full_optimizer_state(p, kind)
            if value is not None:
                moments[kind] = bits(value).reshape(shape)
        apart = p.dtype == torch.bfloat16
        full = bits(master).reshape(shape) if master is not None else weights
        out |= named(name, full, weights if apart else None, moments, *steps or (0.0,))
    return digested(out)
