"""Plans that compute, over real files. Imports no test library: fresh interpreters of the tests import it, too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.files import Place
from ckpttool.core.plan import Block, Compute, Copy, Output, Plan, StoredOperand, Unit, WrittenTensor
from ckpttool.execute import blocks
from ckpttool.execute.files import FilePool
from ckpttool.execute.verification import Checks, Verification
from tests.execute.plans import Array, source


class Files:
    """Source files that arrays are put into, and operands that read them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sources: list[Any] = []

    def stored(self, array: Array, dtype: str, label: str = "x", *, head: int = 8) -> StoredOperand:
        """The whole of an array as one operand, in a file of its own."""
        array = np.ascontiguousarray(array.astype(numpy_dtype(dtype)))
        number = len(self.sources)
        data = b"\1" * head + array.tobytes()
        self.sources.append(source(self.directory / f"{number}.bin", data))
        item = array.itemsize
        copy = Copy(Block(number, head, (item,)), Block(0, 0, (item,)), (array.size,), dtype, dtype)
        return StoredOperand(dtype, array.shape, (copy,), f"`{label}` of source {number}")

    def carrier(self) -> blocks.Mover:
        return blocks.Mover([s.path for s in self.sources], [], FilePool(), 1 << 20, threading.Event())


def merge_plan(directory: Path, *, rows: int = 40, dtype: str = "BF16", **changes: Any) -> tuple[Plan, bytes]:
    """Two tensors, each the mean of two: one stays whole, one is cut by columns over two files. And what they are."""
    files = Files(directory)
    rng = np.random.default_rng(1)
    units: list[Unit] = []
    want = b""
    item = numpy_dtype(dtype).itemsize
    halves = [b"", b""]
    for k in range(2):
        a, b = rng.standard_normal((2, rows, 6)).astype(np.float32)
        x, y = files.stored(a, dtype, "a"), files.stored(b, dtype, "b")
        mean = ((a.astype(numpy_dtype(dtype)).astype("f8") + b.astype(numpy_dtype(dtype)).astype("f8")) / 2).astype(
            numpy_dtype(dtype)
        )
        if k == 0:
            copies: tuple[Copy, ...] = (Copy(Block(0, 0, (item,)), Block(0, 0, (item,)), (rows * 6,), dtype, dtype),)
            targets: tuple[WrittenTensor, ...] = (WrittenTensor("t0", 0, 0, rows * 6 * item),)
            want = mean.tobytes()
        else:
            size = rows * 3 * item
            copies = tuple(
                Copy(
                    Block(0, 3 * half * item, (6 * item, item)),
                    Block(half, rows * 6 * item if half == 0 else 0, (3 * item, item)),
                    (rows, 3),
                    dtype,
                    dtype,
                )
                for half in range(2)
            )
            targets = tuple(WrittenTensor("t1", half, rows * 6 * item if half == 0 else 0, size) for half in range(2))
            halves = [np.ascontiguousarray(mean[:, :3]).tobytes(), np.ascontiguousarray(mean[:, 3:]).tobytes()]
        one = Compute(
            f"t{k}", (rows, 6), dtype, "linear", (x, y), None,
            ((("weight", 1.0),), (("weight", 1.0),)), (("normalize", True),), None, True, copies,
        )  # fmt: skip
        units.append(Unit(f"t{k}", (one._replace(**changes),), targets))
    data = want + halves[0], halves[1]
    outputs = [Output(f"{i}.bin", len(d)) for i, d in enumerate(data)]
    return Plan(files.sources, outputs, units), b"|".join(data)


def written(dst: Path) -> bytes:
    return b"|".join((dst / f"{i}.bin").read_bytes() for i in range(2))


def working_out(plan: Plan) -> Verification:
    """Everything that is computed is worked out once more."""

    def look(outputs: Place) -> Checks:
        checks = Checks()
        checks.add_computed(plan, outputs)
        return checks

    return Verification(look, 1 << 20)
