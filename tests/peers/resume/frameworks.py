"""The frameworks between which runs move. Another one is another row of ``FRAMEWORKS``.

A framework trains and saves in one mesh, and resumes in another, so that a run that moves to the framework where it
was changes its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.peers.paddle_side import SOFTWARE
from tests.peers.rank_group import Group
from tests.peers.resume import fsdp, megatron, paddle, zero
from tests.peers.resume.held import Ran
from tests.peers.resume.paddle import Way
from tests.peers.resume.task import BETAS, Job


@dataclass(frozen=True)
class Machines:
    """What jobs run on: ranks of torch by their number, and a folder for what a trainer leaves."""

    ranks: Callable[[int], Group]
    folder: Path


Runner = Callable[[Job, Machines], Ran]


@dataclass(frozen=True)
class Side:
    """How a framework runs on one side of a move."""

    mesh: str
    """In words."""
    runs: Runner
    options: tuple[str, ...] = ()
    """Of ``ckpttool reshard``, where this side receives."""


@dataclass(frozen=True, eq=False)
class Framework:
    name: str
    world: str
    """torch, megatron or paddle: what calls optimizer states and weights by the same names."""
    sends: Mapping[str, Side]
    receives: Mapping[str, Side]
    """By model; a model that is not there is in ``without``."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Model -> why it cannot be trained."""
    own_masters: bool = False
    """Its weights are float32 and what the optimizer works on, also where it computes in bfloat16."""
    saved: Callable[[Path], Path] = field(default=lambda folder: folder)
    """The checkpoint, of the folder that a trainer was told to save in."""


def _same(side: Side, *models: str) -> dict[str, Side]:
    return dict.fromkeys(models or ("llama", "qwen3_moe"), side)


# -- torch


def _torch(job: Callable[..., Ran], world: int, **options: Any) -> Runner:
    return lambda asked, machines: machines.ranks(world).run(job, asked, **options)


def _zero(stage: int) -> Framework:
    return Framework(
        f"ZeRO-{stage}",
        "torch",
        _same(Side("2 ranks", _torch(zero.run, 2, stage=stage))),
        _same(Side("4 ranks", _torch(zero.run, 4, stage=stage), ("--to", "universal"))),
    )


FSDP2 = Framework(
    "FSDP2",
    "torch",
    _same(Side("2 ranks", _torch(fsdp.run, 2))),
    _same(Side("4 ranks", _torch(fsdp.run, 4), ("--to", "dcp", "--sharding-out", "4"))),
    own_masters=True,
)


# -- Megatron


def _megatron(world: int, form: str, **mesh: int) -> Runner:
    return _torch(megatron.run, world, mesh={**mesh, "te": form == "dist"}, form=form)


_IMPLEMENTATION = {"megatron-dist": ("--target", "transformer_engine"), "megatron": ("--target", "local")}


def _written(form: str, **mesh: int) -> tuple[str, ...]:
    sizes = [word for k, v in mesh.items() for word in (f"--{k}-out", str(v))]
    return ("--to", form, *sizes, "--vocab-multiple", str(megatron.MULTIPLE), *_IMPLEMENTATION[form])


MEGATRON = Framework(
    "Megatron torch_dist",
    "megatron",
    {
        "llama": Side("tp 2", _megatron(2, "dist", tp=2)),
        "qwen3_moe": Side("ep 2", _megatron(2, "dist", ep=2, etp=1)),
    },
    {
        "llama": Side("tp 2, pp 2", _megatron(4, "dist", tp=2, pp=2), _written("megatron-dist", tp=2, pp=2)),
        "qwen3_moe": Side(
            "pp 2, ep 2", _megatron(4, "dist", pp=2, ep=2, etp=1), _written("megatron-dist", tp=1, pp=2, ep=2)
        ),
    },
)
LEGACY = Framework(
    "Megatron torch",
    "megatron",
    {
        "llama": Side("pp 2", _megatron(2, "legacy", pp=2)),
        "qwen3_moe": Side("pp 2", _megatron(2, "legacy", pp=2)),
    },
    {
        "llama": Side("tp 2, data 2", _megatron(4, "legacy", tp=2), _written("megatron", tp=2, pp=1)),
        "qwen3_moe": Side(
            "ep 2, pp 2", _megatron(4, "legacy", pp=2, ep=2, etp=1), _written("megatron", tp=1, pp=2, ep=2)
        ),
    },
)


