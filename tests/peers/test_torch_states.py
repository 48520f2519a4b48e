"""The state of every optimizer of torch, of parameters of every shape that can be one number, there and back.

torch itself trains, saves and loads: a scalar of a parameter (``mu_product`` of NAdam, ``eta`` of ASGD) and a state of
its one element must not be mixed up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tests.helpers.command import ckpttool, reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES: dict[str, tuple[int, ...]] = {"none": (), "one": (1,), "square": (1, 1), "many": (3,), "wide": (2, 3)}


class Model(torch.nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.rand(shape, generator=generator)))

    def loss(self) -> torch.Tensor:
        return torch.stack([((p + 1) ** 2).sum() for p in self.parameters()]).sum()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "NAdam decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {},
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {},
    "RMSprop centered": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD momentum": {"momentum": 0.9},
    "Muon": {},
    "Adafactor": {},
}
NO_STATE_OF_ELEMENTS = {"SGD", "LBFGS", "SparseAdam"}
"""Nothing, one state for all parameters, and what takes no dense gradients."""


def trained(case: str, *, named: bool = True) -> tuple[Model, torch.optim.Optimizer]:
    kind = case.split(maxsplit=1)[0]
    # Muon takes matrices only; Adafactor keeps rows and columns of what has two axes.
    axes = {"Muon": (2,), "Adafactor": (0, 1)}.get(kind, (0, 1, 2))
    model = Model({n: s for n, s in SHAPES.items() if len(s) in axes})
    parameters = model.named_parameters() if named else model.parameters()
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **OPTIMIZERS[case])
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss())
        optimizer.step()
    return model, optimizer


def states(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {n: optimizer.state[p] for n, p in model.named_parameters()}
    return {f"{n}/{k}": torch.as_tensor(v) for n, of in found.items() for k, v in of.items() if v is not None}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].shape == t.shape, name
        assert torch.equal(got[name].double(), t.double()), name


def save(form: str, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    """One of the forms in which torch's optimizers are found."""
    folder.mkdir()
    values = optimizer.state_dict()
    if form == "dcp":
        weights, held = get_state_dict(model, optimizer)
        save_distributed({"model": weights, "optimizer": held}, checkpoint_id=folder, no_dist=True)
    elif form == "one file":
        torch.save({"model": model.state_dict(), "optimizer": values}, folder / "step.pt")
        return folder / "step.pt"
    elif form == "beside safetensors":
        save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
        torch.save(values, folder / "optimizer.pt")
    else:
        for group in values["param_groups"]:
            del group["param_names"]
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(values, folder / "optimizer.pt")
    return folder


def loaded(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """What torch has after loading, into a model and an optimizer whose values are all zero."""
    model, optimizer = trained(case, named=False)
    with torch.no_grad():
        for t in [*model.parameters(), *states(model, optimizer).values()]:
            t.zero_()
    weights, held = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": held}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=held)
    return states(model, optimizer)


def test_every_optimizer_of_torch_is_here() -> None:
    known = {n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n), type)} - {"Optimizer"}
    assert known == {c.split()[0] for c in OPTIMIZERS} | NO_STATE_OF_ELEMENTS


@pytest.mark.parametrize("form", ["beside safetensors", "beside bin, numbered", "one file", "dcp"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_states_of_every_shape(case: str, form: str, tmp_path: Path) -> None:
    model, optimizer = trained(case)
    want = states(model, optimizer)
    src = save(form, model, optimizer, tmp_path / "src")
    for to in ("ranks", "universal"):
        reshard(src, tmp_path / to, "--to", to)
        again = tmp_path / f"{to}-again"
        reshard(tmp_path / to, again, "--to", "ranks")
        found = load_file(again / "rank-00000-of-00001.safetensors")
        same({n.removeprefix("optimizer/"): t for n, t in found.items() if n.startswith("optimizer/")}, want)
    reshard(src, tmp_path / "dcp", "--to", "dcp")
    same(loaded(case, tmp_path / "dcp"), want)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS"])
def test_states_that_are_not_of_elements_are_refused(kind: str, tmp_path: Path) -> None:
    model = Model(SHAPES)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
    (tmp_path / "src").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "src" / "step.pt")
    done = ckpttool("reshard", tmp_path / "src" / "step.pt", tmp_path / "dst", "--to", "dcp")
    assert (done.code, "omit the optimizer with --only model" in done.err) == (1, True)
