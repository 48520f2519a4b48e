"""The Trainer of paddlenlp or paddleformers does a job: what a ``paddle_server`` runs. In ``.venv-paddle`` only.

Model, optimizer, loop, saving and loading are the Trainer's. The loss is that of the other frameworks. For bfloat16
Paddle has next to no kernels on processors: the model then computes in float32, with its weights of bfloat16, and
AdamW's kernel for float32 works on the masters, as that for bfloat16 does on a GPU.
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
from safetensors.numpy import load_file

from tests.peers.paddle_software import on_the_processor, only_checkpoints, save
from tests.peers.resume import task
from tests.peers.resume.paddle_device import Twin, adamw_of_masters, collectives, without_paddlefleet
from tests.peers.resume.paddle_names import structured

SOFTWARE = os.environ["CKPTTOOL_PADDLE_SOFTWARE"]
NLP = SOFTWARE == "paddlenlp-3.0"
if NLP:
    only_checkpoints()
    from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    MODELS = {"llama": (LlamaConfig, LlamaForCausalLM)}
else:
    from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

    MODELS = {"llama": (LlamaConfig, LlamaForCausalLM)}
    if SOFTWARE == "paddleformers-1.2":
        without_paddlefleet()
        from paddleformers.transformers.qwen3_moe.configuration import Qwen3MoeConfig
        from paddleformers.transformers.qwen3_moe.modeling import Qwen3MoeForCausalLMDeprecated as Qwen3MoeForCausalLM
    else:
        from paddleformers.transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    MODELS["qwen3_moe"] = Qwen3MoeConfig, Qwen3MoeForCausalLM

NOT_OF_THE_MODEL = ("architectures", "dtype", "torch_dtype", "model_type")
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


class Nothing(paddle.io.Dataset):  # type: ignore[misc]
    """A trainer wants data; what is learnt is ``task.sentences``."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.arange(4)}


class Training(Trainer):  # type: ignore[misc]
    job: dict[str, Any]
    step: int
    losses: list[float]
    twin: Twin | None

    def create_optimizer(self, lr_scheduler: Any = None) -> Any:
        """With decay of everything, where theirs has none for norms."""
        optimizer = super().create_optimizer(lr_scheduler)
        optimizer._apply_decay_param_fun = None
        return optimizer

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if self.twin is None:
            return super().training_step(model, inputs, *rest, **named)
        loss = self.compute_loss(self.twin.refresh(), inputs)
        loss.backward()
        self.twin.hand_over()
        return loss.detach()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False) -> Any:
        ranks, rank = self.args.dataset_world_size, self.args.dataset_rank
        tokens = np.array_split(task.sentences(self.step), ranks)[rank]
        out = model(input_ids=paddle.to_tensor(tokens[:, :-1]))
        logits = out[0] if isinstance(out, (list, tuple)) else getattr(out, "logits", out)
        wanted = paddle.to_tensor(tokens[:, 1:])
        loss = paddle.nn.functional.cross_entropy(
            logits.astype("float32").reshape([-1, logits.shape[-1]]), wanted.reshape([-1])
        )
        total = loss.detach().clone()
        if ranks > 1:
            paddle.distributed.all_reduce(total)
        self.losses.append(float(total) / ranks)
        return loss


class Steps(TrainerCallback):  # type: ignore[misc]
    """Counts steps, writes what is held, saves and ends the run."""

    trainer: Training

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _write(self.trainer, "begun")
        self.begun_at = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        job, trainer = self.trainer.job, self.trainer
        trainer.step += 1
        control.should_save = bool(job["save"]) and trainer.step == task.STEPS
        control.should_training_stop = trainer.step == job["last"]
        if control.should_save:
            _write(trainer, "saved")


