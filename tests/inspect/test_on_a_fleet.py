"""What reads elements says the same when the machines of a cluster read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpttool as api
from ckpttool.execute import fleets
from ckpttool.execute.machines import calls
from tests.helpers.command import Done, ckpttool
from tests.helpers.fleet import WILD, FakeFleet

FIXTURES = Path(__file__).parents[2] / "fixtures"

SAMPLES = {
    "hf": "hf_tiny_source",
    "ranks": "llama_tp8",
    "fp8": "deepseek_v3",
    "zcc": "paddle_zcc/ep2_tp2_sharding2_ema",
    "flex": "paddle_flex/tp2_dp2_replicas",
    "quantized-optimizer": "paddle_unified/nlp_llama_bf16_tp2_quantO1",
    "dcp": "dcp/hsdp2x2_llama/checkpoint",
    "fsdp": "torch_fsdp/uneven",
    "deepspeed": "torch/deepspeed/z1",
    "megatron": "megatron/legacy/qwen3_moe_te_ep2",
    "gguf": "gguf/llama_q8_0",
}
VIEWS = {
    "values": ("--stats", "--hist", "--hash", "--json"),
    "text": ("--stats",),
    "total": ("--hash", "--total", "--json"),
    "check": ("--check", "--values", "--json"),
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeFleet]]:
    """The fleets that commands have used."""
    made: list[FakeFleet] = []

    def fleet_for(text: str) -> FakeFleet:
        assert text == "ray=fake:1"
        made.append(FakeFleet(3, len(made), WILD))
        return made[-1]

    monkeypatch.setattr(fleets, "fleet_for", fleet_for)
    monkeypatch.setattr(calls, "SMALLEST", 1)
    yield made
    assert all(len(f.ended) == 1 for f in made)


def same(used: list[FakeFleet], *arguments: object) -> Done:
    """What the command says here; it says the same on a fleet."""
    here = ckpttool("inspect", *arguments)
    assert ckpttool("inspect", *arguments, "--on", "ray=fake:1") == here
    assert len(used[-1].sent) > 2
    return here


@pytest.mark.sample("values-hf", "check-gguf", "total-megatron", "text-deepspeed", "check-quantized-optimizer")
@pytest.mark.parametrize("source", list(SAMPLES))
@pytest.mark.parametrize("view", list(VIEWS))
def test_the_same_of_every_format(view: str, source: str, used: list[FakeFleet]) -> None:
    done = same(used, FIXTURES / SAMPLES[source], *VIEWS[view])
    assert done.code in (0, 3), done.err
    assert len(done.out) > 100


def test_findings(tmp_path: Path, used: list[FakeFleet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is reported in the same words and order, with the paths that were given here."""
    shutil.copytree(FIXTURES / "llama_tp8", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for rank in (2, 5):
        path = Path(f"model/model_tp{rank}.safetensors")
        data = bytearray(path.read_bytes())
        head = int.from_bytes(data[:8], "little")
        norm = json.loads(data[8 : 8 + head])["model.norm.weight"]["data_offsets"][0]
        data[8 + head + norm : 8 + head + norm + 8] = b"\xff\x7f" * 4  # NaN
        path.write_bytes(data)
    done = same(used, "model", "--check", "--values")
    assert done.code == 3
    assert "model/model_tp5.safetensors [bytes" in done.out
    assert str(tmp_path) not in done.out


def test_a_manifest(tmp_path: Path, used: list[FakeFleet]) -> None:
    src, dst = FIXTURES / "hf_tiny_source", tmp_path / "dst"
    assert ckpttool("reshard", src, dst, "--to", "ranks", "--tp-out", 2, "--manifest").code == 0
    assert same(used, dst, "--check").code == 0
    path = dst / "rank-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    done = same(used, dst, "--check")
    assert done.code == 3
    assert "has changed since it was written" in done.out


def test_differences(tmp_path: Path, used: list[FakeFleet]) -> None:
    src, whole, other = FIXTURES / "llama_tp8", tmp_path / "whole", tmp_path / "other"
    assert ckpttool("reshard", src, whole, "--to", "hf", "--dtype", "F32").code == 0
    shutil.copytree(whole, other)
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    for at in (-1, -2000, -40_000):
        data[at] ^= 0x40
    path.write_bytes(data)
    done = same(used, whole, "--diff", other, "--json")
    assert done.code == 3
    assert len(json.loads(done.out)["elements"]) > 1
    assert same(used, src, "--diff", other, "--atol", 0.5).code == 3


@pytest.mark.parametrize("view", [("--list",), (), ("--diff", "other", "--headers-only"), ("--show", "a")])
def test_what_reads_no_elements(view: tuple[str, ...]) -> None:
    done = ckpttool("inspect", FIXTURES / "hf_tiny_source", *view, "--on", "ray")
    assert done.code == 2
    assert "--on needs a view that reads values" in done.err


def test_an_engine_that_does_not_exist() -> None:
    done = ckpttool("inspect", FIXTURES / "hf_tiny_source", "--stats", "--on", "dask")
    assert (done.code, done.out) == (2, "")
    assert "unknown engine" in done.err


def test_python(used: list[FakeFleet]) -> None:
    src = FIXTURES / "llama_tp8"
    checked = api.check(src, values=True, on="ray=fake:1")
    assert (checked.findings, checked.checked) == (
        api.check(src, values=True).findings,
        api.check(src, values=True).checked,
    )
    compared = api.diff(src, src, on="ray=fake:1")
    assert (compared.ok, compared.compared) == (True, 39)
    assert all(f.sent for f in used)
    assert len(used) == 2
