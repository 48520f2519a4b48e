"""Real torch on gloo ranks saves FSDP models in every way; what is read equals what torch gathers, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.helpers import training_run
from tests.helpers.command import refused, reshard
from tests.peers import dcp_ranks
from tests.peers.fsdp_ranks import save
from tests.peers.rank_group import Group
from tests.peers.rank_training import Held
from tests.peers.test_torch_bin import same

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
        ("fsdp1_mesh", 2), ("fsdp1_hybrid", 4),
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


# -- what is written is loaded into models of FSDP2


@pytest.fixture(scope="module")
def trained(ranks: Callable[[int], Group], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Held, Held]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, *ranks(3).run(dcp_ranks.train, str(folder / "save"), {"groups": True})


@pytest.mark.parametrize(("files", "worlds"), [(1, [1, 4]), (3, [1, 2, 4]), (5, [2])])
def test_dcp_is_loaded_on_any_number_of_ranks(
    files: int, worlds: list[int], trained: tuple[Path, Held, Held], ranks: Callable[[int], Group], tmp_path: Path
) -> None:
    """Parameters and moments, and the same next step as the run that was not converted."""
    source, before, after = trained
    reshard(source / "save", tmp_path / "out", "--to", "dcp", "--sharding-out", files)
    for world in worlds:
        _, *got = ranks(world).run(dcp_ranks.resume, str(tmp_path / "out"), {"groups": True})
        same(got[0], before)
        same(got[1], after)


def test_dcp_of_paddles_unified_is_loaded(ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """A run of torch that was a unified checkpoint in between: powers of beta are steps again."""
    case = {"shapes": training_run.SHAPES}
    before, after = ranks(2).run(dcp_ranks.train, str(tmp_path / "save"), case)
    (tmp_path / "save" / "config.json").write_text(json.dumps({**training_run.CONFIG, "torch_dtype": "float32"}))
    reshard(tmp_path / "save", tmp_path / "unified", "--to", "unified", "--target", "paddlenlp-3.0")
    reshard(tmp_path / "unified", tmp_path / "out", "--to", "dcp", "--sharding-out", 3, "--betas", "0.9,0.999")
    for world in (1, 4):
        _, *got = ranks(world).run(dcp_ranks.resume, str(tmp_path / "out"), case, known=False)
        same(got[0], before)
        same(got[1], after)
