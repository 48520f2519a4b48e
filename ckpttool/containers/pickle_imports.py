"""The imports of a pickle when it is loaded: its opcodes are walked, nothing is run.

A pickle names the functions that it calls. Weights need a few dozen of them (``SAFE``); any other is code of somebody
else's choice, which runs as soon as the file is loaded without a restriction.

    80 02 c 6f 73 0a 73 79 73 74 65 6d 0a     GLOBAL 'os system'      -> "os.system"
    8c 02 "os"  8c 06 "system"  93            STACK_GLOBAL            -> the same

Strings are followed through the stack and the memo, because STACK_GLOBAL takes its names from there; what cannot be
followed is reported as "?". Arguments of any size are passed over. The opcodes are those of CPython's pickletools.
A file may be several pickles, a zip of torch.save, or many zips (shards of torch.distributed.checkpoint).
"""

from __future__ import annotations

import codecs
import io
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import IO, Any, NamedTuple

from ckpttool.core.files import Place

UNKNOWN = "?"
"""A global whose name is worked out while the pickle runs."""

SAFE = frozenset(
    {
        *(f"builtins.{n}" for n in (
            "set", "frozenset", "slice", "bytes", "bytearray", "complex", "list", "dict", "tuple", "int", "float",
            "bool", "str", "object", "range", "xrange", "long", "unicode", "Ellipsis", "NotImplemented",
        )),
        "collections.OrderedDict", "collections.defaultdict", "collections.Counter", "collections.deque",
        "_codecs.encode", "copyreg._reconstructor", "argparse.Namespace", "datetime.datetime", "datetime.timedelta",
        "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.PurePosixPath",  # each .metadata of DCP has one
        "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
        "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
        "numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer",
        "torch.Size", "torch.device", "torch.Tensor", "torch.storage.UntypedStorage", "torch.storage.TypedStorage",
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter", "torch.serialization._get_layout", "torch.ByteTensor",
        *(f"torch.{n}Storage" for n in (
            "Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool", "BFloat16", "ComplexDouble",
            "ComplexFloat", "QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4", "Untyped",
        )),
        *(f"torch.{n}" for n in (
            "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16",
            "uint32", "uint64", "bool", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2",
            "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "strided", "sparse_coo", "per_tensor_affine",
            "per_channel_affine", "preserve_format", "contiguous_format",
        )),
    }
)  # fmt: skip
"""Names that weights and the state of optimizers need; none of them runs anything."""
_RECORDS = frozenset(
    {
        "numpy.dtypes", "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.planner", "torch.distributed._shard.metadata",
        "torch.distributed._shard.sharded_tensor.metadata", "paddle.distributed.flex_checkpoint.dcp.metadata",
        "paddle.distributed.checkpoint.metadata", "paddle.base.libpaddle", "transformers.training_args",
        "transformers.trainer_utils", "transformers.trainer_callback", "transformers.trainer_pt_utils",
        "accelerate.state",
        "torch.distributed.tensor", "torch.distributed.tensor._dtensor_spec",
        "torch.distributed.tensor.placement_types", "torch.distributed.device_mesh", "torch.distributed._mesh_layout",
        "bytecheckpoint.checkpointer.meta_type", "megatron.core.enums", "megatron.core.transformer.enums",
        "deepspeed.runtime.zero.config", "deepspeed.runtime.fp16.loss_scaler", "deepspeed.utils.tensor_fragment",
        "accelerate.utils.dataclasses", "paddlenlp.trainer.training_args",
        "paddlenlp.trainer.trainer_utils", "paddlenlp.trainer.trainer_callback",
        "paddleformers.trainer.training_args", "paddleformers.trainer.trainer_utils",
        "paddleformers.trainer.trainer_callback",
    }
)  # fmt: skip
"""Modules whose classes are plain records and choices."""
_DANGEROUS = frozenset(
    {
        "os", "posix", "nt", "sys", "subprocess", "socket", "shutil", "pty", "runpy", "importlib", "ctypes", "code",
        "codeop", "pickle", "_pickle", "marshal", "types", "multiprocessing", "webbrowser", "platform", "timeit",
        "pdb", "bdb", "operator", "functools", "asyncio", "threading", "tempfile", "urllib", "requests", "http",
        "ftplib", "smtplib", "pip", "site", "builtins", "__builtin__", "torch.hub", "torch.utils.cpp_extension",
        "torch.serialization", "joblib", "dill", "cloudpickle",
    }
)  # fmt: skip
"""Modules with which a pickle does whatever its author wanted."""
_OPENS = frozenset(f"{m}.{n}" for m in ("io", "_io") for n in ("open", "open_code", "FileIO")) | {"codecs.open"}
"""Functions that open files; ``open`` is pickled by the first of these names."""

