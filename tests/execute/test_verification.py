"""``--verify`` in shares: every check is in one of them, whatever is damaged is found by one, on other machines too."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.errors import AccessError, UsageError, VerifyError
from ckpttool.execute import RunOptions, compare, reader, run
from ckpttool.execute.files import Stopped
from ckpttool.execute.machines import calls
from ckpttool.execute.verification import Checks, Verification, VerifyCheck
from ckpttool.ops.reshard import prepare
from ckpttool.storage.access import QUERIES
from ckpttool.targeting.build import Prepared
from ckpttool.targeting.target import Target
from ckpttool.targeting.verify import look_through
from tests.execute.merges import merge_plan, working_out
from tests.helpers.fleet import WILD, FakeFleet, Trouble
from tests.reshard.test_parts import pipeline

Telling = Callable[[Callable[[int], None]], None]
"""Verifies, and tells how many bytes of it."""

FIXTURES = Path(__file__).parents[2] / "fixtures"
MEMORY = 4 << 20

SAMPLES: dict[str, tuple[str, Target]] = {
    "hf": ("hf_tiny_source", Target(format="ranks", tp=2)),
    "ranks": ("llama_tp8", Target(tp=2)),
    "cast": ("llama_tp8", Target(dtype="F32", format="hf")),
    "zcc": ("paddle_zcc/ep2_tp2_sharding2_ema", Target(format="flex")),
    "quantized-optimizer": ("paddle_unified/nlp_llama_bf16_tp2_quantO1", Target(format="flex")),
    "dcp": ("dcp/hsdp2x2_llama/checkpoint", Target(format="dcp", sharding=3)),
    "deepspeed": ("torch/deepspeed/z1", Target(format="dcp")),
    "megatron": ("megatron/legacy/qwen3_moe_te_ep2", Target(format="hf")),
    "gguf": ("gguf/llama_q8_0", Target(format="hf")),
    "deepseek": ("deepseek_v3", Target(format="deepseek", tp=2)),
}


class Output:
    """What a run has written, and how it is verified."""

    def __init__(self, prepared: Prepared, dst: Path) -> None:
        self.prepared, self.dst = prepared, dst
        run(prepared.plan, dst)

    def verification(self) -> Verification:
        return Verification(lambda place: look_through(self.prepared, place), MEMORY)

    def whole(self) -> Telling:
        return lambda advance: self.verification()(self.dst, advance)

    def share(self, number: int) -> Telling:
        return lambda advance: self.verification().share(self.dst, advance, number, 3)

    def on(self, seed: int) -> Telling:
        fleet = FakeFleet(3, seed, WILD)
        return lambda advance: self.verification().on(fleet, self.dst, advance, threading.Event())

    def looked(self) -> Checks:
        return look_through(self.prepared, self.dst)

    def tensors(self) -> list[tuple[Path, int, int]]:
        """File, offset and bytes of every tensor that was written."""
        names = [o.name for o in self.prepared.plan.outputs]
        found = [t for u in self.prepared.plan.units for t in u.stored_tensors]
        return [(self.dst / names[t.file], t.offset, t.nbytes) for t in found if t.nbytes]


@pytest.fixture(scope="module", params=list(SAMPLES))
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Output]:
    source, target = SAMPLES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "STRETCH", 20_000)
        patch.setattr(calls, "SMALLEST", 50_000)
        yield Output(prepare(FIXTURES / source, OpenOptions(), target), tmp_path_factory.mktemp("verified") / "dst")


def told(do: Telling) -> tuple[int, str]:
    """The bytes that somebody says to have verified, and the error."""
    counted: list[int] = []
    try:
        do(counted.append)
    except VerifyError as e:
        return sum(counted), e.render()
    return sum(counted), ""


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))


@pytest.mark.sample("hf", "megatron", "gguf")
def test_shares_are_all_of_it(output: Output) -> None:
    """They compare as many bytes as the whole, and a damaged byte is found by one of them, if the whole finds it.

    Machines that lose, repeat and delay find what one finds, in the same words.
    """
    checks = output.looked()
    every = [(c.side, *where(c)) for c in checks.checks]
    assert len(set(every)) == len(every) > 8
    for of in (1, 2, 3, 7, len(every) + 5):
        assert [c for i in range(of) for c in checks.share(i, of)] == checks.checks
    whole = (sum(c.nbytes for c in checks.checks), "")
    assert told(output.whole()) == whole
    assert told(output.on(1)) == whole
    parts = [told(output.share(i)) for i in range(3)]
    assert (sum(n for n, _ in parts), {e for _, e in parts}) == (whole[0], {""})
    assert max(n for n, _ in parts) <= whole[0] / 3 + max(c.nbytes for c in checks.checks)
    dice = random.Random(7)  # noqa: S311
    tensors = output.tensors()
    for path, offset, nbytes in (max(tensors, key=lambda t: t[2]), dice.choice(tensors)):
        at = offset + dice.randrange(nbytes)
        flipped(path, at)
        error = told(output.whole())[1]
        parts = [told(output.share(i)) for i in range(3)]
        assert [e for _, e in parts if e] == [error]
        assert "differ from the source" in error
        assert told(output.on(2))[1] == error
        flipped(path, at)


@pytest.mark.sample("ranks", "megatron")
def test_tensors_are_counted_once(output: Output) -> None:
    """A tensor that several ranks hold is one tensor, however many of its copies differ."""
    stored = [t for t in output.tensors() if t[2] > 1]
    for path, offset, _ in stored:
        flipped(path, offset)
    checks = output.looked()
    tensors = {(c.side, where(c)[0]) for c in checks.checks if isinstance(c.what, compare.Comparison)}
    copies = {(c.side, *where(c)[:2]) for c in checks.checks if isinstance(c.what, compare.Comparison)}
    said = told(output.whole())[1]
    for path, offset, _ in stored:
        flipped(path, offset)
    if len(tensors) < len(checks.checks) and "worked out" in said:
        return  # what is computed is told of by itself
    wrong, total = re.findall(r"(\d+) of (\d+) tensors differ", said)[0]
    assert int(wrong) == len(tensors) == int(total)
    names = re.findall(r"`([^`]+)`: ", said)
    assert len(set(names)) == len(names) == min(5, len(tensors))
    assert ("more cop" in said) <= (len(copies) > len(tensors))


def where(check: VerifyCheck) -> tuple[Any, ...]:
    what = check.what
    assert isinstance(what, compare.Comparison)
    return what.view.name, what.copy, what.stretch


def test_what_is_worked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed tensors are worked out by whoever has them in his share."""
    monkeypatch.setattr(calls, "SMALLEST", 1)
    plan, _ = merge_plan(tmp_path / "src")
    verification, dst = working_out(plan), tmp_path / "dst"
    run(plan, dst, RunOptions(verify=verification))
    whole = told(lambda advance: verification(dst, advance))
    assert whole == (plan.bytes_written, "")
    parts = [told(lambda advance, i=i: verification.share(dst, advance, i, 2)) for i in range(2)]  # type: ignore[misc]
    assert parts == [(plan.bytes_written // 2, "")] * 2
    stop = threading.Event()
    assert told(lambda advance: verification.on(FakeFleet(2), dst, advance, stop)) == whole
    flipped(dst / "1.bin", 77)
    errors = [told(lambda advance, i=i: verification.share(dst, advance, i, 2))[1] for i in range(2)]  # type: ignore[misc]
    assert errors[0] == ""
    assert "`t1` was not written as it was computed" in errors[1]
    assert told(lambda advance: verification.on(FakeFleet(2), dst, advance, stop))[1] == errors[1]


def test_what_differs_leaves_no_file_open(tmp_path: Path) -> None:
    """The next verification in this process would read it, and not what has its path by then."""
    plan, _ = merge_plan(tmp_path / "src")
    dst = tmp_path / "dst"
    run(plan, dst)
    flipped(dst / "1.bin", 77)
    with pytest.raises(VerifyError) as e:
        working_out(plan)(dst, lambda _: None)
    assert e.value.__traceback__ is not None
    assert not reader._SHARED.users


def test_parts_and_files_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline, the parts are one list of checks, and the files of parts that stay are among them."""
    monkeypatch.setattr(calls, "SMALLEST", 1)
    prepared = prepare(pipeline(tmp_path / "src"), OpenOptions(), Target(dtype="BF16"))
    output = Output(prepared, tmp_path / "dst")
    verification, stop = output.verification(), threading.Event()
    whole = told(lambda advance: verification(output.dst, advance))
    assert whole[0] > 3000
    assert told(lambda advance: verification.on(FakeFleet(2), output.dst, advance, stop)) == whole
    kept = next(o for o in prepared.plan.outputs if o.carried and o.size > 10)
    flipped(output.dst / kept.name, 5)
    error = told(lambda advance: verification(output.dst, advance))[1]
    assert "the file differs from that of the source" in error
    assert kept.name in error
    assert told(lambda advance: verification.on(FakeFleet(2), output.dst, advance, stop))[1] == error
    with (output.dst / kept.name).open("ab") as f:
        f.write(b"\n")
    with pytest.raises(VerifyError, match="the file differs"):
        verification(output.dst, lambda _: None)


def test_what_only_this_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are still to be put to an object store are verified where they are."""
    monkeypatch.setattr(calls, "SMALLEST", 1)
    source, target = SAMPLES["hf"]
    output = Output(prepare(FIXTURES / source, OpenOptions(), target), tmp_path / "dst")
    verification, stop, fleet = output.verification(), threading.Event(), FakeFleet(2)
    whole = told(lambda advance: verification(output.dst, advance))
    alone = told(lambda advance: verification.on(fleet, output.dst, advance, stop, tmp_path / "dst"))
    assert (alone, fleet.sent) == (whole, [])
    flipped(*output.tensors()[-1][:2])
    error = told(lambda advance: verification(output.dst, advance))[1]
    assert told(lambda advance: verification.on(fleet, output.dst, advance, stop, tmp_path / "dst"))[1] == error != ""
    with pytest.raises(VerifyError):  # elsewhere is elsewhere
        verification.on(fleet, output.dst, lambda _: None, stop, tmp_path / "ds")
    assert fleet.sent


@pytest.fixture
def small(tmp_path: Path) -> Output:
    source, target = SAMPLES["ranks"]
    return Output(prepare(FIXTURES / source, OpenOptions(), target), tmp_path / "dst")


def test_a_machine_with_another_source(small: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the same path is another one there: that machine says so, and does nothing."""
    stop, place = threading.Event(), small.dst
    checks = small.looked()
    sides = [s.source for s in checks.sides]
    monkeypatch.setattr("ckpttool.core.files.DataFile.at", lambda p, **_: sides[0][0]._replace(place=p, tag="1"))
    with pytest.raises(AccessError, match="another file here") as e:
        Verification(lambda _: checks, MEMORY).on(FakeFleet(2), place, lambda _: None, stop)
    assert e.value.where[-1].startswith("on node-")


@pytest.mark.parametrize("there", [False, True])
def test_a_machine_without_the_output(small: Output, there: bool) -> None:
    """It has another file of that name, or none. That is no difference, and no reason to throw the output away."""
    checks = small.looked()
    path = small.tensors()[0][0]
    path.rename(path.with_suffix(".away"))
    if there:
        path.write_bytes(b"another one")
    said = "has 11 bytes here" if there else "cannot read an output of the run"
    with pytest.raises(AccessError, match=said) as e:
        Verification(lambda _: checks, MEMORY).on(FakeFleet(2), small.dst, lambda _: None, threading.Event())
    assert "DST" in str(e.value.hint)
    assert e.value.where[-1].startswith("on node-")


def test_a_signed_url_stays_here(small: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = small.looked()
    url = "https://host/models/model_tp0.safetensors"
    monkeypatch.setitem(QUERIES, "https://host/models", "signature=secret")
    from ckpttool.storage.place import parse_place

    source = checks.sides[0].source
    moved = type(source)([f._replace(place=parse_place(url)) for f in source])
    checks.sides[0] = type(checks.sides[0])(moved, checks.sides[0].written)
    with pytest.raises(UsageError, match="query of a URL") as e:
        Verification(lambda _: checks, MEMORY).on(FakeFleet(2), small.dst, lambda _: None, threading.Event())
    assert "secret" not in e.value.render()


def test_a_run_that_is_to_end(small: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALLEST", 1)
    stop = threading.Event()
    with pytest.raises(Stopped):
        small.verification().on(FakeFleet(2, 0, Trouble(lost=0)), small.dst, lambda _: stop.set(), stop)


def test_orders_are_not_too_small(small: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what one order can hold, one is made."""
    monkeypatch.setattr(calls, "SMALLEST", 16 << 20)
    fleet = FakeFleet(3)
    small.verification().on(fleet, small.dst, lambda _: None, threading.Event())
    assert sum(c.nbytes for c in small.looked().checks) < calls.SMALLEST
    assert len(fleet.sent) == 1
