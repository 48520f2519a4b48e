"""Runs whose sources are on another machine: how often it is asked, for how much, and what its errors do."""

from __future__ import annotations

import _thread
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpttool as library
from ckpttool.core.plan import Block, Compute, Copy, Output, Plan, SourceFile, StoredOperand, Unit
from ckpttool.errors import AccessError, CkptError, CorruptError
from ckpttool.execute import workforce
from ckpttool.execute.ahead import ReadAhead
from ckpttool.execute.blocks import Mover
from ckpttool.execute.compute import TensorComputer
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.engine import run
from ckpttool.execute.options import RunOptions
from ckpttool.execute.reads import operands_at_hand
from ckpttool.execute.remote import open_medium
from ckpttool.execute.schedule import schedule
from tests.execute.far import Far, far_away
from tests.helpers.command import ckpttool
from tests.helpers.memory import FILES, MemoryPlace, in_memory
from tests.storage.test_place import written

MIB = 1 << 20
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 2048,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 MB of a llama, as one file and for eight ranks."""
    root = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    h, inter, vocab = 256, 1024, 2048
    shapes = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,), "lm_head.weight": (vocab, h)}
    for n in range(2):
        p = f"model.layers.{n}."
        shapes |= {p + f"self_attn.{w}_proj.weight": (h, h) for w in "qkvo"}
        shapes |= {p + f"mlp.{w}_proj.weight": (inter, h) for w in ("gate", "up")}
        shapes |= {p + "mlp.down_proj.weight": (h, inter)}
        shapes |= {p + f"{w}_layernorm.weight": (h,) for w in ("input", "post_attention")}
    (root / "hf").mkdir()
    save_file({n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}, root / "hf/model.safetensors")
    (root / "hf/config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float16"}))
    library.open(root / "hf").reshard(tp=8).run(root / "tp8")
    return root


@pytest.fixture
def far() -> Iterator[Far]:
    with far_away(Far()) as machine:
        yield machine


class Peaks:
    """Memory of what reads ahead, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[ReadAhead] = []
        begin = ReadAhead.__init__

        def noted(ahead: ReadAhead, *args: Any) -> None:
            self.found.append(ahead)
            begin(ahead, *args)

        monkeypatch.setattr(ReadAhead, "__init__", noted)

    @property
    def most(self) -> int:
        return max([a.peak for a in self.found], default=0)


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "to ranks": ("hf", {"tp": 8}),
    "to fewer ranks": ("tp8", {"tp": 2}),
    "to one file": ("tp8", {"to": "hf"}),
    "transposed": ("hf", {"to": "unified", "tp": 2}),
    "cast": ("tp8", {"tp": 2, "dtype": "bf16"}),
}


