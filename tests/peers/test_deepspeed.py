"""DeepSpeed itself, on CPU: its saves are read as its engine says, and ``load_universal`` goes on from what is written.

Every rank is a process of deepspeed_side.py. What the engine holds after a load is compared bit for bit, and so is what
it holds after one more step, with a run that loaded its own save.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers import tensorfile
from tests.helpers.command import reshard

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

SIDE = Path(__file__).with_name("deepspeed_side.py")
LIMIT = 300
"""Seconds for a run of a few ranks."""
UNIVERSAL = {"checkpoint": {"load_universal": True}}
TWO_GROUPS = {"groups": True, "frozen": True, "schedule": True, "zero": {"parameter_alignment": True}}


def run(out: Path, world: int, **case: Any) -> tensorfile.Tensors:
    """What the engine of rank 0 holds in the end; ``out`` gets its save."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SIDE), str(out), json.dumps(case)]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for r in range(world)
    ]  # fmt: skip
    said = [p.communicate(timeout=LIMIT)[0] for p in ranks]
    assert not any(p.returncode for p in ranks), said[0][-3000:]
    return tensorfile.read(Path(f"{out}.truth"))


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (3, {"stage": 1, **TWO_GROUPS}),
        (2, {"stage": 2, "tied": True, "precision": "fp32", "zero": {"elastic_checkpoint": True}}),
        (4, {"stage": 3, "frozen": True, "zero": {"sub_group_size": 40}}),
    ],
)
def test_a_save_is_read_as_the_engine_says(world: int, case: dict[str, Any], tmp_path: Path) -> None:
    want = run(tmp_path / "save", world, **case)
    reshard(tmp_path / "save", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    got = tensorfile.read_all(tmp_path / "out")
    once = {k: v for k, v in want.items() if k in got or "head.weight" not in k}  # the engine answers for a tie twice
    tensorfile.assert_same({k: v for k, v in got.items() if not k.endswith("/step")}, once)


@pytest.mark.parametrize(
    ("world", "case", "others"),
    [
        (3, {"stage": 1, **TWO_GROUPS}, [(2, 2), (3, 1)]),
        (2, {"stage": 3, "tied": True}, [(1, 1)]),
    ],
)
def test_every_stage_goes_on_from_what_is_written(
    world: int, case: dict[str, Any], others: list[tuple[int, int]], tmp_path: Path
) -> None:
    saved = run(tmp_path / "save", world, **case)
    reshard(tmp_path / "save", tmp_path / "universal", "--to", "universal", "--verify")
    own = {**case, "load": str(tmp_path / "save"), "save": False}
    theirs = {**own, "load": str(tmp_path / "universal"), "config": UNIVERSAL}
    want = run(tmp_path / "a", world, **own, first=3, steps=1)
    assert any(want[k].bits.tobytes() != saved[k].bits.tobytes() for k in saved)
    tensorfile.assert_same(run(tmp_path / "b", world, **theirs, first=3, steps=1), want)
    for stage, ranks in others:
        got = run(tmp_path / f"c{stage}", ranks, **{**theirs, "stage": stage}, steps=0)
        tensorfile.assert_same(got, saved)


def test_what_zero_to_fp32_gives_is_the_masters(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    source = Path("fixtures/torch/deepspeed/rr")
    want = get_fp32_state_dict_from_zero_checkpoint(str(source))
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "master_weights")
    got = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert len(got) == 12
    for name, master in got.items():
        assert (master == want[name.removeprefix("master_weights/")]).all(), name
