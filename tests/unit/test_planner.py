"""Plans: every byte of every output comes from exactly one place, and the addresses are those of the boxes."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.checkpoint import OpenOptions
from ckpttool.core.plan import AssertEqual, Copy, Fill, Plan, merged_axes
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import BYTES, save_hf


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=4),
    st.booleans(),
)
def test_merging_axes_keeps_the_addresses(shape: list[int], steps: list[tuple[int, int]], contiguous: bool) -> None:
    strides = [tuple(s[i] for s in steps[: len(shape)]) for i in (0, 1)]
    if contiguous:
        strides[0] = tuple(prod(shape[i + 1 :]) * 2 for i in range(len(shape)))
        strides[1] = strides[0] if len(shape) % 2 else tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    merged, (a, b) = merged_axes(shape, *strides)

    def addresses(sizes: list[int] | tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...]) -> list[tuple[int, int]]:
        return [
            (sum(i * s for i, s in zip(at, x, strict=True)), sum(i * s for i, s in zip(at, y, strict=True)))
            for at in itertools.product(*map(range, sizes))
        ]

    assert addresses(merged, a, b) == addresses(shape, strides[0], strides[1])
    assert 1 not in merged
    if contiguous:
        assert len(merged) <= 1


def written(plan: Plan) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """How often each byte of each output is written."""
    out = [np.zeros(o.size, np.uint8) for o in plan.outputs]
    for counts, output in zip(out, plan.outputs, strict=True):
        for offset, data in output.literals:
            counts[offset : offset + len(data)] += 1
        if output.carried:
            counts[:] += 1
    for unit in plan.units:
        for step in unit.steps:
            if isinstance(step, Copy | Fill):
                dtype = step.dst_dtype if isinstance(step, Copy) else step.dtype
                index = np.array([step.dst.offset])
                for n, stride in zip(step.shape, step.dst.strides, strict=True):
                    index = (index[:, None] + np.arange(n) * stride).ravel()
                np.add.at(out[step.dst.file], (index[:, None] + np.arange(BYTES[dtype])).ravel(), 1)
    return out


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("llama", Target(tp=8)),
        ("llama", Target(format="vllm", tp=8)),
        ("llama", Target(format="hf", max_shard_size=30_000, dtype="f32")),
        ("gpt_neox", Target(tp=4, unfuse=True)),
        ("mixtral", Target(format="trtllm", tp=2, pp=3)),
        ("deepseek_v3_fp8", Target(tp=2, ep=4, etp=1, pp=3)),
        ("gpt_oss_mxfp4", Target(tp=4, ep=2)),
    ],
)
def test_every_byte_is_written_once(name: str, target: Target, tmp_path: Path) -> None:
    model = MODELS[name]
    tensors = {n: r for n, r in model.tensors().items() if "inv_freq" not in n}
    prepared = prepare(save_hf(tmp_path / "src", tensors, model.config), OpenOptions(), target)
    plan = prepared.plan
    for output, count in zip(plan.outputs, written(plan), strict=True):
        assert (count == 1).all(), output.name
    # A unit writes its own targets and nothing else; all of them together are the tensors of the outputs.
    for unit in plan.units:
        assert unit.written == sum(t.nbytes for t in unit.stored_tensors)
    assert (
        sum(u.written for u in plan.units)
        + sum(len(d) for o in plan.outputs for _, d in o.literals)
        + sum(o.size for o in plan.outputs if o.carried)
        == plan.bytes_written
    )


def test_steps_are_boxes(tmp_path: Path) -> None:
    """A row cut is one strided block for each rank, not one run for each row."""
    model = MODELS["llama"]
    src = save_hf(tmp_path / "src", model.tensors(), model.config)
    selection = Selection(keep=("*.down_proj.weight",))
    plan = prepare(src, OpenOptions(), Target(tp=8), selection).plan
    assert plan.boxes == 8 * 3
    copies = [s for u in plan.units for s in u.steps if isinstance(s, Copy)]
    assert {s.shape for s in copies} == {(48, 8)}
    assert {s.src.strides for s in copies} == {(128, 2)}
    assert {s.dst.strides for s in copies} == {(16, 2)}


def test_replicas_are_compared(tmp_path: Path) -> None:
    """Every copy that is not read is held against the one that is."""
    from ckpttool.formats.base import ReadOptions
    from tests.helpers.judge import Grid, write_ranks

    src = write_ranks(tmp_path / "src", MODELS["llama"], Grid(tp=8), "tp{tp}.safetensors")
    plan = prepare(src, OpenOptions(mesh=ReadOptions(tp=8)), Target(tp=1, format="hf")).plan
    same = [s for u in plan.units for s in u.steps if isinstance(s, AssertEqual)]
    # Seven copies of each norm, row bias and buffer; of k and v and their biases three of four for each of two heads.
    layers, whole, heads = 3, 5, 4
    assert len(same) == (layers * whole + 1) * 7 + layers * heads * 6


def test_digest(tmp_path: Path) -> None:
    """Equal for equal plans, and different as soon as anything that decides the bytes is."""
    model = MODELS["llama"]
    src = save_hf(tmp_path / "src", model.tensors(), model.config)

    def digest(target: Target, *remove: str) -> str:
        return prepare(src, OpenOptions(), target, Selection(remove=remove)).plan.digest()

    assert digest(Target(tp=2)) == digest(Target(tp=2))
    others = [
        digest(Target(tp=4)),
        digest(Target(tp=2, dtype="f32")),
        digest(Target(tp=2, fuse=True)),
        digest(Target(tp=2), "*.inv_freq"),
    ]
    (src / "tokenizer.json").write_text("{}", encoding="utf-8")
    others.append(digest(Target(tp=2)))
    (src / "tokenizer.json").unlink()
    (src / "model.safetensors").touch()
    others.append(digest(Target(tp=2)))
    assert len({digest(Target(tp=2)), *others}) == len(others)
