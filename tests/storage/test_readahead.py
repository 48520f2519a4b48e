"""Small reads of files on other machines: how many requests they are, and that they give the bytes."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import ckpttool as library
from ckpttool.errors import CorruptError
from ckpttool.storage.caches import BYTES, KEPT_BYTES
from ckpttool.storage.place import expect, open_file, parse_place, read_each
from ckpttool.storage.readahead import BLOCK, HEAD, LONGEST, STRAIGHT, Windows
from tests.helpers.command import ckpttool
from tests.helpers.memory import FILES, TRAFFIC, MemoryFile, in_memory

FIXTURES = Path(__file__).parents[2] / "fixtures"

# At most so many requests open a checkpoint: one a file, and one for the end of a zip and what lies before it.
OPENED = {
    "hf_tiny_source": 2,
    "llama_tp8": 9,
    "deepseek_v3": 4,
    "torch/sharded": 5,
    "torch_fsdp/tp_fsdp": 9,
    "torch/deepspeed/z3": 5,
    "dcp/titan_llama3/checkpoint": 50,
    "megatron/legacy/qwen3_moe_tp2_ep2": 9,
    "megatron/dist/llama_tp2": 15,
    "megatron/nemo/zarr": 12,
    "paddle_unified/nlp_llama_bf16_tp2_quantO1": 9,
    "paddle_zcc/ep2_tp2_sharding2_ema": 15,
    "paddle_flex/tp2_dp2": 5,
    "gguf/llama_q8_0/model.gguf": 2,
    "paddle_programs/legacy": 2,
}


@pytest.mark.sample("llama_tp8", "torch/deepspeed/z3", "megatron/dist/llama_tp2", "gguf/llama_q8_0/model.gguf")
@pytest.mark.parametrize("name", OPENED)
def test_opening_takes_few_requests(name: str) -> None:
    path = FIXTURES / name
    with in_memory(path if path.is_dir() else path.parent) as root:
        there = library.open(root if path.is_dir() else f"{root}/{path.name}")
        assert sorted(there) == sorted(library.open(path))
        assert 0 < len(TRAFFIC.reads) <= OPENED[name], Counter(n for n, _, _ in TRAFFIC.reads)
        held = sum(len(d) for d in FILES.values())
        assert TRAFFIC.nbytes <= held  # no byte twice
        opened = len(TRAFFIC.reads)
        library.open(root if path.is_dir() else f"{root}/{path.name}")
        assert len(TRAFFIC.reads) == opened, "the second time all is there"


def remote_file(nbytes: int) -> tuple[bytes, str]:
    """A file of random bytes, and where it is."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    FILES[PurePosixPath("/checkpoints/hf_tiny_source/data")] = data
    return data, "mem:/checkpoints/hf_tiny_source/data"


def test_small_reads_give_the_bytes_and_follow_each_other_in_larger_requests() -> None:
    with in_memory(FIXTURES / "hf_tiny_source"):
        data, text = remote_file(5_000_000)
        with open_file(parse_place(text)) as file:
            at = 0
            while at < len(data):
                assert file.pread(1000, at) == data[at : at + 1000]
                at += 1000
            assert file.pread(10, len(data)) == b""
        asked = [n for _, _, n in TRAFFIC.reads]
        assert asked[0] == HEAD * BLOCK
        assert max(asked) == LONGEST * BLOCK  # a memory file gives at most 1 MiB of them at a time
        assert len(asked) < 12


def test_reads_anywhere_give_the_bytes() -> None:
    rng = np.random.default_rng(1)
    with in_memory(FIXTURES / "hf_tiny_source"):
        data, text = remote_file(3_000_001)
        with open_file(parse_place(text)) as file:
            for _ in range(200):
                at, n = (
                    int(rng.integers(len(data))),
                    int(rng.choice([1, 100, BLOCK, 5 * BLOCK, STRAIGHT, STRAIGHT + 7])),
                )
                assert file.pread(n, at) == data[at : at + n]
                buffer = bytearray(n)
                got = file.read_into(memoryview(buffer), at)
                assert 0 < got <= n
                assert buffer[:got] == data[at : at + got]
            with parse_place(text).open("rb") as f:
                f.seek(12_345)
                assert f.read(70_000) == data[12_345:82_345]
                f.seek(0)
                assert f.read() == data


def test_what_is_expected_is_asked_for_at_once() -> None:
    with in_memory(FIXTURES / "hf_tiny_source"):
        data, text = remote_file(4_000_000)
        places = list(range(100, len(data), 200_000))
        with open_file(parse_place(text)) as file:
            expect(file, [*places, *places, len(data) + 5, -1])
            assert len(TRAFFIC.reads) == len(places)
            for at in places:
                assert file.pread(30, at) == data[at : at + 30]
        assert len(TRAFFIC.reads) == len(places)
        assert TRAFFIC.nbytes == len(places) * BLOCK


def test_what_is_kept_is_bounded() -> None:
    def read_into(buffer: memoryview, _at: int) -> int:
        return len(buffer)

    TRAFFIC.clear()
    for i in range(30):
        windows = Windows(i, 100 * LONGEST * BLOCK, read_into)
        for at in range(0, 4 * LONGEST * BLOCK, STRAIGHT - 1):
            windows.pread(STRAIGHT - 1, at)
        assert sum(map(len, BYTES._held.values())) == BYTES._size <= KEPT_BYTES
    TRAFFIC.clear()


def test_another_file_of_the_same_name_is_another_file() -> None:
    with in_memory(FIXTURES / "hf_tiny_source"):
        for n in (1000, 1000):
            data = np.random.default_rng(len(TRAFFIC.reads)).bytes(n)
            FILES[PurePosixPath("/checkpoints/hf_tiny_source/data")] = data
            with open_file(parse_place("mem:/checkpoints/hf_tiny_source/data")) as file:
                assert file.pread(n, 0) == data


def test_a_file_that_ends_early_is_not_kept_as_whole() -> None:
    windows = Windows("early", 10 * BLOCK, lambda buffer, at: min(len(buffer), max(0, 100 - at)))
    assert len(windows.pread(1000, 0)) == 100
    assert ("early", 0) not in BYTES


def test_files_are_read_at_once_and_errors_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = threading.Barrier(8)
    real = MemoryFile.read_into

    def meet(self: MemoryFile, buffer: memoryview, at: int) -> int:
        if self.info.place.suffix == ".safetensors":
            all_of_them.wait(30)
        return real(self, buffer, at)

    monkeypatch.setattr(MemoryFile, "read_into", meet)
    with in_memory(FIXTURES / "llama_tp8") as root:
        library.open(root)
        places = [parse_place(f"{root}/model_tp{i}.safetensors") for i in range(8)]

        def read(place: object, number: int) -> int:
            if number >= 3:
                raise CorruptError(f"{place} is number {number}")
            return number

        found = read_each(read, places, range(8))
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CorruptError, match="number 3"):
            next(found)


@pytest.mark.parametrize("name", ["legacy", "legacy_regions", "legacy_tied"])
def test_a_program_is_not_read_whole_into_memory(name: str) -> None:
    """A .pdmodel is looked at byte by byte, and its constants may be large."""
    program = FIXTURES / "paddle_programs" / name / "model.pdmodel"
    with in_memory(program.parent) as root:
        done = ckpttool("convert-json", f"{root}/model.pdmodel", "--check", "--json")
        assert not TRAFFIC.maps
    local = ckpttool("convert-json", program, "--check", "--json")
    assert (done.code, done.out.replace(root, str(program.parent))) == (local.code, local.out), done.err
