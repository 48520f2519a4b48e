"""A few cases of the campaign for each format, and that the campaign finds what it looks for."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CorruptError
from tests.fuzz import campaign, harness
from tests.fuzz.campaign import evenly
from tests.fuzz.harness import Bench, FindingError
from tests.fuzz.subjects import CHECK, subjects
from tests.helpers.command import Done
from tests.helpers.sample import some

SUBJECTS = {s.name: s for s in subjects()}
SAMPLE = (
    *("hf", "hf sharded", "ranks", "deepseek", "vllm", "unified nlp_llama_bf16_tp2_ignore_merge", "hybrid"),
    *("torch-bin sharded", "torch-bin before 1.6", "optimizer", "dcp with an optimizer", "dcp of safetensors"),
    *("fsdp tp_fsdp", "deepspeed z3", "universal z1", "megatron-dist", "bytecheckpoint fsdp2", "meta"),
    *("flex of tensors", "pdparams model.pdparams", "program in JSON", "fp8 deepseek_fp8"),
    *("recipe of Paddle", "tokenizers", "adapter", "aoa lines", "family", "manifest", "header"),
)

FIRST = 3000
"""Cases of a file that a sample is taken of: to enumerate them all takes longer than to try a few."""


@pytest.mark.sample(
    "hf",
    "optimizer",
    "pdparams model.pdparams",
    "program in JSON",
    "recipe of Paddle",
    "aoa lines",
    "family",
    "manifest",
    "header",
)
@pytest.mark.parametrize("name", SAMPLE)
def test_damage(name: str, tmp_path: Path) -> None:
    bench = Bench(SUBJECTS[name], tmp_path)
    for file, every in bench.cases().items():
        cases = list(islice(every, some(None, FIRST)))
        assert len(cases) > 100
        for at, i in enumerate(evenly(len(cases), 2, seed=1)):
            what, make = cases[i]
            verdict = bench.run(file, make(), thorough=at == 0)
            assert verdict in ("refused", "same", "told", "answered"), what


def test_every_subject_has_a_name_of_its_own() -> None:
    assert len(SUBJECTS) == len(subjects())
    assert not [n for n in SAMPLE if n not in SUBJECTS]


# -- a campaign that finds nothing must be able to find something


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(replace(SUBJECTS["hf"], commands=(), readable=()), tmp_path)


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _hang(*_: Any) -> Any:
    while True:
        time.sleep(0.01)


def _compute(*_: Any) -> Any:
    while True:
        pass


def _grow(*_: Any) -> Any:
    return {"x": ((1,), bytes(bytearray(b"x") * (64 << 20)))}


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (_raise(KeyError("dtype")), "KeyError: 'dtype'"),
        (_raise(RecursionError()), "RecursionError"),
        (_raise(CorruptError("")), "an error without a text"),
        (_hang, "still at it"),
        (_compute, "still at it"),
        (_grow, "MiB of memory"),
        (lambda *_: {}, "WRONG DATA"),
        (lambda *_: {"a": ((1,), b"x")}, "WRONG DATA"),
    ],
)
def test_what_must_not_be_is_found(
    read: Callable[..., Any], what: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bench.files["model.safetensors"]
    assert bench.run("model.safetensors", data, thorough=True) == "same"
    assert bench.run("model.safetensors", data[:-1], thorough=True) == "refused"
    monkeypatch.setattr(harness, "SECONDS", 0.1 if read is _compute else 8.0)
    monkeypatch.setattr(harness, "WAITING", 0.1 if read is _hang else 60.0)
    monkeypatch.setattr(harness, "MEMORY", 32 << 20)
    monkeypatch.setattr(harness, "read", read)
    with pytest.raises(FindingError, match=what):
        bench.run("model.safetensors", data[:-1], thorough=True)


@pytest.mark.thorough  # make fuzz would show it
def test_a_loop_that_looks_at_no_signals_is_found_at_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    real = harness.read
    undamaged = iter([True])  # those come first, in each process that goes on behind a case

    def read(folder: Path, options: Any) -> Any:
        if not next(undamaged, False):
            collections.deque(itertools.repeat(0), maxlen=0)
        return real(folder, options)

    monkeypatch.setattr(harness, "read", read)
    monkeypatch.setattr(harness, "STUCK", 0.2)
    _, findings = campaign.run("hf", (0, 1), 1, 0)
    assert [f.split(":")[1].strip() for f in findings] == list(SUBJECTS["hf"].damaged)
    assert all("ended the process with exit code -27" in f for f in findings)


def test_other_elements_than_the_files_hold_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = harness.read

    def swapped(folder: Path, options: Any) -> Any:
        got = real(folder, options)
        first = next(k for k, (_, data) in got.items() if any(data))
        return got | {first: (got[first][0], got[first][1][::-1])}

    monkeypatch.setattr(harness, "read", swapped)
    with pytest.raises(FindingError, match="WRONG DATA"):
        bench.run("model.safetensors", bench.files["model.safetensors"], thorough=False)


@pytest.mark.parametrize(
    ("done", "what"),
    [
        (Done(0, "", ""), "`inspect --check` finds nothing"),
        (Done(1, "", "Traceback (most recent call last):\nKeyError: 'error: '"), "not one clean message"),
        (Done(1, "", "it failed"), "not one clean message"),
        (Done(139, "", ""), "an exit code of its own"),
        (Done(0, "\ud800", ""), "UnicodeEncodeError"),
    ],
)
def test_what_a_command_must_not_do_is_found(
    done: Done, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(replace(SUBJECTS["hf"], commands=(CHECK,), readable=()), tmp_path)
    monkeypatch.setattr(harness, "ckpttool", lambda *_: done)
    with pytest.raises(FindingError, match=what):
        bench.run("model.safetensors", bench.files["model.safetensors"][:-1], thorough=False)
