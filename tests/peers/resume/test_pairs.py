"""A few of the moves that `make test-resume` makes, and that it would see what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.peers.resume import page, pairs
from tests.peers.resume.frameworks import FRAMEWORKS, FSDP2
from tests.peers.resume.held import differences, named, rounded, unrounded
from tests.peers.resume.task import STEPS, Job

NAMED = {f.name: f for f in FRAMEWORKS}
MOVES = [
    ("FSDP2", "ZeRO-3", "qwen3_moe", True),
    ("ZeRO-2", "Megatron torch", "llama", False),
    ("Megatron torch_dist", "PaddleFormers 1.2", "qwen3_moe", True),
    ("PaddleFormers 1.2", "Megatron torch", "qwen3_moe", True),
    ("PaddleNLP 3.0", "FSDP2", "llama", True),
]


@pytest.fixture(scope="module")
def lab(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pairs.Lab]:  # noqa: ARG001
    with pairs.lab(tmp_path_factory.mktemp("resume")) as made:
        yield made


@pytest.mark.parametrize(("sender", "receiver", "model", "bf16"), MOVES)
def test_a_run_goes_on_elsewhere(sender: str, receiver: str, model: str, bf16: bool, lab: pairs.Lab) -> None:
    move = lab.move(NAMED[sender], NAMED[receiver], model, bf16=bf16)
    assert move.right, str(move)


def test_lost_moments_show(lab: pairs.Lab) -> None:
    """In what is held, and in the losses."""
    stayed, checkpoint = lab.stayed(FSDP2, "llama", False)
    job = Job("llama", False, str(lab.first("llama")), load=str(checkpoint), first=STEPS, cold=True)
    ran = FSDP2.receives["llama"].runs(job, lab.machines)
    lost = differences(stayed.saved, ran.begun)
    assert {n.partition("/")[0] for n in lost} == {"exp_avg", "exp_avg_sq", "step"}
    apart = max(abs(a - b) for a, b in zip(stayed.losses[STEPS:], ran.losses, strict=True))
    assert apart > 1000 * pairs.UNIT[False]


def test_one_bit_shows() -> None:
    master = np.arange(6, dtype="<f4").reshape(2, 3) + np.float32(2**-20)
    held = named("w", master, rounded(master), {"exp_avg": master}, 3.0)
    assert unrounded(held) == []
    told = {n: v.tobytes().hex() for n, v in held.items()}
    for name, value in held.items():
        other = value.copy().reshape(-1).view("u1")
        other[0] ^= 1
        assert differences(told, told | {name: other.tobytes().hex()}) == [name]
        if not name.startswith("weights/"):  # which not every framework has apart from its masters
            assert differences(told, {n: v for n, v in told.items() if n != name}) == [name]
    assert unrounded(held | {"weights/w": rounded(master) + np.uint16(1)}) == ["weights/w"]


def test_the_page_has_every_pair() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for kind in page.KINDS:
        _, _, rest = text.partition(page.begin(kind))
        shown, end, _ = rest.partition(page.END)
        assert end
        senders = [line for line in shown.splitlines() if line.startswith("| ")][1:]
        here = [f.name for f in FRAMEWORKS if kind[0] not in f.without]
        assert [line.split(":")[0].removeprefix("| ") for line in senders if "---" not in line] == here
        assert all(line.count("|") == 5 for line in senders)  # from, moves, tensors, losses
        assert page.plot_of(kind).exists()


def test_what_is_too_far_apart_is_wrong() -> None:
    losses = [5.0] * (2 * STEPS)
    move = pairs.Move(FSDP2, FSDP2, "llama", False, (), held=1, whole=losses, moved=losses[STEPS:])
    assert move.right
    assert not replace(move, moved=[5.001] * STEPS).right
    assert not replace(move, wrong=("w",)).right
    assert not replace(move, error="error: no").right
