"""One rank of a tensor-parallel transformers model, fed with one rank's file: the judge of the layout rules.

``rank_group.py`` forks a process for each rank, which gets a list of jobs. For each it builds the transformers model
with the sizes that a rank has (heads, key/value heads, widths and vocabulary divided), lets transformers load the
rank's file into it, and runs it as tensor parallelism is defined: an embedding row that lies elsewhere counts as
zero, the outputs of row-parallel layers and of experts are summed over the ranks, the logits are joined. Nothing here
knows the rules under test: a tensor that is cut wrongly does not fit, or gives other logits.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tiny_models import TOKENS

ROW_PARALLEL = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj")
"""Last words of the modules whose input axis is cut, in all families."""


@dataclass(frozen=True)
class Job:
    """A checkpoint that was cut, and how."""

    name: str
    source: str
    """Folder of the whole checkpoint: config.json is read from it."""
    cut: str
    """Folder of the rank files."""
    tp: int
    ep: int = 1
    etp: int = 1
    by_hand: bool = False
    """Put tensors into the model one by one: from_pretrained knows no model of these sizes (experts shared out, or
    a hidden size that is not heads times head size)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a tensor-parallel layer, and those that share a layer of experts."""

    rank: int
    job: Job
    tp: dist.ProcessGroup
    experts: dist.ProcessGroup

    @property
    def tp_index(self) -> int:
        return self.rank % self.job.tp

    @property
    def etp_index(self) -> int:
        return self.rank % self.job.etp

    @property
    def ep_index(self) -> int:
        return self.rank // self.job.etp % self.job.ep


def local_config(config: Any, job: Job) -> Any:
    """The config of the model that one rank holds."""
    out = copy.deepcopy(config)
    latent = getattr(config, "kv_lora_rank", None) is not None
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not latent:  # where the head size is not given it follows from the heads, of which there are fewer now
        out.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    out.num_attention_heads = heads // job.tp
    if hasattr(config, "num_key_value_heads"):
        out.num_key_value_heads = max(kv_heads // job.tp, 1)
    only_experts = config.model_type in ("mixtral", "gpt_oss")
    for name, ways in (
        ("intermediate_size", job.etp if only_experts else job.tp),
        ("n_inner", job.tp),
        ("moe_intermediate_size", job.etp),
        ("shared_expert_intermediate_size", job.tp),
    ):
        if getattr(config, name, None) is not None:
            setattr(out, name, getattr(config, name) // ways)
    out.vocab_size = -(-config.vocab_size // job.tp)
    return out


def file_of(job: Job, rank: int, world: int) -> Path:
    return Path(job.cut, f"rank-{rank:05d}-of-{world:05d}.safetensors")


def load(job: Job, ranks: Ranks, world: int, scratch: Path) -> nn.Module:
    """The rank's model with the rank's file in it; every tensor of both must be used."""
    config = AutoConfig.from_pretrained(job.source)
    if job.by_hand:
        return load_by_hand(job, ranks, world, config)
    folder = scratch / f"{job.name}-{ranks.rank}"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(file_of(job, ranks.rank, world))
    (folder / "generation_config.json").symlink_to(Path(job.cut, "generation_config.json"))
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=local_config(config, job),
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {what: found for what, found in report.items() if found}
    if wrong:
        raise ValueError(f"transformers did not take rank {ranks.rank} of {job.name} as it is: {wrong}")
    return model  # type: ignore[no-any-return]


def load_by_hand(job: Job, ranks: Ranks, world: int, config: Any) -> nn.Module:
    """A model whose tensors are replaced by those of the file, whatever their shapes; forward shows if they fit."""
    resized = config.model_type in ("gpt2", "gpt_neox")
    model = AutoModelForCausalLM.from_config(
        config if resized else local_config(config, job), dtype=torch.float32, experts_implementation="eager"
    )
    state = stacked(load_file(file_of(job, ranks.rank, world)), ranks, config)
    for name, old in list(model.state_dict(keep_vars=True).items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = state.pop(name.replace("lm_head.", "embed_out.") if config.model_type == "gpt_neox" else name)
        # Configs give shared experts the width of the routed ones, which need not be cut as often.
        free = resized or ".experts." in name or ".shared_experts." in name
        if not free and new.shape != old.shape:
            raise ValueError(f"{name} is {list(new.shape)}, the rank's model has {list(old.shape)}")
        parent = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        setattr(parent, name.rpartition(".")[2], value)
    if state:
        raise ValueError(f"rank {ranks.rank} of {job.name} holds what its model does not have: {sorted(state)}")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    if config.model_type == "gpt2":
        for block in model.transformer.h:
            block.attn.num_heads //= job.tp
            block.attn.split_size //= job.tp
            for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                module.nf = module.weight.shape[1]
    return model.eval()  # type: ignore[no-any-return]


def stacked(state: dict[str, torch.Tensor], ranks: Ranks, config: Any) -> dict[str, torch.Tensor]:
    """One tensor per expert, under global numbers, becomes the stack of the experts that the rank holds."""
    out: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in state.items():
        m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if m:
            parts.setdefault(m[1], {}).setdefault(int(m[2]), {})[m[3]] = tensor
        else:
            out[name] = tensor
    for base, experts in parts.items():
        each = config.num_local_experts // ranks.job.ep
        mine = list(range(ranks.ep_index * each, (ranks.ep_index + 1) * each))
        if sorted(experts) != mine:
            raise ValueError(f"{base}: rank {ranks.rank} holds the experts {sorted(experts)} and not {mine}")
        joined = [torch.cat([experts[e]["gate_proj"], experts[e]["up_proj"]]) for e in mine]
        out[f"{base}.gate_up_proj"] = torch.stack(joined)
        out[f"{base}.down_proj"] = torch.stack([experts[e]["down_proj"] for e in mine])
    return out


def parallelise(model: nn.Module, ranks: Ranks, vocab: int) -> None:
    """Put in the sums and joins of tensor parallelism."""
    for name, module in model.named_modules():
        word = name.rpartition(".")[2]
        if word in ROW_PARALLEL:
            keep_once(module, ("bias",), ranks.tp_index)
            module.register_forward_hook(summed(ranks.tp))
        elif word == "experts":
            keep_once(module, ("down_proj_bias",), ranks.etp_index)
            module.register_forward_hook(summed(ranks.experts))
            if ranks.job.ep > 1:
                module.register_forward_pre_hook(own_experts(ranks))
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    rows = embedding.weight.shape[0]
    inside: list[torch.Tensor] = []

    def to_local(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        local = args[0] - ranks.tp_index * rows
        inside[:] = [(local >= 0) & (local < rows)]
        return (local.clamp(0, rows - 1), *args[1:])

    def masked(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        out = out * inside[0].unsqueeze(-1)
        dist.all_reduce(out, group=ranks.tp)
        return out

    def joined(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(out) for _ in range(ranks.job.tp)]
        dist.all_gather(parts, out.contiguous(), group=ranks.tp)
        return torch.cat(parts, -1)[..., :vocab]

    embedding.register_forward_pre_hook(to_local)
    embedding.register_forward_hook(masked)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(joined)


def keep_once(module: nn.Module, names: tuple[str, ...], index: int) -> None:
    """A bias behind a sum is whole on every rank: the first rank adds it."""
    for name in names:
        bias = getattr(module, name, None)
        if bias is not None and index:
            bias.data = torch.zeros_like(bias)


def summed(group: dist.ProcessGroup) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def hook(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.contiguous()
        dist.all_reduce(out, group=group)
        return out

    return hook


def own_experts(ranks: Ranks) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Tokens that were routed to the experts of another rank weigh nothing here."""

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, index, weights = args
        held: Any = module.gate_up_proj
        local = index - ranks.ep_index * held.shape[0]
        mine = (local >= 0) & (local < held.shape[0])
        return hidden, torch.where(mine, local, 0), torch.where(mine, weights, 0.0)

    return hook