# -- Paddle

NLP, OLD, NEW = SOFTWARE


def _trainer(software: str, way: Way) -> Runner:
    def runs(job: Job, machines: Machines) -> Ran:
        number = len([*machines.folder.iterdir()])
        return paddle.run(job, software, way, machines.folder / f"paddle{number}")

    return runs


_ONE_RANK = ("--tp-out", "1", "--pp-out", "1", "--ep-out", "1")
_SHARDED = Way("sharding_io", sharding=2)
FORMERS = Framework(
    "PaddleFormers 1.2",
    "paddle",
    {
        "llama": Side("flex, sharding 2", _trainer(NEW, Way("flex_checkpoint", sharding=2))),
        "qwen3_moe": Side("sharding_io, sharding 2", _trainer(NEW, _SHARDED)),
    },
    {
        "llama": Side(
            "flex, tp 2",
            _trainer(NEW, Way("flex_checkpoint", tp=2)),
            ("--to", "flex", "--tp-out", "2", "--pp-out", "1"),
        ),
        "qwen3_moe": Side(
            "sharding_io, sharding 2",
            _trainer(NEW, _SHARDED),
            ("--to", "hybrid", *_ONE_RANK, "--sharding-out", "2", "--target", NEW),
        ),
    },
    saved=paddle.saved_in,
)
_UNIFIED = ("--to", "unified", "--tp-out", "1", "--pp-out", "1", "--target")
OLDER = Framework(
    "PaddleFormers 0.4",
    "paddle",
    _same(Side("unified, sharding 2", _trainer(OLD, Way("unified_checkpoint", sharding=2)))),
    _same(
        Side(
            "unified, 1 rank",
            _trainer(OLD, Way("unified_checkpoint")),
            (*_UNIFIED, OLD),
        )
    ),
    saved=paddle.saved_in,
)
PADDLENLP = Framework(
    "PaddleNLP 3.0",
    "paddle",
    _same(Side("hybrid, tp 2", _trainer(NLP, Way("sharding_io", tp=2))), "llama"),
    _same(
        Side(
            "unified, 1 rank",
            _trainer(NLP, Way("unified_checkpoint")),
            (*_UNIFIED, NLP),
        ),
        "llama",
    ),
    {"qwen3_moe": "PaddleNLP 3.0.0b4 has no Qwen3-MoE"},
    saved=paddle.saved_in,
)

FRAMEWORKS = (FSDP2, _zero(2), _zero(3), MEGATRON, LEGACY, FORMERS, OLDER, PADDLENLP)


def options(sender: Framework, receiver: Framework, model: str, *, bf16: bool) -> list[str]:
    """Of ``ckpttool reshard``, for a run that moves."""
    out = list(receiver.receives[model].options)
    if "hybrid" in out and "--sharding-out" in out and not bf16:
        out[out.index("--sharding-out") + 1] += ":v1"
    routers = sender.world == "paddle" and receiver.world == "torch" and model == "qwen3_moe"  # are float32 there
    if bf16 and (sender.own_masters or routers) and not receiver.own_masters:
        out += ["--dtype", "bf16"]
    if sender.world == "paddle" and receiver.world != "paddle":
        out += ["--betas", ",".join(map(str, BETAS))]
    if receiver.world == "torch" and sender.world != "torch":
        out += ["--target", "transformers"]
    if sender.world == receiver.world == "paddle":
        out += ["--native-names"]
    return out
