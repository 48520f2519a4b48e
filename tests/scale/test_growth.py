"""What planning costs for each tensor and each rank must not grow with their number.

Counted, not timed, wherever that shows it: calls of Python functions, and bytes that are allocated at once. The whole
measurement, on public models, is ``make bench-scale``.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.core.plan import Copy
from ckpttool.execute import NoProgress
from ckpttool.ops import drop_keys, quantize
from ckpttool.ops.convert_json.convert import to_safetensors
from ckpttool.ops.inspect.check import check
from ckpttool.ops.inspect.listing import list_tensors
from ckpttool.ops.inspect.tree import by_component, collapse
from ckpttool.ops.reshard import prepare
from ckpttool.quant.scheme import scheme
from ckpttool.targeting.recode import Recoding
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target
from tests.helpers.command import ckpttool
from tests.helpers.hollow import CONFIGS, program, published, shards
from tests.helpers.sample import some

STEEPEST = 1.1
"""Slope of log(cost) over log(size)."""

WARM, SMALL, LARGE = 4, 5, 8
"""Layers of a DeepSeek-V3 with 32 experts: 3 without experts, then 217 tensors each (in FP8, with their scales)."""


def model(root: Path, layers: int, *, fp8: bool = False) -> int:
    config = {**CONFIGS["DeepSeek-V3"], "num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    return published(root, {**config, "n_routed_experts": 32}, files=layers, fp8=fp8)


Sized = tuple[Path, int]
"""A model and the number of its tensors."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Sized, Sized]]:
    """A small and a large model."""
    root = tmp_path_factory.mktemp("models")

    def two(name: str, *, fp8: bool) -> tuple[Sized, Sized]:
        small, large = root / f"{name}-small", root / f"{name}-large"
        return (small, model(small, SMALL, fp8=fp8)), (large, model(large, LARGE, fp8=fp8))

    return {"fp8": two("fp8", fp8=True), "bf16": two("bf16", fp8=False)}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Smaller ones, for what is read and worked out once in a process."""
    root = tmp_path_factory.mktemp("warm")
    for name in ("fp8", "bf16"):
        model(root / name, WARM, fp8=name == "fp8")
    return {name: root / name for name in ("fp8", "bf16")}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Calls of Python functions, and of C functions by them."""
    count = [0]

    def one(_frame: FrameType, event: str, _arg: object) -> None:
        if event in ("call", "c_call"):
            count[0] += 1

    sys.setprofile(one)
    try:
        yield count
    finally:
        sys.setprofile(None)


def slope(cost: Sequence[float], factor: float) -> float:
    """Of two costs, the second for ``factor`` times as much."""
    small, large = cost
    return math.log(large / small) / math.log(factor)


def listed(path: Path) -> None:
    for _, rows in by_component(list_tensors(path).rows).values():
        collapse(rows)


EP8 = Target(format="ranks", tp=8, pp=1, ep=8, etp=1)
BLOCK = Recoding(scheme("block"))
JOBS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "inspect": ("fp8", listed),
    "to tp 8, ep 8": ("fp8", lambda p: prepare(p, OpenOptions(), EP8)),
    "to vllm": ("bf16", lambda p: prepare(p, OpenOptions(), Target(format="vllm", tp=4))),
    "a file for each tensor": ("bf16", lambda p: prepare(p, OpenOptions(), Target(format="hf", max_shard_size=100))),
    "drop-keys": ("fp8", lambda p: drop_keys.prepare(p, OpenOptions(), Selection(("model.layers.3.*",)))),
    "quantize": ("bf16", lambda p: quantize.prepare(p, OpenOptions(), BLOCK, Selection())),
    "quantize --to bf16": ("fp8", lambda p: quantize.prepare(p, OpenOptions(), Recoding(), Selection())),
}


@pytest.mark.sample("inspect", "to tp 8, ep 8", "drop-keys", "quantize")
@pytest.mark.parametrize("job", JOBS)
def test_calls_grow_as_the_tensors_do(job: str, models: dict[str, tuple[Sized, Sized]], warm: dict[str, Path]) -> None:
    kind, do = JOBS[job]
    do(warm[kind])
    cost = []
    for path, _ in models[kind]:
        with counted() as count:
            do(path)
        cost.append(count[0])
    (_, small), (_, large) = models[kind]
    assert slope(cost, large / small) <= STEEPEST, (cost, small, large)
    assert cost[1] / large < MOST_CALLS, f"{cost[1] / large:.0f} calls for each tensor"


MOST_CALLS = 600


