"""A trainer resumes from a checkpoint: what a ``paddle_server`` does with JOB.json.

The Trainer of paddlenlp or paddleformers loads model, optimizer and scheduler as before any training; where it would
begin, this writes what it holds: ``model/NAME``, ``master_weights/NAME`` and ``optimizer/NAME/STATE`` of this rank, as
.npz. Names are those of the model's parameters. Several ranks are started with the variables of Paddle's launcher.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

from tests.peers.paddle_software import on_the_processor, only_checkpoints, save

SOFTWARE = os.environ["CKPTTOOL_PADDLE_SOFTWARE"]
NLP = SOFTWARE == "paddlenlp-3.0"
if NLP:
    only_checkpoints()
    from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM
else:
    from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

NOT_OF_THE_MODEL = ("architectures", "dtype", "torch_dtype", "paddleformers_version", "paddlenlp_version", "model_type")
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


class LoadedError(Exception):
    """Everything is loaded and training would begin."""


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends the run there."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        raise LoadedError


class Nothing(paddle.io.Dataset):  # type: ignore[misc]
    """A trainer wants data."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.arange(8), "labels": np.arange(8)}


def arguments(job: dict[str, Any]) -> Any:
    """Options of the trainer: the parallel sizes, and the format of the checkpoint."""
    options: dict[str, Any] = {
        "output_dir": job["out"] + ".output",
        "device": "cpu",
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 1000,
        "max_grad_norm": 0.0,
        "bf16": job["bf16"],
        "fp16_opt_level": "O2",
    }
    sharding, flat = job["sharding"] > 1, job["version"] == "v2"
    if sharding:
        options |= {"sharding": "stage1", "amp_master_grad": True}
    if NLP:
        options |= {"tensor_parallel_degree": job["tp"], "pipeline_parallel_degree": job["pp"]}
        options |= {"unified_checkpoint": job["format"] == "unified_checkpoint"}
    else:
        options |= {"tensor_model_parallel_size": job["tp"], "pipeline_model_parallel_size": job["pp"]}
        options |= {"load_checkpoint_format": job["format"], "save_checkpoint_format": job["format"]}
    if sharding:
        options["load_sharded_model"] = job["format"] == "sharding_io"
        if SOFTWARE == "paddleformers-1.2":
            options |= {"sharding_parallel_size": job["sharding"], "split_param": flat}
        else:
            options |= {
                "sharding_parallel_degree": job["sharding"],
                "save_sharded_model": options["load_sharded_model"],
            }
            options["sharding_parallel_config"] = "split_param" if flat else ""
    return TrainingArguments(**options)


def tiny_llama(job: dict[str, Any], args: Any) -> Any:
    """The model that the checkpoint's config.json describes, with values of its own."""
    config = json.loads((Path(job["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    known = LlamaConfig(**{k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL})
    setattr(known, "tensor_parallel_degree" if NLP else "tensor_model_parallel_size", job["tp"])
    for name in ("fuse_attention_qkv", "fuse_attention_ffn"):
        setattr(known, name, config.get(name, False))  # paddlenlp's constructor drops them
    known.tensor_parallel_rank = args.tensor_parallel_rank
    dtype = "bfloat16" if job["bf16"] else "float32"
    paddle.set_default_dtype(dtype)
    model = LlamaForCausalLM.from_config(known, dtype=dtype)
    paddle.set_default_dtype("float32")
    return model


def held(trainer: Any) -> dict[str, Any]:
    """What model and optimizer hold, by structured names."""
    model = trainer.model.state_dict()
    out = {f"model/{k}": v for k, v in model.items()}
    named = {v.name: k for k, v in model.items()}
    state = trainer.optimizer.state_dict()
    for static, master in state.pop("master_weights", {}).items():
        out[f"master_weights/{named[static]}"] = master
    for key, value in state.items():
        kind = next((s for s in STATES if key.endswith("_" + s)), None)
        if kind:
            static = key.removesuffix("_" + kind).removesuffix("_fp32_master_0")
            out[f"optimizer/{named[static]}/{kind}"] = value
    return out


def main() -> None:
    """Resume and write."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    on_the_processor()
    args = arguments(job)
    if not hasattr(fleet.fleet, "_hcg"):
        fleet.init(is_collective=True)  # flex_checkpoint asks one process for its groups too
    model = tiny_llama(job, args)
    trainer = Trainer(model=model, args=args, train_dataset=Nothing(), callbacks=[Stop()])
    try:
        trainer.train(resume_from_checkpoint=job["checkpoint"])
    except LoadedError:
        dtypes = save(f"{job['out']}.rank{os.environ.get('PADDLE_TRAINER_ID', '0')}.npz", held(trainer))
        step = trainer.lr_scheduler.last_epoch
        print("CKPTTOOL", json.dumps({"dtypes": dtypes, "scheduler_step": step}), flush=True)  # noqa: T201
    else:
        raise RuntimeError("the trainer trained")
