"""The same reshard with torch.distributed.checkpoint: DTensors over gloo ranks, loaded for one mesh, saved for another.

    python -m bench.peers.torch_dcp save RANKS DST WAYS       rank files of ckpttool -> a checkpoint of DTensors
    python -m bench.peers.torch_dcp reshard SRC DST WAYS      load it over WAYS ranks and save it again
    python -m bench.peers.torch_dcp compare RANKS SRC         whether both hold the same; says how they differ

``reshard`` is what is measured; the other two make its source and judge its output.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

# mypy: disable-error-code="attr-defined, no-untyped-call, union-attr"
# torch says neither what these modules export nor of which types it is.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

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


def _reshard(rank: int, src: Path, dst: Path, ways: int, meeting: str) -> None:
    mesh = _begin(rank, ways, meeting)
    state = {}
    for name, tensor in dcp.FileSystemReader(src).read_metadata().state_dict_metadata.items():
        shape, cut = list(tensor.size), axis(name)
        if cut is not None:
            shape[cut] //= ways
        state[name] = _placed(name, torch.empty(shape, dtype=tensor.properties.dtype), mesh)
    dcp.load(state, checkpoint_id=src)
    dcp.save(state, checkpoint_id=dst)
    dist.destroy_process_group()


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


def main(job: str, src: Path, dst: Path, ways: int) -> None:
    """One of the three."""
    if job == "compare":
        print(_compare(src, dst))
        return
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_save if job == "save" else _reshard, (src, dst, ways, f"{meeting}/gloo"), nprocs=ways)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