MAX_NAMES = 1000
MAX_OPCODES = 1 << 24
"""Most opcodes in one file: metadata of half a million shards. What is longer is reported as "?"."""
_FEW_OPCODES = 1 << 19
"""Opcodes that may be in any file: about a second. A larger file may have one for each of its bytes: in those of
torch.save, which are not compressed, it has no more, and a small file that unpacks to many is not worth the time."""
_TEXT = 1 << 12
_OPCODES = {ord(o.code): o for o in pickletools.opcodes}
_STRINGS = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_NAMING = frozenset({"GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"})
_ZIP = b"PK\x03\x04"
_CHUNK = 1 << 16
_MAX_PASSED = 1 << 28
"""Bytes of the members of a zip that are passed over, or four times those that the file has: a pickle names what it
needs long before."""
_MAX_ZIPS = 1 << 16
"""Most zips in one file."""
_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, UnicodeDecodeError)
_NAME = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF


class NamedGlobal(NamedTuple):
    """A global that a file's pickles name; ``ckpttool.answers.findings.Import`` says what the fields are."""

    name: str
    member: str
    offset: int
    times: int


def imports(path: Place) -> tuple[str, ...]:
    """The globals of all pickles in a file that weights do not need, dangerous ones first. Raises OSError."""
    found = {i.name for i in named(path) if not is_safe(i.name)}
    return tuple(sorted(found, key=lambda n: (not is_dangerous(n), n)))


def named(path: Place) -> list[NamedGlobal]:
    """Every global of all pickles in a file, in the order in which it names them; each once for a member.

    A plain pickle, several one behind another (torch before 1.6), zips with ``.pkl`` in them (torch). [] for a file
    that is none of these. Raises OSError.
    """
    found: dict[tuple[str, str], NamedGlobal] = {}
    with path.open("rb") as f:
        head = f.read(4)
        budget = _Budget(f.seek(0, io.SEEK_END))
        f.seek(0)
        for member, stream in _zips(f) if head == _ZIP else [("", f)]:
            for name, offset in walk(stream, budget):
                if not (head == _ZIP or head[:1] == b"\x80" or path.suffix == ".pkl") and not (
                    _NAME.fullmatch(name) and is_dangerous(name)
                ):
                    continue  # nothing says that this is a pickle: any bytes name something
                first = found.get((name, member), NamedGlobal(name, member, offset, 0))
                found[name, member] = first._replace(times=first.times + 1)
                if len(found) >= MAX_NAMES:
                    return list(found.values())
            if budget.is_spent:
                break
    return list(found.values())


def is_zip_without_pickles(path: Place) -> bool:
    """Whether a file begins as a zip, and no pickle can be found in it. Raises OSError."""
    with path.open("rb") as f:
        if f.read(4) != _ZIP:
            return False
        return next(_zips(f), None) is None


def is_safe(name: str) -> bool:
    """Whether a global is one that weights need."""
    plain = name.replace("__builtin__.", "builtins.", 1)
    module, _, name = plain.rpartition(".")
    return plain in SAFE or (module in _RECORDS and (name.lstrip("_")[:1].isupper() or name == "fragment_address"))