def groups(size: int, rank: int, world: int, made: dict[int, list[dist.ProcessGroup]]) -> dist.ProcessGroup:
    """The group of ``size`` neighbours that a rank belongs to; all ranks make all groups, in the same order."""
    if size not in made:
        made[size] = [dist.new_group(list(range(at, at + size))) for at in range(0, world, size)]
    return made[size][rank // size]


def run(jobs: list[Job], folder: Path) -> None:
    """Run all jobs as one rank; the logits of each are written by rank 0, an error by every rank that has it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made: dict[int, list[dist.ProcessGroup]] = {}
    for job in jobs:
        ranks = Ranks(rank, job, groups(job.tp, rank, world, made), groups(job.ep * job.etp, rank, world, made))
        model, error = None, ""
        try:
            model = load(job, ranks, world, folder)
        except Exception:  # noqa: BLE001  whatever it is, the test that asked for the job shows it
            error = traceback.format_exc()
            (folder / f"{job.name}.error{rank}").write_text(error, encoding="utf-8")
        failed = torch.tensor([int(model is None)])
        dist.all_reduce(failed)
        if model is None or failed.item():
            continue
        parallelise(model, ranks, AutoConfig.from_pretrained(job.source).vocab_size)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS), use_cache=False).logits
        if rank == 0:
            save_file({"logits": logits.contiguous()}, folder / f"{job.name}.logits")


def logits_of(name: str, folder: Path) -> Any:
    """The logits of a job. Raises RuntimeError with what its ranks said when it has none."""
    path = folder / f"{name}.logits"
    if not path.exists():
        errors = [p.read_text(encoding="utf-8") for p in sorted(folder.glob(f"{name}.error*"))]
        raise RuntimeError(f"{name} did not run:\n" + "\n".join(errors or ["no rank said why"]))
    return load_file(path)["logits"]
