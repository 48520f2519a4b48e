"""The same reshard with torch.distributed.checkpoint: DTensors over gloo ranks, loaded for one mesh, saved for another.

    python -m bench.peers.torch_dcp save RANKS DST WAYS       rank files of ckpttool -> a checkpoint of DTensors
    python -m bench.peers.torch_dcp reshard SRC DST WAYS      load it over WAYS tensor-parallel ranks and save it again
    python -m bench.peers.torch_dcp rows SRC DST WAYS         the same over WAYS ranks of FSDP
    python -m bench.peers.torch_dcp compare RANKS SRC         whether both hold the same; says how they differ
    python -m bench.peers.torch_dcp same A B                  the same of two checkpoints, or two files of torch.save

``reshard`` and ``rows`` are what is measured; the others make a source and judge outputs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# mypy: disable-error-code="attr-defined, no-untyped-call, union-attr"
# torch says neither what these modules export nor of which types it is.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from bench.peers.torch_reshard import axis


def _rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _begin(rank: int, ways: int, meeting: str) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ways)
    torch.set_num_threads(1)
    return init_device_mesh("cpu", (ways,))


def _placed(name: str, local: torch.Tensor, mesh: Any) -> DTensor:
    cut = axis(name)
    return DTensor.from_local(local, mesh, [Replicate() if cut is None else Shard(cut)], run_check=False)


def _save(rank: int, src: Path, dst: Path, ways: int, meeting: str) -> None:
    mesh = _begin(rank, ways, meeting)
    with safe_open(_rank_files(src)[rank], "pt") as f:
        state = {name: _placed(name, f.get_tensor(name), mesh) for name in f.keys()}  # noqa: SIM118 - not a dict
    dcp.save(state, checkpoint_id=dst)
    dist.destroy_process_group()


def _reshard(rank: int, src: Path, dst: Path, ways: int, meeting: str, *, rows: bool = False) -> None:
    mesh = _begin(rank, ways, meeting)
    state: dict[str, Any] = {}
    for name, held in dcp.FileSystemReader(src).read_metadata().state_dict_metadata.items():
        if isinstance(held, BytesStorageMetadata):
            state[name] = None
            continue
        cut = (0 if held.size else None) if rows else axis(name)
        placed = [Replicate() if cut is None else Shard(cut)]
        state[name] = empty(held.size, dtype=held.properties.dtype, device_mesh=mesh, placements=placed)
    dcp.load(state, checkpoint_id=src)
    dcp.save(state, checkpoint_id=dst)
    dist.destroy_process_group()


def _rows(rank: int, src: Path, dst: Path, ways: int, meeting: str) -> None:
    _reshard(rank, src, dst, ways, meeting, rows=True)


def _compare(ranks: Path, src: Path) -> str:
    metadata = dcp.FileSystemReader(src).read_metadata().state_dict_metadata
    files = [safe_open(p, "pt") for p in _rank_files(ranks)]
    if set(metadata) != set(files[0].keys()):
        return "other tensors"
    for name, tensor in metadata.items():
        state = {name: torch.empty(list(tensor.size), dtype=tensor.properties.dtype)}
        dcp.load(state, checkpoint_id=src, no_dist=True)
        cut = axis(name)
        parts = [f.get_tensor(name) for f in files]
        whole = parts[0] if cut is None else torch.cat(parts, cut)
        if not torch.equal(whole.view(torch.uint16), state[name].view(torch.uint16)):
            return f"{name} differs"
    return ""


def _held(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Names, and what loads a tensor; a file is mapped into memory."""
    if path.is_file():
        value = torch.load(path, mmap=True)
        return {name: partial(_itself, t) for name, t in value.get("model", value).items()}
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        n: partial(_loaded, path, n, held) for n, held in found.items() if not isinstance(held, BytesStorageMetadata)
    }


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _loaded(path: Path, name: str, held: Any) -> torch.Tensor:
    state = {name: torch.empty(held.size, dtype=held.properties.dtype)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[name]


def _same(ours: Path, theirs: Path) -> str:
    a, b = _held(ours), _held(theirs)
    if a.keys() != b.keys():
        return f"other tensors: {sorted(a.keys() ^ b.keys())[:4]}"
    for name in a:
        x, y = a[name](), b[name]()
        if x.dtype != y.dtype or x.shape != y.shape or not torch.equal(_bits(x), _bits(y)):
            return f"{name} differs"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def main(job: str, src: Path, dst: Path, ways: int) -> None:
    """One of the five."""
    if job in ("compare", "same"):
        print((_compare if job == "compare" else _same)(src, dst))
        return
    run = {"save": _save, "reshard": _reshard, "rows": _rows}[job]
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(run, (src, dst, ways, f"{meeting}/gloo"), nprocs=ways)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