@pytest.mark.thorough  # calls grow as the tensors do
def test_a_merge_and_a_program_likewise(models: dict[str, tuple[Sized, Sized]], tmp_path: Path) -> None:
    (small, few), (large, many) = models["bf16"]
    cost = []
    for path, layers in ((small, SMALL), (small, SMALL), (large, LARGE)):
        other = tmp_path / f"{layers}"
        if not other.exists():
            model(other, layers)
        with counted() as count:
            assert ckpttool("merge", path, other, "-o", tmp_path / "dst", "-n").code == 0
        cost.append(count[0])
    del cost[0]  # what is read and worked out once in a process
    assert slope(cost, many / few) <= STEEPEST, cost
    cost = []
    for n in (200, 1000):
        program(tmp_path / str(n), n)
        with counted() as count:
            to_safetensors(tmp_path / str(n) / "model.json", tmp_path / "dst.safetensors")
        cost.append(count[0])
    assert slope(cost, 5) <= STEEPEST, cost


@pytest.mark.parametrize("target", ["ranks", "vllm"])
def test_calls_grow_as_the_ranks_do(target: str, models: dict[str, tuple[Sized, Sized]]) -> None:
    """Copies are what a plan for more ranks has more of, so calls for each copy count."""
    (path, _), _ = models["bf16"]
    prepare(path, OpenOptions(), Target(format=target, tp=2, pp=1, ep=2, etp=1))
    cost, boxes = [], []
    for n in (2, 32):
        with counted() as count:
            plan = prepare(path, OpenOptions(), Target(format=target, tp=n, pp=1, ep=n, etp=1)).plan
        cost.append(count[0])
        boxes.append(plan.boxes)
    assert slope(cost, 16) <= STEEPEST, (cost, boxes)


@pytest.mark.thorough  # bench/scale.py measures it; calls, which grow alike, are counted below
def test_memory_of_a_plan(models: dict[str, tuple[Sized, Sized]], warm: dict[str, Path]) -> None:
    """Bytes for each tensor, at the worst moment."""
    prepare(warm["fp8"], OpenOptions(), EP8)
    peaks = []
    for path, count in models["fp8"]:
        gc.collect()
        tracemalloc.start()
        prepare(path, OpenOptions(), EP8)
        peaks.append(tracemalloc.get_traced_memory()[1] / count)
        tracemalloc.stop()
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] < 2600, f"{peaks[1]:.0f} bytes for each tensor"


@pytest.mark.thorough  # calls and times grow as they should, in short
def test_memory_of_a_box(models: dict[str, tuple[Sized, Sized]]) -> None:
    """What a plan keeps of one copy more: five numbers, and no tuple."""
    (path, _), _ = models["bf16"]
    sizes, boxes = [], []
    for n in (1, 8):
        gc.collect()
        tracemalloc.start()
        units = prepare(path, OpenOptions(), Target(format="vllm", tp=n)).plan.units
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        boxes.append(sum(isinstance(s, Copy) for u in units for s in u.steps))
        del units
    assert (sizes[1] - sizes[0]) / (boxes[1] - boxes[0]) < 60, (sizes, boxes)


def test_what_is_looked_up_in_lists_shows_in_time(tmp_path: Path) -> None:
    """A search in a list is one call whatever it takes. What grew with the square was four times the bound here."""
    cost, sizes = [], some((1_000, 6_000), (500, 3_000))
    for n in sizes:
        path = tmp_path / str(n)
        path.mkdir()
        shards(path, [(f"a.{i}.weight{'_scale' * (i % 2)}", "F32", (2,)) for i in range(n)], 4)
        cost.append(0.0)
    for _ in range(5):  # what else the machine does costs time, too
        for i, n in enumerate(sizes):
            begin = time.process_time()
            assert ckpttool("drop-keys", tmp_path / str(n), tmp_path / "dst", "a.1?.weight*", "-n").code == 0
            reshard = ("reshard", tmp_path / str(n), tmp_path / "dst", "--max-shard-size", "8", "-n", "--json")
            assert ckpttool(*reshard).code == 0
            cost[i] = min(cost[i] or 1e9, time.process_time() - begin)
        if slope(cost, 6) < 1.3:
            return
    raise AssertionError(cost)


def test_a_check_of_many_tensors_grows_as_they_do(
    models: dict[str, tuple[Sized, Sized]],
) -> None:
    cost = []
    for path, _ in models["fp8"]:
        with counted() as count:
            check(path, OpenOptions(), NoProgress())
        cost.append(count[0])
    (_, small), (_, large) = models["fp8"]
    assert slope(cost, large / small) <= STEEPEST, cost
