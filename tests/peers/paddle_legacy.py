"""Programs of before PIR, written by Paddle: what a ``paddle_server`` does with FOLDER/job.

Each becomes FOLDER/NAME.pdmodel and NAME.pdiparams, and a line of JSON with what protobuf and Paddle say about it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Paddle looks at it once, while it is imported; what can be set later leaves half of it in PIR.
os.environ["FLAGS_enable_pir_api"] = "0"  # noqa: SIM112

import paddle
from paddle import nn
from paddle.base.proto import framework_pb2
from paddle.static import InputSpec


class Convolution(nn.Layer):  # type: ignore[misc]
    """Parameters that the program uses, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2D(3, 4, 3), nn.BatchNorm2D(4), nn.Linear(4, 2)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        return self.out(nn.functional.relu(self.norm(self.conv(x))).mean([2, 3]))


class Dtypes(nn.Layer):  # type: ignore[misc]
    """A parameter of every type that can be cast, and more linear layers than have one digit."""

    others = ("int8", "uint8", "int16", "int32", "int64", "bool", "float64", "float16", "bfloat16")

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.LayerList([nn.Linear(4, 4) for _ in range(12)])
        self.embed = nn.Embedding(10, 4)
        for d in self.others:
            self.register_buffer(f"of_{d}", paddle.ones([2, 3]).astype(d))
        self.register_buffer("scalar", paddle.to_tensor(2.0))

    def forward(self, x: Any) -> Any:
        y = self.embed(x)
        for linear in self.linears:
            y = linear(y)
        for d in self.others:
            y = y + getattr(self, f"of_{d}").astype("float32").mean()
        return y + self.scalar


class Loop(nn.Layer):  # type: ignore[misc]
    """Blocks inside a block; an array that nothing defines before the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, n: Any) -> Any:
        i = paddle.zeros([1], dtype="int64")
        rows = []
        for k in range(x.shape[0]):
            rows.append(self.linear(x[k]))
        while i < n:
            j = paddle.zeros([1], dtype="int64")
            while j < n:
                x = self.linear(x) + 1
                j = j + 1
            i = i + 1
        return x, paddle.stack(rows)


def exported(layer: Any, path: Path, *specs: Any) -> None:
    """As a user exports a layer."""
    layer.eval()
    paddle.jit.save(paddle.jit.to_static(layer, input_spec=list(specs), full_graph=True), str(path))


def static(path: Path) -> None:
    """A program that was trained, cloned for inference before."""
    paddle.enable_static()
    main, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, start), paddle.static.scope_guard(paddle.static.Scope()):
        x, t = paddle.static.data("x", [None, 4]), paddle.static.data("t", [None, 1])
        y = paddle.static.nn.fc(paddle.static.nn.batch_norm(x), 1)
        test = main.clone(for_test=True)
        paddle.optimizer.Adam(1e-3).minimize(nn.functional.mse_loss(y, t))
        executor = paddle.static.Executor()
        executor.run(start)
        paddle.static.save_inference_model(str(path), [x], [y], executor, program=test)
    paddle.disable_static()


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "convolution": lambda p: exported(Convolution(), p, InputSpec([None, 3, 8, 8], "float32", "image")),
    "dtypes": lambda p: exported(Dtypes(), p, InputSpec([None, 5], "int64", "ids")),
    "loop": lambda p: exported(Loop(), p, InputSpec([None, 3, 4], "float32"), InputSpec([1], "int64", "n")),
    "static": static,
}


def told(path: Path) -> dict[str, Any]:
    """What protobuf reads."""
    program = framework_pb2.ProgramDesc()
    program.ParseFromString(path.read_bytes())
    variables = {v.name: v for b in reversed(program.blocks) for v in b.vars}
    saved = [n for n, v in variables.items() if v.persistable and v.type.type == framework_pb2.VarType.DENSE_TENSOR]

    def tensor(name: str) -> list[Any]:
        of = variables[name].type.dense_tensor.tensor
        return [name, of.data_type, list(of.dims)]

    def ends(kind: str) -> list[Any]:
        found = []
        for op in program.blocks[0].ops:
            if op.type == kind:
                slot = (op.outputs if kind == "feed" else op.inputs)[0]
                found.append((next(a.i for a in op.attrs if a.name == "col"), slot.arguments[0]))
        return [tensor(n) for _, n in sorted(found)]

    return {
        "version": program.version.version,
        "blocks": len(program.blocks),
        "parameters": [tensor(n) for n in sorted(saved)],
        "inputs": ends("feed"),
        "outputs": ends("fetch"),
        "operators": Counter(op.type for b in program.blocks for op in b.ops),
    }


def main() -> None:
    """Write them all."""
    paddle.set_device("cpu")
    folder = Path(sys.argv[1]).parent
    for name, write in PROGRAMS.items():
        write(folder / name)
        print("CKPTTOOL", json.dumps({"name": name, **told(folder / f"{name}.pdmodel")}), flush=True)  # noqa: T201
