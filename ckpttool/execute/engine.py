"""Run a plan (first, plain version)."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from math import prod
from pathlib import Path

import numpy as np

from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import CorruptError, OutputError
from ckpttool.execute.options import NoProgress, Progress, RunOptions, RunResult
from ckpttool.kernels.cast import cast
from ckpttool.plan import Copy, Fill, Plan, Same


def run(plan: Plan, dst: Path, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult:
    """Write the plan's outputs into ``dst``."""
    options, progress = options or RunOptions(), progress or NoProgress()
    began = time.perf_counter()
    partial = dst.with_name(dst.name + ".partial")
    if dst.exists() and any(dst.iterdir()) and not options.force:
        raise OutputError("the destination exists", where=str(dst), hint="use --force to replace it")
    for s in plan.sources:
        st = os.stat(s.path)
        if (st.st_size, st.st_mtime_ns) != (s.size, s.mtime_ns):
            raise CorruptError("source changed since it was planned", where=s.path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    progress.start(plan.bytes_written, len(plan.outputs))
    out = []
    for o in plan.outputs:
        path = partial / o.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if o.carried:
            shutil.copyfile(o.carried, path)
            out.append(None)
            continue
        with open(path, "w+b") as f:
            f.truncate(o.size)
            for offset, data in o.literals:
                f.seek(offset)
                f.write(data)
            f.flush()
            out.append(mmap.mmap(f.fileno(), o.size) if o.size else None)
    src = []
    for s in plan.sources:
        with open(s.path, "rb") as f:
            src.append(mmap.mmap(f.fileno(), s.size, access=mmap.ACCESS_READ) if s.size else None)

    def view(m, block, shape, dtype):  # type: ignore
        return np.ndarray(shape, numpy_dtype(dtype), m, block.offset, block.strides)

    for u in plan.units:
        for step in u.steps:
            if not prod(step.shape):
                continue
            if isinstance(step, Copy):
                a = view(src[step.src.file], step.src, step.shape, step.src_dtype)
                b = view(out[step.dst.file], step.dst, step.shape, step.dst_dtype)
                if step.src_dtype == step.dst_dtype:
                    b[...] = a
                else:
                    cast(a, b)
            elif isinstance(step, Fill):
                view(out[step.dst.file], step.dst, step.shape, step.dtype)[...] = 0
            elif isinstance(step, Same):
                a = view(src[step.a.file], step.a, step.shape, step.dtype)
                b = view(src[step.b.file], step.b, step.shape, step.dtype)
                if a.tobytes() != b.tobytes():
                    raise CorruptError(f"two copies of `{step.what}` differ")
    for m in out:
        if m is not None:
            m.flush()
    if options.verify:
        options.verify(partial)
    if dst.exists():
        shutil.rmtree(dst)
    partial.rename(dst)
    progress.finish()
    n = plan.bytes_written
    return RunResult(n, n, 0, time.perf_counter() - began, 0, "plain", [], list(plan.notes))