def is_dangerous(name: str) -> bool:
    """Whether a global can run commands or code by itself."""
    module = name.rpartition(".")[0]
    return not is_safe(name) and (name in {UNKNOWN, *_OPENS} or any(m in _DANGEROUS for m in _parents(module)))


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _zips(f: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Pickles in the zips that lie one behind another in a file, the last zip first: each says how long it is."""
    end = f.seek(0, io.SEEK_END)
    for _ in range(_MAX_ZIPS):
        begin = _begin(f, end)
        for name, stream in _members(_FileSlice(f, begin, end) if begin else f):
            yield f"@{begin} {name}" if begin else name, stream
        if not begin:
            return
        end = begin


def _begin(f: IO[bytes], end: int) -> int:
    """The byte at which the zip begins that ends at byte ``end``; 0 where that is not clear."""
    f.seek(max(0, end - _END.size - _LOCATOR.size - _END64.size))
    tail = f.read(end - f.tell())
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\x05\x06":
        return 0
    directory, (size, start) = end - _END.size, _END.unpack(tail[-_END.size :])[5:7]
    if _FULL in (size, start) or tail[-_END.size - _LOCATOR.size :][:4] == b"PK\x06\x07":
        if len(tail) < _END64.size + _LOCATOR.size + _END.size or tail[:4] != b"PK\x06\x06":
            return 0
        directory, (size, start) = end - len(tail), _END64.unpack_from(tail)[8:10]
    begin: int = directory - size - start
    if begin <= 0:
        return 0
    f.seek(begin)
    return begin if f.read(4) == _ZIP else 0


class _FileSlice(io.RawIOBase):
    """Bytes ``begin`` to ``end`` of a file, as a file."""

    def __init__(self, f: IO[bytes], begin: int, end: int) -> None:
        super().__init__()
        self._file, self._begin, self._size, self._at = f, begin, end - begin, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _members(f: IO[bytes] | _FileSlice) -> Iterator[tuple[str, IO[bytes]]]:
    """Pickles in a zip."""
    # What zipfile cannot open, nothing can load either.
    with suppress(*_BROKEN), zipfile.ZipFile(f) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".pkl"):
                with archive.open(info) as member:
                    yield info.filename, member


class _Mark:
    pass


class _Budget:
    """The memory and work that the pickles of a file of ``size`` bytes may take together, however small they are while
    they are packed."""

    def __init__(self, size: int) -> None:
        self.opcodes = min(max(size, _FEW_OPCODES), MAX_OPCODES)
        self.passed = max(4 * size, _MAX_PASSED)
        self.is_spent = False


def walk(stream: IO[bytes], budget: _Budget | None = None) -> Iterator[tuple[str, int]]:
    """(name, byte) of the globals of all pickles that lie one behind another in a stream.

    It ends where there is no pickle any more, and with UNKNOWN where the budget (by default that of a small file) does.
    """
    budget = budget or _Budget(0)
    while True:
        try:
            more = yield from _one(stream, budget)
        except (EOFError, ValueError, IndexError, zipfile.BadZipFile, zlib.error):
            return
        except _TooLongError:
            budget.is_spent = True
            yield UNKNOWN, stream.tell()
            return
        if not more:
            return


class _TooLongError(Exception):
    """More opcodes than are read, bytes than are passed over, or digits than a number is given."""


def _one(stream: IO[bytes], budget: _Budget) -> Generator[tuple[str, int], None, bool]:
    """One pickle. Returns whether another one may follow. Raises ValueError, IndexError and EOFError for none."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    while True:
        budget.opcodes -= 1
        if budget.opcodes < 0:
            raise _TooLongError
        code = stream.read(1)
        if not code:
            return False
        op = _OPCODES.get(code[0])
        if op is None:
            raise ValueError(code)
        at = stream.tell() - 1 if op.name in _NAMING else 0
        argument = _argument(stream, op, budget)
        if op.name in ("GLOBAL", "INST"):
            yield argument if argument is not None else UNKNOWN, at
        elif op.name == "STACK_GLOBAL":
            module, name = stack[-2:] if len(stack) > 1 else (None, None)
            known = isinstance(module, str) and isinstance(name, str)
            yield f"{module}.{name}" if known else UNKNOWN, at
        elif op.name in ("EXT1", "EXT2", "EXT4"):
            yield UNKNOWN, at
        elif op.name == "STOP":
            return True
        if op.name in ("PUT", "GET") and argument is None:
            raise _TooLongError
        if op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if op.name == "MEMOIZE" else int(argument)] = stack[-1]
            continue
        if op.name == "DUP":
            stack.append(stack[-1])
            continue
        if op.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(int(argument)))
            continue
        _pop(stack, op)
        if op.name in _STRINGS:
            stack.append(argument)
        else:
            stack += [_Mark if kind is pickletools.markobject else None for kind in op.stack_after]


