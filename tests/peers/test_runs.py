"""Runs whose optimizer has no state, or some parameters without: the trainer that saved one loads what is written.

torch's own planner is strict: a key that is missing fails. Groups, schedule and position come back as they were, and
the next step is that of the run that was not converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.helpers.command import reshard
from tests.peers.deepspeed_side import train
from tests.peers.rank_group import Group
from tests.peers.test_torch_bin import same


class Kind(NamedTuple):
    make: Callable[[Any], torch.optim.Optimizer] | None
    steps: int = 2
    frozen: str = ""
    """``out`` of the optimizer, or ``in`` a group of it."""


KINDS = {
    "sgd": Kind(lambda groups: torch.optim.SGD(groups, lr=0.5)),
    "momentum": Kind(lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5)),
    "momentum before a step": Kind(lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5), 0),
    "adam before a step": Kind(lambda groups: torch.optim.AdamW(groups, lr=0.5), 0),
    "adam": Kind(lambda groups: torch.optim.AdamW(groups, lr=0.5)),
    "frozen": Kind(lambda groups: torch.optim.AdamW(groups, lr=0.5), frozen="out"),
    "frozen in a group": Kind(lambda groups: torch.optim.AdamW(groups, lr=0.5), frozen="in"),
    "no optimizer": Kind(None),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.unused = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.second(self.first(self.embed(x))))
        return y


class Trainer:
    """A small run; no gradient comes to ``unused``."""

    def __init__(self, kind: Kind, form: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.form, self.model = form, Net()
        if kind.frozen == "out":
            self.model.embed.weight.requires_grad_(False)
        own = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = kind.make(groups) if kind.make is not None else None
        if kind.frozen == "in":
            self.model.first.weight.requires_grad_(False)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2) if self.optimizer else None
        self.seen = 0
        for _ in range(kind.steps):
            self.step()

    def step(self) -> None:
        self.seen += 1
        if self.optimizer is not None and self.schedule is not None:
            self.optimizer.zero_grad()
            self.model(torch.tensor([self.seen, 2])).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        out: dict[str, Any] = {"model": self.model.state_dict(), "position": {"seen": self.seen, "shards": [1, 2]}}
        if self.optimizer is not None and self.schedule is not None:
            out |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
            if self.form != "numbered":
                _, out["optimizer"] = get_state_dict(self.model, self.optimizer, options=self._options)
        return out

    @property
    def _options(self) -> StateDictOptions:
        # Not strict: torch does not restore its own saves where a parameter has no state.
        return StateDictOptions(flatten_optimizer_state_dict=self.form == "flattened", strict=False)

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.seen = state["position"]["seen"]
        if self.optimizer is None or self.schedule is None:
            return
        self.schedule.load_state_dict(state["schedule"])
        if self.form == "numbered":
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                options=self._options,
            )  # fmt: skip


def alike(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k, v in a.items():
            alike(v, b[k], f"{where}.{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            alike(x, y, f"{where}.{i}")
    else:
        assert a == b, where


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["named", "numbered", "flattened"])
@pytest.mark.parametrize("name", KINDS)
def test_dcp_to_dcp(name: str, form: str, tmp_path: Path) -> None:
    if name == "no optimizer" and form != "named":
        return
    run = Trainer(KINDS[name], form, 1)
    saved = run.state()
    save(saved, checkpoint_id=tmp_path / "src", no_dist=True)
    reshard(tmp_path / "src", tmp_path / "out", "--to", "dcp", "--sharding-out", 3, "--verify")
    other = Trainer(KINDS[name], form, 2)
    state = other.state()
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    alike(state, saved)
    other.restore(state)
    run.step()
    other.step()
    alike(other.state(), run.state())


DEEPSPEED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "SGD", "states": [], "groups": True, "frozen": True, "schedule": True},
    "sgd of one group": {"optimizer": "SGD", "states": []},
    "adam": {"groups": True, "frozen": True, "schedule": True},
}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_goes_on_without_state(name: str, stage: int, ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """Stages 1 and 2 load a universal checkpoint without moments; stage 3 asks for those of Adam."""
    made = {"stage": stage, **DEEPSPEED[name]}
    held, after = ranks(2).run(train, made, str(tmp_path / "save"))
    done = reshard(tmp_path / "save", tmp_path / "out", "--to", "universal", "--verify")
    assert ("stage 3 does not" in done.err) == (not made.get("states", True))
    config = {"checkpoint": {"load_universal": True}}
    got, then = ranks(3).run(train, {**made, "config": config}, "", str(tmp_path / "out"))
    same(got, held)
    same(then, after)
