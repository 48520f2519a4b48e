"""Inference programs in Paddle: what a ``paddle_server`` does with FOLDER/job.json.

A job is a list of tasks. ``export`` writes models; every other task loads one program and runs it, in a process of its
own, because some broken programs crash Paddle or never end. Each task tells one line of JSON, in the order of the job.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

PROCESSES = 2
MEMORY = 16 << 30
"""Bytes of address space: a record may claim any size."""

Arrays = dict[str, Any]


# -- models


class Dtypes(nn.Layer):  # type: ignore[misc]
    """Every dtype that Paddle can save, each in the result."""

    def __init__(self) -> None:
        super().__init__()
        r = np.random.default_rng(0)
        self.linear = nn.Linear(3, 3)
        for n in ("float16", "bfloat16", "float64"):
            start = nn.initializer.Constant(0.375)
            self.add_parameter(f"p_{n}", self.create_parameter([2, 3], dtype=n, default_initializer=start))
        numbers = r.standard_normal((8, 2, 3))
        self.register_buffer("b_bool", paddle.to_tensor(numbers[0] > 0))
        self.register_buffer("b_uint8", paddle.to_tensor(r.integers(0, 256, (2, 3), dtype="u1")))
        for bits in (8, 16, 32, 64):
            value = r.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 3), dtype=f"i{bits // 8}")
            self.register_buffer(f"b_int{bits}", paddle.to_tensor(value))
        for n, d in zip(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), numbers[1:5], strict=True):
            self.register_buffer(f"b_{n}", paddle.to_tensor(d.astype("f4")).astype(n))
        self.register_buffer("b_float64", paddle.to_tensor(numbers[5]))
        self.register_buffer("b_complex128", paddle.to_tensor(numbers[6] + 1j * numbers[7]))
        self.register_buffer("b_complex64", paddle.to_tensor((numbers[7] + 1j * numbers[6]).astype("c8")))

    def forward(self, x: Any) -> Any:
        cast = ("float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "float8_e4m3fn", "float8_e5m2")
        tensors = [getattr(self, f"b_{n}") for n in cast] + [self.p_float16, self.p_bfloat16, self.p_float64]
        complex_ = (f(t) for t in (self.b_complex64, self.b_complex128) for f in (paddle.real, paddle.imag))
        others = (self.b_int64 + paddle.ones([1], "int64"), self.b_float64 * 2.0, paddle.logical_not(self.b_bool))
        return self.linear(x), *(t.astype("float32") for t in tensors), *complex_, *others


class Regions(nn.Layer):  # type: ignore[misc]
    """Parameters inside of loops and branches, a 0-d one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("limit", paddle.to_tensor(3, dtype="int64"))
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(0.5))

    def forward(self, x: Any) -> Any:
        i = paddle.zeros([], "int64")
        while i < self.limit:
            if x.sum() > 0:
                x = paddle.tanh(self.a(x))
                if x.max() > self.scale:
                    x = x * self.scale
            else:
                x = self.b(x)
            i = i + 1
        if x.mean() > 0:
            x = self.c(x)
        return x


class Shapes(nn.Layer):  # type: ignore[misc]
    """No axis, many axes, no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))
        self.register_buffer("empty", paddle.zeros([0, 3]))
        self.register_buffer("deep", paddle.full([1] * 7, 0.3))

    def forward(self, x: Any) -> Any:
        return paddle.concat([x * self.scalar, self.empty], 0) + self.deep.reshape([1]), self.empty * 2


class Names(nn.Layer):  # type: ignore[misc]
    """Names that JSON has to quote, and that sort otherwise in UTF-16."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.create_parameter([3, 3], attr=paddle.ParamAttr(name='权重_é"\\/\u2028😀'))
        self.v = self.create_parameter([3, 3], attr=paddle.ParamAttr(name="\uffee"))
        self.linear = nn.Linear(3, 3, weight_attr=paddle.ParamAttr(name="z w\t/a.b@c"))

    def forward(self, x: Any) -> Any:
        return self.linear(paddle.matmul(paddle.matmul(x, self.w), self.v))


