"""Hostile checkpoints of Megatron and NeMo: tars that lead elsewhere, arguments and ranks that cannot be.

Pickles that call, in these files too, are in test_torch.py.
"""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.formats.base import TrainingState
from ckpttool.formats.megatron.common_state import groups_of
from tests.fuzz.harness import watched
from tests.helpers.torch_edit import edit
from tests.hostile.court import SAMPLE, Court
from tests.storage.test_tar import HOSTILE

MEGATRON = Path(__file__).parents[2] / "fixtures/megatron"
DIST, LEGACY, NEMO, ZARR = (
    MEGATRON / name for name in ("dist/llama_tp2", "legacy/qwen3_tp2_plain", "nemo/own", "nemo/zarr")
)
TARGETS = ("ranks", "hf", "megatron")


def judge(court: Court, source: Path | None = None) -> list[int]:
    """The exit codes of looking at the source, and of writing it in several formats."""
    src = source or court.src
    look: list[list[object]] = [["inspect", src, "--list", "--json"], ["inspect", src, "--check"]]
    written = [["reshard", src, court.dst, "--to", to, "--workers", 1] for to in TARGETS]
    with watched():
        return [court.run(*line).code for line in (*look, *written)]


def copy(court: Court, fixture: Path) -> Path:
    shutil.copytree(fixture, court.src, dirs_exist_ok=True)
    return court.src


@SAMPLE
@pytest.mark.parametrize("case", HOSTILE)
def test_tars(case: str, tmp_path: Path) -> None:
    """Behind a configuration and weights that are in order."""
    court = Court(tmp_path)
    path = court.src / "x.nemo"
    with tarfile.open(path, "w:") as tar:
        tar.add(ZARR, arcname=".")
        end = tar.offset
    path.write_bytes(path.read_bytes()[:end] + HOSTILE[case][2]() + bytes(1024))
    codes = judge(court, path)
    court.run("inspect", path, "--imports")
    assert 0 not in codes


@SAMPLE
@pytest.mark.parametrize(
    "tag",
    ["../stranger", "..", ".", "/etc", "", "x" * 5000, "5\0", "\x1b[2J", "9" * 400, "-5", "iter_0000005/..", "\u0665"],
)
@pytest.mark.parametrize("fixture", [DIST, LEGACY], ids=["dist", "legacy"])
def test_the_mark_leads_nowhere_else(fixture: Path, tag: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    (copy(court, fixture) / "latest_checkpointed_iteration.txt").write_text(tag)
    assert 0 not in judge(court)


NUMBERS = (10**12, 1 << 62, 10**400, -1, 0, math.nan, math.inf, "2", [2], True)
NAMES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_experts", "vocab_size", "padded_vocab_size")


@pytest.mark.product(one_in=75)
@pytest.mark.parametrize("value", NUMBERS, ids=[str(n)[:8] for n in NUMBERS])
@pytest.mark.parametrize("name", [*NAMES, *SIZES, "iteration", "rotary_base", "norm_epsilon", "moe_layer_freq"])
@pytest.mark.parametrize("fixture", [DIST, LEGACY], ids=["dist", "legacy"])
def test_arguments(fixture: Path, name: str, value: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    copy(court, fixture)
    files = [*court.src.rglob("common.pt"), *court.src.rglob("model_optim_rng.pt")]
    for path in files:
        edit(path, lambda v: v["args"].fields.update({name: value}))
    codes = judge(court)
    if name in NAMES and not (value is True and name == "num_layers") and name != "num_query_groups":
        assert 0 not in codes[2:], "no model has such sizes"


@pytest.mark.product(one_in=48)
@pytest.mark.parametrize("value", NUMBERS[:-1], ids=[str(n)[:8] for n in NUMBERS[:-1]])
@pytest.mark.parametrize("name", [*NAMES, *SIZES[:3], "layernorm_epsilon"])
def test_configurations(name: str, value: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    path = copy(court, NEMO) / "model_config.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{name}:")]
    path.write_text(
        "\n".join([*lines, f"{name}: {json.dumps(value).replace('NaN', '.nan').replace('Infinity', '.inf')}"])
    )
    judge(court)


@SAMPLE
@pytest.mark.parametrize(
    "name",
    [
        *(
            "mp_rank_99",
            "mp_rank_999999999",
            "mp_rank_00_999999999_999999999",
            "mp_rank_00_001",
            "mp_rank_" + "9" * 200,
        ),
        *("tp_rank_999999999_pp_rank_999999999", "mp_rank_00_000_000"),
    ],
)
@pytest.mark.parametrize("fixture", [LEGACY, NEMO], ids=["legacy", "nemo"])
def test_ranks_of_any_number(fixture: Path, name: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    first = next(p for p in sorted(copy(court, fixture).rglob("*_rank_*")) if p.is_dir())
    shutil.copytree(first, first.parent / name, dirs_exist_ok=True)
    judge(court)


@SAMPLE
@pytest.mark.parametrize("step", [math.nan, math.inf, 1e300, -1.0, 10**400, 1 << 62, None, "3", [3]])
def test_steps(step: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)

    def change(value: Any) -> None:
        for group in value["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = step

    for path in copy(court, DIST).rglob("common.pt"):
        edit(path, change)
    judge(court)


ARRAYS: tuple[dict[str, Any], ...] = (
    {"shape": [1 << 62, 1 << 62], "chunks": [1 << 62, 1 << 62]},
    {"shape": [1 << 62, 4], "chunks": [1, 1]},
    {"shape": [1] * 5000, "chunks": [1] * 5000},
    {"shape": [10**400], "chunks": [10**400]},
    {"shape": [True, 2], "chunks": [1, 1]},
    {"shape": [0, 0], "chunks": [1, 1]},
    {"dtype": [["a", "<f4"]]},
    {"dtype": "|O"},
    {"compressor": {"id": "../../x"}},
    {"order": "\x1b[2J"},
)


@SAMPLE
@pytest.mark.parametrize("changed", ARRAYS, ids=[str(a)[:30] for a in ARRAYS])
def test_arrays(changed: dict[str, Any], tmp_path: Path) -> None:
    court = Court(tmp_path)
    for path in copy(court, ZARR).rglob(".zarray"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert 0 not in judge(court)[2:]


LINKS: dict[str, Callable[[Path], None]] = {
    "weights": lambda src: (src / "context").symlink_to("../stranger"),
    "tokenizer": lambda src: (src / "aabb_tokenizer.model").symlink_to("../stranger/id_rsa"),
    "configuration": lambda src: (src / "model_config.yaml").symlink_to("../stranger/secret.json"),
}


@SAMPLE
@pytest.mark.parametrize("case", LINKS)
def test_links_are_not_carried(case: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    copy(court, ZARR)
    if case == "configuration":
        (court.src / "model_config.yaml").unlink()
    LINKS[case](court.src)
    judge(court)


@pytest.mark.parametrize("step", [math.nan, math.inf, -1.0, 3.5])
def test_steps_that_are_none(step: float) -> None:
    with pytest.raises(UnsupportedError, match="is not a number of steps"):
        groups_of(TrainingState(steps={"a": step}), {"a": (2,)}, experts_apart=False)