def arguments(job: dict[str, Any]) -> Any:
    """Options of the trainer: the parallel sizes, and the format of the checkpoint."""
    tp, sharding, flat = job["tp"], job["sharding"], job["version"] == "v2"
    options: dict[str, Any] = {
        "output_dir": job["save"] or job["out"] + ".output",
        "device": "cpu",
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 1000,
        "save_steps": 10**9,
        "logging_steps": 10**9,
        "max_grad_norm": 0.0,
        "learning_rate": task.LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": task.BETAS[0],
        "adam_beta2": task.BETAS[1],
        "adam_epsilon": task.EPS,
        "weight_decay": task.DECAY,
        "per_device_train_batch_size": task.BATCH // sharding,
        "ignore_data_skip": True,
        "bf16": job["bf16"],
        "fp16_opt_level": "O2" if job["bf16"] else "O1",
    }
    options["amp_master_grad"] = job["bf16"]
    if sharding > 1:
        options["sharding"] = "stage1"
    if NLP:
        options |= {"tensor_parallel_degree": tp, "pipeline_parallel_degree": 1}
        options |= {"unified_checkpoint": job["format"] == "unified_checkpoint"}
    else:
        options |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1}
        options |= {"load_checkpoint_format": job["format"], "save_checkpoint_format": job["format"]}
    if sharding > 1:
        options["load_sharded_model"] = job["format"] == "sharding_io"
        if SOFTWARE == "paddleformers-1.2":
            options |= {"sharding_parallel_size": sharding, "split_param": flat}
            options["load_sharded_model_remap_parameter_name"] = options["load_sharded_model"]
        else:
            options |= {"sharding_parallel_degree": sharding, "save_sharded_model": options["load_sharded_model"]}
            options["sharding_parallel_config"] = "split_param" if flat else ""
    return TrainingArguments(**options)


def built(job: dict[str, Any], args: Any, dtype: str) -> Any:
    """The model with the first weights."""
    config_class, model_class = MODELS[job["model"]]
    values = {k: v for k, v in task.CONFIGS[job["model"]].items() if k not in NOT_OF_THE_MODEL}
    config = config_class(**values)
    setattr(config, "tensor_parallel_degree" if NLP else "tensor_model_parallel_size", job["tp"])
    for name in ("fuse_attention_qkv", "fuse_attention_ffn"):
        setattr(config, name, False)
    config.tensor_parallel_output = False
    config.tensor_parallel_rank = args.tensor_parallel_rank
    if not NLP:
        config._attn_implementation = "eager"
        config.fuse_rms_norm = False
    paddle.set_default_dtype(dtype)
    model = model_class.from_config(config, dtype=dtype)
    paddle.set_default_dtype("float32")
    first = load_file(str(Path(job["weights"]) / "model.safetensors"))
    given = {}
    for name, old in model.state_dict().items():
        array = structured(name, old.shape, first, job["model"], job["tp"], max(args.tensor_parallel_rank, 0))
        if list(array.shape) != list(old.shape):
            raise ValueError(f"{name} is {old.shape}, and would be {array.shape}")
        given[name] = paddle.to_tensor(array).astype(old.dtype)
    model.set_state_dict(given)
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


def _write(trainer: Any, when: str) -> None:
    save(f"{trainer.job['out']}.{when}.rank{os.environ.get('PADDLE_TRAINER_ID', '0')}.npz", held(trainer))


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    on_the_processor()
    collectives()
    adamw_of_masters()
    args = arguments(job)
    if not hasattr(fleet.fleet, "_hcg"):
        fleet.init(is_collective=True)  # flex_checkpoint asks one process for its groups too
    model = built(job, args, "bfloat16" if job["bf16"] else "float32")
    steps = Steps()
    trainer = Training(model=model, args=args, train_dataset=Nothing(), callbacks=[steps])
    trainer.job, trainer.step, trainer.losses = job, job["first"], []
    trainer.twin = Twin(model, built(job, args, "float32")) if job["bf16"] else None
    steps.trainer = trainer
    trainer.train(resume_from_checkpoint=job["load"] or None)
    told = {"losses": trainer.losses, "global_step": steps.begun_at, "lr_step": trainer.lr_scheduler.last_epoch}
    saved = Path(job["save"]) / f"checkpoint-{task.STEPS}"
    if job["save"] and not (saved / "config.json").exists():  # flex_checkpoint leaves it to whoever exports the model
        model.config.save_pretrained(str(saved))
    print("CKPTTOOL", json.dumps(told), flush=True)  # noqa: T201
