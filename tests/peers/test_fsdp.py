"""Real torch on gloo ranks saves FSDP models in every way; what is read equals what torch gathers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.helpers.command import refused, reshard
from tests.peers.fsdp_ranks import save
from tests.peers.rank_group import Group

Saved = Callable[[str, int], Path]


@pytest.fixture
def saved(ranks: Callable[[int], Group], tmp_path: Path) -> Callable[[str, int], Path]:
    """What a number of ranks saves; beside it ``NAME.safetensors`` is what torch gathers of them."""

    def of(case: str, world: int) -> Path:
        ranks(world).run(save, case, tmp_path / case)
        return tmp_path / case

    return of


def read(folder: Path) -> dict[str, bytes]:
    return {n: t.tobytes() for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def gathered(source: Path) -> dict[str, bytes]:
    return {n: t.tobytes() for n, t in load_file(f"{source}.safetensors").items()}


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("uneven", 3), ("tp_fsdp", 4), ("hsdp", 4), ("named", 2), ("groups", 2), ("tied", 2), ("fsdp1", 3),
        ("fsdp1_mesh", 2),
    ],
)  # fmt: skip
def test_everything_equals_what_torch_gathers(case: str, world: int, saved: Saved, tmp_path: Path) -> None:
    source = saved(case, world)
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert read(tmp_path / "out") == gathered(source)


def test_an_optimizer_of_flat_parameters(saved: Saved, tmp_path: Path) -> None:
    """FSDP1's optimizer.state_dict(): the model is read, the optimizer refused by name."""
    source = saved("fsdp1_flat", 2)
    assert "FSDP.optim_state_dict" in refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    reshard(source, tmp_path / "out", "--to", "hf")
    wanted = {n: t for n, t in gathered(source).items() if not n.startswith("optimizer/")}
    assert read(tmp_path / "out") == wanted


def test_local_state_dicts(saved: Saved, tmp_path: Path) -> None:
    assert "local state dict" in refused(saved("fsdp1_local", 2), tmp_path / "out", "--to", "hf")
