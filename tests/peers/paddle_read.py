"""Checkpoints read by Paddle's own functions: what a ``paddle_server`` does with JOBS.json.

JOBS.json is a list of ``{"do": ..., "path": ..., "out": ...}``. Each job puts the tensors that it finds into the file
``out`` (.npz) and prints a line of JSON about them. With PADDLE_TRAINERS_NUM in the environment, as Paddle's launcher
sets it, this is one rank of several.
"""

from __future__ import annotations

import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import paddle
from paddle import distributed

from tests.peers.paddle_software import flatten, on_the_processor, only_checkpoints, save


def place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def fast_safe_open() -> Any:
    """The reader of the software that is asked for."""
    if os.environ.get("CKPTTOOL_PADDLE_SOFTWARE") == "paddlenlp-3.0":
        only_checkpoints()
        from paddlenlp.utils.safetensors import fast_safe_open as found
    else:
        from paddleformers.utils.safetensors import fast_safe_open as found
    return found


def unified(path: str, out: str) -> dict[str, Any]:
    """Every file that an index names, as the trainers open it. Keys: ``component/name``."""
    opened = fast_safe_open()
    tensors: dict[str, Any] = {}
    stray, lost = [], []
    for index in sorted(Path(path).glob("*.safetensors.index.json")):
        component = index.name.split(".")[0]
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {k: v for v in sorted(set(weights.values())) for k in _open(opened, Path(path) / v, tensors, component)}
        stray += [k for k in files if weights.get(k) != files[k]]
        lost += [k for k in weights if k not in files]
    return {"dtypes": save(out, tensors), "stray": stray, "lost": lost}


def _open(opened: Any, file: Path, tensors: dict[str, Any], component: str) -> list[str]:
    with opened(str(file), framework="np") as f:
        names = list(f.keys())
        for name in names:
            tensors[f"{component}/{name}"] = f.get_tensor(name)
    return names


def pickles(path: str, out: str) -> dict[str, Any]:
    """``paddle.load`` of every .pdparams and .pdopt. Keys: ``file/key/...``; "names" are the tensors' own."""
    tensors, names, other = {}, {}, {}
    for file in sorted([*Path(path).glob("*.pdparams"), *Path(path).glob("*.pdopt")]):
        for key, value in flatten(paddle.load(str(file), keep_name_table=True), f"{file.name}/").items():
            if isinstance(value, paddle.Tensor):
                tensors[key], names[key] = value, value.name
            else:
                other[key] = value if isinstance(value, (str, int, float)) else repr(value)
    return {"dtypes": save(out, tensors), "names": names, "other": other}


def flex(path: str, out: str) -> dict[str, Any]:
    """``paddle.distributed.load_state_dict`` into whole tensors, or into this rank's rows where they can be shared."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, ranks = place()
    (metadata,) = Path(path).glob("*.metadata")
    state, pieces = {}, {}
    for key, parts in paddle.load(str(metadata)).state_dict_metadata.items():
        shape = tuple(
            max(p.global_offset[i] + p.local_shape[i] for p in parts) for i in range(len(parts[0].local_shape))
        )
        cut = ranks > 1 and len(shape) > 1 and shape[0] % ranks == 0
        local = (shape[0] // ranks, *shape[1:]) if cut else shape
        offset = (rank * local[0], *(0,) * (len(shape) - 1)) if cut else (0,) * len(shape)
        target = paddle.zeros([prod(local)], dtype="float32").reshape(local).astype(parts[0].dtype)
        state[key] = ShardedWeight(key, target, local, shape, offset)
        pieces[key] = cut
    distributed.load_state_dict(state, path)
    return {"dtypes": save(out, {k: v.local_tensor for k, v in state.items()}), "cut": pieces}


def flex_merge(path: str, out: str, skip: list[str] | None = None) -> dict[str, Any]:
    """``merge_sharded_state_dict``; ``out`` is a directory."""
    from paddle.distributed.flex_checkpoint.dcp.load_state_dict import merge_sharded_state_dict

    merge_sharded_state_dict(path, out, skip_postfix_list=skip or [])
    return {}


DO = {"unified": unified, "pickles": pickles, "flex": flex, "flex_merge": flex_merge}


def main() -> None:
    """Do the jobs; a job that fails says so in its line."""
    rank, ranks = place()
    on_the_processor()
    if ranks > 1:
        distributed.init_parallel_env()
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        do = DO[job.pop("do")]
        if ranks > 1:
            job["out"] += f".rank{rank}.npz"
        try:
            done = do(**job)
        except Exception as error:  # noqa: BLE001
            done = {"error": f"{type(error).__name__}: {error}"}
        print("CKPTTOOL", json.dumps({"out": job["out"], **done}), flush=True)  # noqa: T201