def _pop(stack: list[Any], op: pickletools.OpcodeInfo) -> None:
    """Take what an opcode takes."""
    before = op.stack_before
    if op.name == "POP" and stack and stack[-1] is _Mark:
        stack.pop()
    elif pickletools.markobject in before:
        while stack and stack.pop() is not _Mark:
            pass
        below = before.index(pickletools.markobject)
        del stack[len(stack) - below :]
    elif before:
        del stack[len(stack) - len(before) :]


def _argument(stream: IO[bytes], op: pickletools.OpcodeInfo, budget: _Budget) -> Any:
    """The argument of an opcode; long ones are passed over, and are None."""
    if op.arg is None:
        return None
    if op.arg.n == pickletools.UP_TO_NEWLINE:
        said = [_line(stream, budget) for _ in range(2 if op.name in ("GLOBAL", "INST") else 1)]
        lines = [line for line in said if line is not None]
        if len(lines) < len(said):
            return None
        if op.name in _STRINGS:
            return _unescaped(lines[0], op.name)
        return ".".join([line.decode("utf-8", "replace") for line in lines])
    if op.arg.n >= 0:
        return int.from_bytes(_exactly(stream, op.arg.n), "little")
    width = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }[op.arg.n]
    size = int.from_bytes(_exactly(stream, width), "little")
    if size <= _TEXT:
        data = _exactly(stream, size)
        return data.decode("utf-8", "replace") if op.name in _STRINGS else None
    _pass(stream, size, budget)
    return None


def _exactly(stream: IO[bytes], n: int) -> bytes:
    data = stream.read(n)
    if len(data) != n:
        raise EOFError
    return data


def _unescaped(line: bytes, kind: str) -> str | None:
    """The text that protocols 0 and 1 write as a line; None for one that CPython does not take."""
    try:
        if kind == "UNICODE":
            return line.decode("raw-unicode-escape")
        quoted = line.strip()
        with warnings.catch_warnings(action="ignore"):  # of unknown escapes, which stand for themselves
            return codecs.escape_decode(quoted[1:-1])[0].decode("latin-1")
    except ValueError:
        return None


def _line(stream: IO[bytes], budget: _Budget) -> bytes | None:
    """A line; None for one that is long. The last one of a file loses its last byte, as in CPython."""
    data = stream.readline(_TEXT)
    if data.endswith(b"\n") or len(data) < _TEXT:
        return data[:-1]
    while data and not data.endswith(b"\n"):
        budget.passed -= len(data)
        if budget.passed < 0:
            raise _TooLongError
        data = stream.readline(_CHUNK)
    return None


def _pass(stream: IO[bytes], n: int, budget: _Budget) -> None:
    """Pass over bytes; those of a deflated member have to be read."""
    if isinstance(stream, io.BufferedReader):
        at = stream.tell()
        if stream.seek(0, io.SEEK_END) < at + n:
            raise EOFError
        stream.seek(at + n)
        return
    while n:
        if budget.passed <= 0:
            raise _TooLongError
        part = stream.read(min(n, _CHUNK, budget.passed))
        if not part:
            raise EOFError
        n -= len(part)
        budget.passed -= len(part)