@pytest.mark.product
@pytest.mark.parametrize("memory", [4 * MIB, 64 * MIB])
@pytest.mark.parametrize("job", JOBS)
def test_every_byte_is_fetched_once(
    job: str, memory: int, models: Path, far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, goal = JOBS[job]
    library.open(models / name).reshard(**goal).run(tmp_path / "there")
    with in_memory(models / name) as remote:
        plan = library.open(remote).reshard(**goal)
        far.requests.clear()
        peaks = Peaks(monkeypatch)
        plan.run(tmp_path / "here", memory=memory)
        sizes = {p.name: len(data) for p, data in FILES.items()}
    assert written(tmp_path / "here") == written(tmp_path / "there")
    asked = [r for r in far.requests if r.name.endswith(".safetensors")]
    tensors = sum([p.stat().st_size for p in (models / name).glob("*.safetensors")])
    more = 1.1 if memory > 4 * MIB else 1.5  # norms, which every rank has; a task that does not fit in memory
    assert sum([r.nbytes for r in asked]) <= tensors * more
    assert all(r.start + r.nbytes <= sizes[r.name] for r in asked)
    assert len(asked) <= (60 if memory > 4 * MIB else 300)  # on a busy machine fewer are joined
    assert peaks.most <= memory // 2
    assert far.closed == len(far.opened)


def test_requests_go_on_while_others_are_waited_for(models: Path, far: Far, tmp_path: Path) -> None:
    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(tp=2)
        far.delay = 0.05
        plan.run(tmp_path / "dst", memory=64 * MIB, connections=5)
    assert 3 <= far.at_once <= 5


def test_sources_are_looked_at_together(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, lock, together = 0, threading.Lock(), threading.Event()
    identity = MemoryPlace.identity

    def slow(place: MemoryPlace) -> tuple[int, str]:
        nonlocal busy
        with lock:
            busy += 1
            if busy == 4:
                together.set()
        together.wait(2)
        with lock:
            busy -= 1
        return identity(place)

    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(tp=2)
        monkeypatch.setattr(MemoryPlace, "identity", slow)
        plan.run(tmp_path / "dst")
    assert together.is_set()


@pytest.mark.parametrize("error", [OSError(104, "the connection was reset"), AccessError("no permission any more")])
def test_a_request_that_fails_can_be_resumed(error: Exception, models: Path, far: Far, tmp_path: Path) -> None:
    library.open(models / "tp8").reshard(tp=2).run(tmp_path / "there")

    def fault(name: str, _start: int, _nbytes: int) -> None:
        if name == "rank-00007-of-00008.safetensors" and len(far.requests) > 60:
            raise error

    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(tp=2)
        far.fault = fault
        with pytest.raises(CkptError, match=r"reset|permission") as e:
            plan.run(tmp_path / "here", memory=4 * MIB)
        assert not (tmp_path / "here").exists()
        assert "resume=True" in str(e.value.hint)
        far.fault = None
        plan.run(tmp_path / "here", resume=True)
    assert written(tmp_path / "here") == written(tmp_path / "there")


def test_a_file_that_changes_during_the_run_is_refused(models: Path, far: Far, tmp_path: Path) -> None:
    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(tp=2)
        last = next(p for p in FILES if p.name == "rank-00007-of-00008.safetensors")

        def fault(_name: str, _start: int, _nbytes: int) -> None:
            FILES[last] = FILES[last][:10_000] + bytes(1000) + FILES[last][11_000:]

        far.fault = fault
        with pytest.raises(CorruptError, match="a source has changed since it was planned"):
            plan.run(tmp_path / "dst")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_does_not_wait_for_requests(models: Path, far: Far, tmp_path: Path) -> None:
    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(tp=2)
        far.gate = threading.Event()
        before, began = len(far.requests), 0.0

        def interrupt() -> None:
            nonlocal began
            while len(far.requests) == before:
                time.sleep(0.001)
            began = time.monotonic()
            _thread.interrupt_main()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            plan.run(tmp_path / "dst")
        assert time.monotonic() - began < 5, "the answer comes after 10"
        far.gate.set()


def test_what_is_transposed_is_fetched_once(far: Far, tmp_path: Path) -> None:
    """All of its parts read the same bytes, here and there: they are on this machine while it is done."""
    rows, columns = 3000, 1500
    data = np.random.default_rng(0).integers(0, 1 << 16, (rows, columns), np.uint16)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a").write_bytes(data.tobytes())
    with in_memory(tmp_path / "src") as remote:
        size, tag = MemoryPlace(PurePosixPath(remote.removeprefix("mem:")) / "a").identity()
        src, dst = Block(0, 0, (2, 2 * columns)), Block(0, 0, (2 * rows, 2))
        unit = Unit("a", (Copy(src, dst, (columns, rows), "U16", "U16"),))
        plan = Plan([SourceFile(f"{remote}/a", size, tag)], [Output("b", size)], [unit])
        run(plan, tmp_path / "dst", RunOptions(memory=MIB))
    assert (tmp_path / "dst/b").read_bytes() == data.T.tobytes()
    assert far.nbytes == size
    assert {p.name for p in (tmp_path / "dst").iterdir()} == {"b"}


def test_parts_that_transpose_the_same_bytes_are_one_task() -> None:
    n = 5000
    unit = Unit("a", (Copy(Block(0, 0, (2, 2 * n)), Block(0, 0, (2 * n, 2)), (n, n), "U16", "U16"),))
    plan = Plan([SourceFile("mem:/a", 2 * n * n, "")], [Output("b", 2 * n * n)], [unit])
    assert len(schedule(plan, ())) > 1
    (task,) = schedule(plan, (), {0})
    assert [p.number for p in task.parts] == [p.number for t in schedule(plan, ()) for p in t.parts]


QUESTIONS = {
    "values": ["--stats"],
    "checksum": ["--hash"],
    "a checksum of all": ["--hash", "--total"],
    "soundness": ["--check", "--values"],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_inspect_opens_each_file_once_for_all_values(question: str, models: Path, far: Far) -> None:
    words = QUESTIONS[question]
    before = ckpttool("inspect", models / "tp8", *words)
    with in_memory(models / "tp8") as remote:
        done = ckpttool("inspect", remote, *words)
    assert done.out.replace(remote, str(models / "tp8")) == before.out
    asked = [r for r in far.requests if r.name.endswith(".safetensors")]
    tensors = sum([p.stat().st_size for p in (models / "tp8").glob("*.safetensors")])
    headers, again = 8 * (256 << 10), 0.3 if "--check" in words else 0.01  # replicas are compared
    assert sum([r.nbytes for r in asked]) <= headers + tensors * (1 + again)
    assert len(asked) <= 300  # on a busy machine fewer are joined
    assert far.opened.count("rank-00003-of-00008.safetensors") <= (5 if "--check" in words else 2)


@pytest.mark.parametrize("goal", [{"tp": 2}, {"to": "unified", "tp": 2}], ids=["cut", "transposed"])
def test_verification_reads_the_source_once_more(goal: dict[str, Any], models: Path, far: Far, tmp_path: Path) -> None:
    with in_memory(models / "tp8") as remote:
        plan = library.open(remote).reshard(**goal)
        far.requests.clear()
        plan.run(tmp_path / "dst", verify=True)
    asked = [r for r in far.requests if r.name.endswith(".safetensors")]
    tensors = sum([p.stat().st_size for p in (models / "tp8").glob("*.safetensors")])
    assert sum([r.nbytes for r in asked]) <= 2.2 * tensors
    assert len(asked) <= 400
    assert far.opened.count("rank-00003-of-00008.safetensors") <= 3


@pytest.mark.product
@pytest.mark.parametrize("memory", [16 * MIB, 64 * MIB])
@pytest.mark.parametrize("method", ["linear", "multislerp"])
def test_operands_are_fetched_once(
    method: str, memory: int, models: Path, far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the methods reads them once, the other one twice."""
    monkeypatch.setattr(workforce, "spawn", lambda *_: None)  # so that what is asked for is seen here
    sources = [models / "hf", models / "tp8"]
    library.merge(sources, method=method, weights=[0.5, 0.5]).run(tmp_path / "there")
    with in_memory(sources[0]) as first, in_memory(sources[1]) as second:
        plan = library.merge([first, second], method=method, weights=[0.5, 0.5])
        far.requests.clear()
        peaks = Peaks(monkeypatch)
        plan.run(tmp_path / "here", memory=memory)
    name = "model.safetensors"  # the provenance says where the sources were
    assert written(tmp_path / "here")[name] == written(tmp_path / "there")[name]
    tensors = sum([p.stat().st_size for s in sources for p in s.glob("*.safetensors")])
    asked = [r for r in far.requests if r.name.endswith(".safetensors")]
    more = 1.1 if memory > 16 * MIB else 1.6  # what lies between norms, which are compared, and gaps; twice would be 2
    assert sum([r.nbytes for r in asked]) <= more * tensors
    assert len(asked) < 300
    assert max(a.peak for a in peaks.found) <= memory // 2


def test_operands_that_do_not_fit_in_memory_are_fetched_once(far: Far, tmp_path: Path) -> None:
    """By a method that reads them twice."""
    (tmp_path / "src").mkdir()
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float16)
    for name in "ab":
        (tmp_path / "src" / name).write_bytes(values.tobytes())
    run_of_bytes = Copy(Block(0, 0, (2,)), Block(0, 0, (2,)), values.shape, "F16", "F16")
    with in_memory(tmp_path / "src") as remote:
        operands = tuple(
            StoredOperand("F16", values.shape, (run_of_bytes._replace(src=Block(i, 0, (2,))),), "an operand")
            for i in range(2)
        )
        whole = (("normalize_weights", True), ("eps", 1e-8))
        step = Compute("t", values.shape, "F16", "multislerp", operands, None, ((("weight", 1.0),),) * 2, whole, None)
        with open_medium(memory=MIB) as pool:
            mover = Mover([f"{remote}/a", f"{remote}/b"], [], pool, MIB, threading.Event())
            with operands_at_hand(step, mover):
                for _ in TensorComputer(mover, 8 * MIB, tensor_draws(None)).run(step, ()):
                    pass
    assert far.nbytes == 2 * values.nbytes