class Tied(nn.Layer):  # type: ignore[misc]
    """One weight with two names, one layer with two, one that the program does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias_attr=False)
        self.out = self.embed.weight
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Any) -> Any:
        return paddle.matmul(self.second(self.first(self.embed(x))), self.out, transpose_y=True)


class LegacyTied(nn.Layer):  # type: ignore[misc]
    """What a program of before PIR can have: tied weights, a buffer that does not persist, none and no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.second, self.out = self.first, self.first.weight
        self.register_buffer("moved", paddle.ones([4]), persistable=False)
        self.register_buffer("empty", paddle.zeros([0, 3]))
        self.scalar = self.create_parameter([], default_initializer=nn.initializer.Constant(2.0))

    def forward(self, x: Any) -> Any:
        y = self.second(self.embed(x) * self.scalar + self.moved)
        return nn.functional.linear(y, self.out), self.empty * 2


class WithNan(nn.Layer):  # type: ignore[misc]
    """A constant that Paddle writes and cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x), self.linear(x) + paddle.full([3], float("nan"))


def bits(tensor: Any) -> Any:
    """The bits of a tensor; numpy has neither bfloat16 (as uint16) nor FP8 (as uint8)."""
    array = np.array(tensor)
    return array.view("u1") if "float8" in str(tensor.dtype) else array


def floats(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def lists(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def numbered(outputs: Sequence[Any]) -> Arrays:
    return {f"y{i}": np.array(y) for i, y in enumerate(outputs)}


def keep(path: Path, arrays: Arrays) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def save(folder: Path, inputs: Arrays, outputs: Sequence[Any], values: Arrays) -> dict[str, Any]:
    """What belongs to an exported model, beside it. Returns what its line says."""
    keep(folder / "inputs.npz", inputs)
    keep(folder / "outputs.npz", numbered(outputs))
    # Names may hold what no file name may, so an archive that has them as names is not portable.
    keep(folder / "values.npz", {str(i): v for i, v in enumerate(values.values())})
    return {"name": folder.name, "values": list(values)}


def exported(folder: Path, layer: Any, inputs: Arrays, *shapes: list[Any]) -> dict[str, Any]:
    """As a user exports a layer, with its state dict beside it."""
    layer.eval()
    given = [paddle.to_tensor(a) for a in inputs.values()]
    outputs = lists(layer(*given))
    specs = [InputSpec(s, str(a.dtype), n) for s, (n, a) in zip(shapes, inputs.items(), strict=True)]
    paddle.jit.save(layer, str(folder / "model"), input_spec=specs)
    state = layer.to_static_state_dict()
    paddle.save(layer.state_dict(), str(folder / "model.pdparams"))
    said = save(folder, inputs, outputs, {t.name: bits(t) for t in state.values()})
    structured: dict[str, list[str]] = {}
    for name, t in layer.state_dict().items():
        structured.setdefault(t.name, []).append(name)
    return said | {"structured": structured}


def edited(folder: Path) -> dict[str, Any]:
    """One layer, and what comes out when its weight is doubled."""
    layer = nn.Linear(4, 3)
    inputs = {"x": floats(2, 4)}
    said = exported(folder, layer, inputs, [None, 4])
    layer.weight.set_value(layer.weight * 2)
    keep(folder / "doubled.npz", numbered([layer(paddle.to_tensor(inputs["x"]))]))
    return said | {"weight": layer.weight.name}


def one_of_two(folder: Path, seed: int) -> dict[str, Any]:
    """The same architecture and names with other weights, and what the mean of both gives."""
    layers = []
    for s in (1, 2):
        paddle.seed(s)
        with paddle.utils.unique_name.guard():
            layers.append(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    inputs = {"x": floats(2, 4)}
    mean = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    one, other = (layer.state_dict() for layer in layers)
    mean.set_state_dict({n: one[n] * 0.5 + other[n] * 0.5 for n in one})
    keep(folder / "mean.npz", numbered([mean(paddle.to_tensor(inputs["x"]))]))
    return exported(folder, layers[seed - 1], inputs, [None, 4])


@contextmanager
def static() -> Iterator[tuple[Any, Any, Any]]:
    """A program, what starts it, and an executor, in a scope of their own."""
    paddle.enable_static()
    main, start = paddle.static.Program(), paddle.static.Program()
    try:
        with paddle.static.program_guard(main, start), paddle.static.scope_guard(paddle.static.Scope()):
            yield main, start, paddle.static.Executor(paddle.CPUPlace())
    finally:
        paddle.disable_static()


def held(names: Sequence[str]) -> Arrays:
    scope = paddle.static.global_scope()
    return {n: np.array(scope.find_var(n).get_tensor()) for n in names}


def inference(folder: Path) -> dict[str, Any]:
    """A static program that was trained a step."""
    inputs = {"image": floats(2, 6)}
    with static() as (main, start, executor):
        image = paddle.static.data("image", [None, 6], "float32")
        y = paddle.static.nn.fc(nn.functional.relu(paddle.static.nn.fc(image, 5)), 2)
        executor.run(start)
        outputs = executor.run(main, feed=inputs, fetch_list=[y])
        paddle.static.save_inference_model(str(folder / "model"), [image], [y], executor, program=main)
        return save(folder, inputs, outputs, held(saved(folder)))


def adam(folder: Path) -> dict[str, Any]:
    """A training program with all of its state: moments are not parameters by their operator."""
    inputs = {"x": floats(2, 4), "t": floats(2, 1, seed=2)}
    with static() as (main, start, executor):
        x, t = (paddle.static.data(n, [None, *a.shape[1:]], "float32") for n, a in inputs.items())
        loss = nn.functional.mse_loss(paddle.static.nn.fc(x, 1), t)
        paddle.optimizer.Adam(0.01).minimize(loss)
        executor.run(start)
        executor.run(main, feed=inputs, fetch_list=[loss])
        where = str(folder / "model")
        paddle.static.save_inference_model(where, [x, t], [loss], executor, program=main, skip_prune_program=True)
        values = held(saved(folder))
        outputs = executor.run(main, feed=inputs, fetch_list=[loss])
    return save(folder, inputs, outputs, values)


def saved(folder: Path) -> list[str]:
    """Names of what lies in the parameter file, as its program says."""
    (region,) = json.loads((folder / "model.json").read_bytes())["program"]["regions"]
    names = []
    for op in region["blocks"][0]["ops"]:
        if op["#"] == "p":
            names.append(op["A"][3])
        elif op["#"] == "1.data" and any(a["N"] == "persistable" and a["AT"]["D"][0]["D"] for a in op["OA"]):
            names.append(next(a["AT"]["D"] for a in op["A"] if a["N"] == "name"))
    return names


def legacy(folder: Path) -> dict[str, Any]:
    """A layer, exported as before PIR, with its names in a .info."""
    with paddle.pir_utils.OldIrGuard():
        paddle.disable_static()
        return exported(folder, LegacyTied(), {"x": np.array([[1, 2, 3]])}, [None, 3])


def legacy_static(folder: Path) -> dict[str, Any]:
    """A static program of before PIR."""
    inputs = {"image": floats(2, 6)}
    with paddle.pir_utils.OldIrGuard(), static() as (main, start, executor):
        image = paddle.static.data("image", [None, 6], "float32")
        y = paddle.static.nn.fc(nn.functional.relu(paddle.static.nn.fc(image, 5)), 2)
        y = paddle.static.nn.batch_norm(y, is_test=True)
        executor.run(start)
        outputs = executor.run(main, feed=inputs, fetch_list=[y])
        paddle.static.save_inference_model(str(folder / "model"), [image], [y], executor, program=main)
        return save(folder, inputs, outputs, held([v.name for v in main.list_vars() if v.persistable]))


MODELS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dtypes": lambda p: exported(p, Dtypes(), {"x": floats(2, 3)}, [2, 3]),
    "regions": lambda p: exported(p, Regions(), {"x": floats(2, 4)}, [None, 4]),
    "linears": lambda p: exported(p, nn.Sequential(*(nn.Linear(3, 3) for _ in range(13))), {"x": floats(2, 3)}, [2, 3]),
    "shapes": lambda p: exported(p, Shapes(), {"x": floats(2, 3)}, [None, 3]),
    "names": lambda p: exported(p, Names(), {"输入": floats(2, 3)}, [None, 3]),
    "tied": lambda p: exported(p, Tied(), {"x": np.array([[1, 2, 3]])}, [None, 3]),
    "nan": lambda p: exported(p, WithNan(), {"x": floats(2, 3)}, [None, 3]),
    "edited": edited,
    "one": lambda p: one_of_two(p, 1),
    "other": lambda p: one_of_two(p, 2),
    "inference": inference,
    "adam": adam,
    "legacy": legacy,
    "legacy_static": legacy_static,
}


def export(folder: Path) -> dict[str, Any]:
    """Write a model into a folder of its name."""
    folder.mkdir(parents=True)
    paddle.seed(1)
    return MODELS[folder.name](folder)


# -- loading, in each of three ways


def with_jit(path: str, _: str, inputs: Arrays) -> list[Any]:
    """As an application loads it."""
    layer = paddle.jit.load(path)
    layer.eval()
    return [np.array(y) for y in lists(layer(*(paddle.to_tensor(a) for a in inputs.values())))]


def with_static(path: str, _: str, inputs: Arrays) -> list[Any]:
    """As a static program."""
    paddle.enable_static()
    executor = paddle.static.Executor(paddle.CPUPlace())
    program, fed, fetched = paddle.static.load_inference_model(path, executor)
    # Of a training program it also names what persists, which is loaded.
    return lists(executor.run(program, feed={n: a for n, a in inputs.items() if n in fed}, fetch_list=fetched))


def with_predictor(path: str, suffix: str, inputs: Arrays) -> list[Any]:
    """As a server loads it."""
    from paddle import inference as infer

    config = infer.Config(path + suffix, path + ".pdiparams")
    config.disable_gpu()
    config.disable_glog_info()
    predictor = infer.create_predictor(config)
    for n in predictor.get_input_names():
        predictor.get_input_handle(n).copy_from_cpu(inputs[n])
    predictor.run()
    return [predictor.get_output_handle(n).copy_to_cpu() for n in predictor.get_output_names()]


LOADERS = {"J": with_jit, "S": with_static, "I": with_predictor}


def load(task: Mapping[str, Any]) -> dict[str, Any]:
    """Load, run, and keep what came out."""
    with np.load(task["inputs"]) as f:
        inputs = {n: f[n] for n in f.files}
    with ExitStack() as stack:
        if task["suffix"] == ".pdmodel" and task["loader"] != "I":
            # The way to load it beside PIR; the predictor looks at the file's name.
            stack.enter_context(paddle.pir_utils.OldIrGuard())
            paddle.disable_static()
        outputs = LOADERS[task["loader"]](task["path"], task["suffix"], inputs)
    # What a broken program leaves undefined comes out as None, which is no array.
    keep(Path(task["out"]), {n: y if y.dtype.kind != "O" else np.array(str(y)) for n, y in numbered(outputs).items()})
    return {"said": "accepted"}


# -- processes


def forked(task: Mapping[str, Any], said: Path) -> int:
    """Start a process for a task; it leaves its line in ``said``."""
    child = os.fork()
    if child:
        return child
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        line = load(task)
    except BaseException as e:  # noqa: BLE001 - whatever Paddle raises is its answer
        last = [x.strip() for x in str(e).splitlines() if x.strip()]
        line = {"said": "refused", "error": f"{type(e).__name__}: {' | '.join(last[-3:])}"[:500]}
    said.write_text(json.dumps(line), encoding="utf-8")
    # Without the end of the interpreter, where a broken program may crash after everything was said.
    os._exit(0)


def loaded(tasks: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Some processes at a time; what each task told."""
    told: list[dict[str, Any]] = [{} for _ in tasks]
    running: dict[int, tuple[int, float]] = {}
    waiting = list(enumerate(tasks))[::-1]
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            i, task = waiting.pop()
            running[forked(task, folder / f"said.{i}.json")] = (i, time.monotonic() + task.get("limit", 60))
        for child, (i, end) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() < end:
                continue
            if not done:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            said = folder / f"said.{i}.json"
            if not done:
                told[i] = {"said": "hang"}
            elif os.WIFSIGNALED(status) or not said.exists():
                told[i] = {"said": "crash", "error": f"status {status}"}
            else:
                told[i] = json.loads(said.read_text(encoding="utf-8"))
            said.unlink(missing_ok=True)
            del running[child]
        time.sleep(0.003)
    return told


def main() -> None:
    """All tasks of a job; the exports first."""
    paddle.set_device("cpu")
    path = Path(sys.argv[1])
    tasks = json.loads(path.read_text(encoding="utf-8"))
    told = []
    for task in tasks:
        if task["do"] == "export":
            try:
                told.append(export(Path(task["folder"])))
            except Exception as e:
                traceback.print_exc()
                raise SystemExit(f"{task['folder']}: {e}") from e
    told += loaded([t for t in tasks if t["do"] == "load"], path.parent)
    for line in told:
        print("CKPTTOOL", json.dumps(line), flush=True)  # noqa: T201
    print("CKPTTOOL", json.dumps({"version": paddle.__version__}), flush=True)  # noqa: T201
