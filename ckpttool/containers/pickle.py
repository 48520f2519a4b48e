"""Reading pickles without unpickling: an interpreter of opcodes that builds inert values.

A pickle is a program for a stack machine, and a loader that runs it runs whatever its author wanted (``paddle.load``
is such a loader: measured with paddlepaddle 3.3.1). Nothing is ever unpickled here. Opcodes that make plain values do
so; the few classes and functions that a writer names are stand-ins which only note what they were given; everything
else is refused by name. What a writer names is its ``PickleVocabulary``: Paddle's is in ``paddle_pickle``, torch's in
``torch_pickle``. The bytes of arrays are passed over, so that a file of any size is indexed by its structure alone:

    file.pdparams                              what read_pickle gives
    80 04 95 <frame>                           {
    } ( 8c "fc.w_0"                              "fc.w_0": PickledArray(
      <_reconstruct> <ndarray> (0,) b'b' R                   "F32",        from dtype ('f4', ...) and its order '<'
      ( 1 (4,3) <dtype f4 '<'> False                         (4, 3),       from the state's shape
        C 30 <48 bytes> t b   <--------------------------    offset, 48)   where these bytes lie in the file
    u .                                        }

Protocols 3 and 4 hold an array's elements as one run of bytes (also where it crosses a frame's border: CPython writes
runs of 64 KiB and more between frames, smaller ones inside). Protocol 2 has no bytes: elements are text in UTF-8 whose
code points are the bytes (``_codecs.encode(text, 'latin1')``); they are decoded while they are read.

Where the facts come from: opcodes from CPython's Lib/pickletools.py; what an array is, from ``ndarray.__reduce__``,
``ndarray.__setstate__`` and ``dtype.__reduce__`` of numpy. All were compared with files written by paddlepaddle 3.3.1
under numpy 1 and 2.

Memory is bounded by the bytes of structure that a file really has: containers, remembered values, texts and nesting
have limits, nothing is copied more than once, and values that hold themselves, or that are small only because parts are
shared many times over, are refused (whoever walks them would not come back).
"""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from operator import is_
from typing import Any, NamedTuple, NoReturn

from ckpttool.core.encodings import Encoding, Span, Text, latin1
from ckpttool.core.files import DataFile, OpenFile, Place
from ckpttool.core.words import count
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.place import open_file, readable

MAX_VALUES = 1 << 26
"""Values in containers, remembered values and stack entries, each: metadata of a million shards has 45 million."""
MAX_TEXT = 1 << 24
"""Bytes of one text or byte string that is no array; tensor names have a few hundred."""
MAX_TEXTS = 1 << 28
"""Bytes of all of them."""
MAX_MARKS = 1 << 12
"""Marks open at once. A container takes one while it is filled, so that nesting of MAX_DEPTH needs fewer; each costs
70 bytes of memory for one of the file."""
MAX_STRUCTURE = 1 << 28
"""Bytes besides arrays and long texts: two million tensors, or shards of metadata. Some opcodes leave nothing behind
that another limit would count."""
MAX_DEPTH = 64
"""Containers in containers; Paddle's saves have five."""
MAX_AXES = 64
"""numpy's own limit."""
MAX_INT = 255
"""Bytes of one integer: what LONG1 can say."""

MAX_FIELDS = 64
"""Most fields of one PickledObject; Paddle's have six."""

_LAZY = 1 << 10
"""Texts of more bytes than this are passed over until somebody wants them: in protocol 2 they are tensors."""
_WINDOW = 1 << 16


class PickledArray(NamedTuple):
    """A numpy array in a pickle: where its bytes lie."""

    dtype: str
    """Name as in ``core.dtypes`` of what is stored: Paddle's bfloat16 is "U16" and its FP8 "I8". complex128 is "C128",
    which that table does not have, so that a caller can refuse it by the tensor's name."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the first element in ``file``; -1 for a tensor that is stored in parts (PaddleFile.chunks)."""
    nbytes: int
    file: DataFile
    """The pickle itself, or what its texts are decoded to (protocol 2)."""
    fortran: bool = False
    """Column-major; only ever true with two axes or more."""
    name: str = ""
    """Name of the tensor, where the pickle has Paddle's ``(name, array)``."""


class PickledObject(NamedTuple):
    """An instance of an allowed class; equal to nothing but itself, because it is filled after it is made."""

    cls: str
    """Name without module."""
    fields: dict[str, Any]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


# -- values on the machine's stack that are no plain values yet


class Global(NamedTuple):
    """A class or function that the pickle names: only ever compared, never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return printable(f"{self.module}.{self.name}")


class _LongText:
    """A long text, still in the file."""

    __slots__ = ("blob", "nbytes", "offset", "value")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.value: str | None = None
        self.blob: _Blob | None = None


class _Blob:
    """A run of bytes, still in the file; of protocol 2, the ``text`` that stands for them."""

    __slots__ = ("nbytes", "offset", "place", "text", "value")

    def __init__(self, offset: int, nbytes: int, *, text: bool = False) -> None:
        self.offset, self.nbytes, self.text = offset, nbytes, text
        self.value: bytes | None = None
        self.place: tuple[DataFile, int, int] | None = None


class _Dtype:
    """numpy.dtype(code) with the byte order of its state; its ``name`` is "" if elements are no plain numbers."""

    __slots__ = ("code", "name", "size")

    def __init__(self, code: str, name: str, size: int) -> None:
        self.code, self.name, self.size = code, name, size


class _Empty:
    """An array that ``_reconstruct`` made; BUILD says what it holds."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: PickledArray | PickledObject | None = None


class _Args:
    """A tuple with values that are not plain yet."""

    __slots__ = ("depth", "items", "value")

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items
        depth = 0
        for i in items:
            if type(i) is _Args and i.depth > depth:
                depth = i.depth
        self.depth: int = 1 + depth
        self.value: Any = None


_CODES = (
    "b1:BOOL:? i1:I8:b u1:U8:B i2:I16:h u2:U16:H f2:F16:e i4:I32:i u4:U32:I f4:F32:f"
    " i8:I64:q u8:U64:Q f8:F64:d c8:C64:ff c16:C128:dd"
)
"""numpy's codes (kind and bytes of an element), the dtypes that they are, and how struct says it."""

_KINDS = {code: (name, int(code[1:])) for code, name, _ in (c.split(":") for c in _CODES.split())}
_STRUCT = {code: letters for code, _, letters in (c.split(":") for c in _CODES.split())}

_DTYPE_VERSIONS = (0, 1, 2, 3, 4)
"""Versions of a dtype's state that numpy reads; an array's state has the version 1."""

_PLAIN = frozenset(
    {str, int, float, bool, type(None), dict, list, tuple, bytes, complex, slice, PickledArray, PickledObject}
)
_CONTAINERS = frozenset({dict, list, tuple, PickledObject})
_KEYS = frozenset({str, int, bool, type(None), bytes, Global})


def printable(text: str, most: int = 120) -> str:
    """Text of a file that may hold anything, for a message on a terminal."""
    short = text if len(text) <= most else text[:most] + "..."
    return short.encode("unicode_escape").decode("ascii")


def quoted(value: Any) -> str:
    """A value of a file, for a message: only texts, because others may be long to print."""
    return f"`{printable(value)}`" if isinstance(value, str) else f"of type {type(value).__name__}"


Call = Callable[["Machine", Global, tuple[Any, ...]], Any]
"""Makes a value of a function or class that a pickle calls, and of what it calls it with."""


class PickleVocabulary(NamedTuple):
    """The globals that one writer's pickles may name, and their stand-ins."""

    writer: str
    """Completes "which ... does not"."""
    danger: str
    """Hint that names who would run the refused code."""
    calls: Mapping[tuple[str, str], Call]
    """Functions and classes by module and name."""
    records: Mapping[tuple[str, str], str] = {}
    """Classes whose instances are made without arguments and then filled, and the ``cls`` of each."""
    refuses: Callable[[Global], bool] = lambda _: True
    """Whether another name refuses the pickle. If not, it becomes an inert PickledObject wherever it is used."""
    builds: Mapping[type, Callable[[Machine, Any, Any], None]] = {}
    """Functions that set the state from BUILD on values of a type, besides numpy's and ``records``."""
    opcodes: Mapping[int, Callable[[Machine], None]] = {}
    """Besides the machine's own."""
    plain: frozenset[type] = frozenset()
    """Types of values that stay as they are."""
    keeps_odd: bool = False
    """Whether what may lie beside tensors, and is neither a tensor nor plain data, becomes an inert object: a dtype of
    numpy, an array that holds no numbers, a key that is no name, a text that is too long. Otherwise it is refused."""


class Machine:
    """One pickle being read: bytes ``begin`` to ``end`` of a file."""

    def __init__(self, file: OpenFile, vocabulary: PickleVocabulary, begin: int, end: int) -> None:
        self.file, info = file, file.info
        self.path, self.begin, self.size, self.info = info.place, begin, end, info
        self.vocabulary = vocabulary
        self.plain_types = _PLAIN | vocabulary.plain
        self.encoding = Encoding("text", str(info.place))
        self.decoded = info._replace(encoding=self.encoding)
        self.protocol = 0
        self.text_at: dict[int, int] = {}
        """Offsets of short texts of protocol 2, by their identity: some are the elements of an array."""
        # The window of the file that is in memory.
        self.buffer = b""
        self.base = 0
        self.pos = 0
        self.ahead = 4096
        # The machine.
        self.start = 0
        """Byte of the opcode at work."""
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.below = 0
        """Values on the stack under the newest mark."""
        self.made = 0
        self.skipped = 0
        self.texts = 0

    # Errors.

    def where(self, at: int | None = None) -> str:
        return f"{self.path} [byte {self.start if at is None else at:,}]"

    def corrupt(self, what: str) -> NoReturn:
        raise CorruptError(what, where=self.where(), hint="fetch or write the file again")

    def refuse(self, what: str, hint: str = "") -> NoReturn:
        hint = hint or f"nothing in the file was run; {self.vocabulary.danger}"
        raise UnsupportedError(what, where=self.where(), hint=hint)

    def short(self, needed: int) -> NoReturn:
        raise IncompleteError(
            f"the pickle is cut off: it needs at least {needed:,} bytes, the file has {self.size:,}",
            where=self.where(),
            hint="the download or save was interrupted; fetch or write the file again",
        )

    # The file.

    def tell(self) -> int:
        return self.base + self.pos

    def take(self, n: int) -> bytes:
        pos = self.pos
        stop = pos + n
        if stop <= len(self.buffer):
            self.pos = stop
            return self.buffer[pos:stop]
        return self.refill(n)

    def refill(self, n: int) -> bytes:
        at = self.base + self.pos
        if at + n > self.size:
            self.short(at + n)
        # Each opcode has a byte at least, so limits that are looked at here cannot be missed by more than a window.
        self.make(0)
        if at - self.begin - self.skipped > MAX_STRUCTURE:
            self.refuse(
                f"the pickle has more than {MAX_STRUCTURE:,} bytes besides its arrays",
                "no known checkpoint has so many",
            )
        self.buffer = self.pread(at, max(n, self.ahead))
        self.ahead = min(2 * self.ahead, _WINDOW)
        self.base, self.pos = at, n
        return self.buffer[:n]

    def pread(self, at: int, n: int) -> bytes:
        """Up to ``n`` bytes, fewer only at the end."""
        parts = []
        want = min(n, self.size - at)
        while want > 0:
            part = self.file.pread(want, at)
            if not part:
                self.short(at + want)  # it became shorter while it was read
            parts.append(part)
            at += len(part)
            want -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, n: int) -> int:
        """Pass over bytes and say where they begin."""
        at = self.base + self.pos
        if at + n > self.size:
            self.short(at + n)
        self.pos += n
        self.skipped += n
        if self.pos > len(self.buffer):
            # What comes now is the description of one more array: a few hundred bytes.
            self.base, self.pos, self.buffer, self.ahead = at + n, 0, b"", 4096
        return at

    def make(self, n: int) -> None:
        """Count values that containers hold."""
        self.made += n
        if max(self.made, len(self.memo), len(self.marks), len(self.stack) + self.below) > MAX_VALUES:
            self.refuse(f"the pickle has more than {MAX_VALUES:,} values", "no known checkpoint has so many")

    def line(self) -> str:
        """Text up to a newline."""
        out = bytearray()
        while (c := self.take(1)) != b"\n":
            out += c
            if len(out) > 512:
                self.corrupt("the name of a class has more than 512 bytes")
        return self.decode(bytes(out))

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
        try:
            # Names of files that are no UTF-8, as Python keeps them; so CPython's pickler writes them.
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self.corrupt("a text is not UTF-8")

    def afford(self, n: int) -> None:
        if n > MAX_TEXT:
            self.refuse(f"a text or byte string of {n:,} bytes is not an array", "ckpttool reads tensors, not objects")
        self.texts += n
        if self.texts > MAX_TEXTS:
            self.refuse(
                f"the texts of the pickle have more than {MAX_TEXTS:,} bytes", "no known checkpoint has so many"
            )

    # Run.

    def run(self, *, whole: bool) -> Any:
        """The value; nothing may lie behind a ``whole`` pickle."""
        if self.size - self.begin < 2:
            self.short(self.begin + 2)
        head = self.pread(self.begin, 2)
        if head[:1] != b"\x80":
            self.corrupt("this is not a pickle of protocol 2 to 5: it does not begin with 0x80")
        if head[1] not in (2, 3, 4, 5):
            self.refuse(f"the pickle has protocol {head[1]}, ckpttool reads 2 to 5", "save it with protocol 4")
        self.protocol, self.base = head[1], self.begin + 2
        own = self.vocabulary.opcodes
        memo = self.memo
        table = [own.get(code, act) for code, act in enumerate(_BY_CODE)] if own else _BY_CODE
        try:
            while True:
                pos, buffer, stack = self.pos, self.buffer, self.stack
                if pos < len(buffer):  # what take(1) does, for every opcode
                    code = buffer[pos]
                    # Values that are remembered and recalled, MEMOIZE and LONG_BINGET, are two fifths of the metadata
                    # of a save: they are done here, without a call. What is odd about one is left to its own method.
                    if code == 0x94 and stack:
                        memo.append(stack[-1])
                        self.pos = pos + 1
                        continue
                    if code == 0x6A and pos + 5 <= len(buffer):
                        at = int.from_bytes(buffer[pos + 1 : pos + 5], "little")
                        if at < len(memo):
                            stack.append(memo[at])
                            self.pos = pos + 5
                            continue
                    self.pos = pos + 1
                else:
                    code = self.refill(1)[0]
                self.start = self.base + self.pos - 1
                act = table[code]
                if act is not None:
                    act(self)
                elif code == 0x2E:  # STOP
                    break
                else:
                    self.unknown(bytes([code]))
            if len(self.stack) != 1 or self.marks:
                self.corrupt(f"the pickle stops with {len(self.stack)} values and {len(self.marks)} open marks")
        except IndexError:
            self.corrupt("the pickle takes a value from an empty stack")
        value = self.plain(self.stack.pop())
        if whole and self.tell() != self.size:
            self.start = self.tell()
            self.corrupt(f"the pickle ends before the file: {count(self.size - self.tell(), 'byte')} left")
        self.memo.clear()
        if not self.walk(value) and self.vocabulary.keeps_odd:
            value = self.acyclic(value, set(), {})
        if not self.walk(value):
            self.deep()
        return value

    def unknown(self, code: bytes) -> NoReturn:
        if code == b"\x80":
            self.corrupt("a second pickle begins inside the first")
        name = next((o.name for o in pickletools.opcodes if o.code == code.decode("latin-1")), None)
        if name is None:
            self.corrupt(f"0x{code.hex()} is not a pickle opcode")
        self.refuse(f"the pickle uses the opcode {name}, which {self.vocabulary.writer} does not")

    def deep(self) -> NoReturn:
        self.refuse(
            f"values of the pickle are nested deeper than {MAX_DEPTH}, or one holds itself",
            "no known checkpoint does this",
        )

    def acyclic(self, v: Any, path: set[int], done: dict[int, tuple[Any, Any]]) -> Any:
        """The value, with an inert object where one holds what it lies in: nodes of a configuration name their parent.

        ``path`` are the containers around it, ``done`` what became of others, with themselves: their ids stay theirs.
        """
        if type(v) not in _CONTAINERS:
            return v
        if id(v) in path:
            return self.inert(v.cls if type(v) is PickledObject else type(v).__name__, "a value that holds this one")
        if id(v) in done:
            return done[id(v)][1]
        if len(path) > MAX_DEPTH:
            self.deep()
        path.add(id(v))
        new = v
        if type(v) is tuple:
            items = tuple([self.acyclic(x, path, done) for x in v])
            new = v if all(map(is_, items, v)) else items
        else:
            held: Any = v.fields if type(v) is PickledObject else v
            for at, x in enumerate(held) if type(held) is list else held.items():
                held[at] = self.acyclic(x, path, done)
        path.remove(id(v))
        done[id(v)] = v, new
        return new

    def walk(self, value: Any) -> bool:
        """Whether nothing is nested too deep, or holds itself. Refuses what a caller could not walk: a few values that
        are shared very often."""
        most = 1_000_000 + 16 * (self.made + len(self.stack))
        seen = 0
        todo: list[Iterator[Any]] = [iter([value])]
        while todo:
            for v in todo[-1]:
                kind = type(v)
                if kind not in _CONTAINERS:
                    continue
                held = v.values() if kind is dict else v.fields.values() if kind is PickledObject else v
                inner = [x for x in held if type(x) in _CONTAINERS]
                if kind is dict:
                    inner += [k for k in v if type(k) is PickledObject]
                seen += 1 + len(held)
                if seen > most:
                    self.refuse(
                        "a few values of the pickle are used in very many places", "no known checkpoint does this"
                    )
                if inner:
                    todo.append(iter(inner))
                    break
            else:
                todo.pop()
            if len(todo) > MAX_DEPTH:
                return False
        return True

    # From the stack to plain values.

    def plain(self, v: Any) -> Any:
        if type(v) in self.plain_types:
            return v
        kind = type(v)
        if kind is _Empty:
            if v.array is None:
                self.corrupt("an array is used before its elements are given")
            return v.array
        if kind is _Args:
            if v.value is None:
                if v.depth > MAX_DEPTH:
                    self.refuse(f"tuples are nested deeper than {MAX_DEPTH}", "no known checkpoint does this")
                v.value = self.named(v.items)
            return v.value
        odd = self.vocabulary.keeps_odd
        if kind in (_Blob, _LongText):
            if odd and v.nbytes > MAX_TEXT:
                return self.inert("bytes" if kind is _Blob else "str", v.nbytes)
            return self.bytes_of(v) if kind is _Blob else self.text_of(v)
        if kind is _Dtype and odd:
            return self.inert("numpy.dtype", v.code)
        what = f"a numpy dtype `{v.code}`" if kind is _Dtype else f"`{v}` itself"
        return self.refuse(f"the pickle stores {what}, which is not a value of a checkpoint")

    def inert(self, cls: str, *args: Any) -> PickledObject:
        """A stand-in for an object that is not a checkpoint's value: its class and arguments."""
        self.made += 2 + len(args)
        return PickledObject(cls, {"args": args})

    def named(self, items: tuple[Any, ...]) -> Any:
        """Paddle's ``(name, array)``, which its loader takes for a tensor however the tuple was made."""
        if len(items) == 2 and type(items[1]) is _Empty and type(items[0]) is str:
            array: PickledArray | PickledObject = self.plain(items[1])
            return array._replace(name=items[0]) if type(array) is PickledArray else (items[0], array)
        return tuple([self.plain(i) for i in items])

    def text_of(self, v: _LongText) -> str:
        if v.value is None:
            self.afford(v.nbytes)
            v.value = self.decode(self.pread(v.offset, v.nbytes))
        return v.value

    def bytes_of(self, v: _Blob) -> bytes:
        if v.value is None:
            self.afford(v.nbytes)
            data = self.pread(v.offset, v.nbytes)
            with self.decoding():
                v.value = latin1(data)[0] if v.text else data
        return v.value

    @contextmanager
    def decoding(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError:
            self.corrupt("a text that stands for bytes is not UTF-8")
        except UnicodeEncodeError:
            self.corrupt("a text that stands for bytes has characters beyond U+00FF")

    def payload(self, v: _Blob) -> tuple[DataFile, int, int]:
        """File, offset and length of an array's bytes; those that a text stands for are counted."""
        if not v.text:
            return self.info, v.offset, v.nbytes
        if v.place is None:
            with self.decoding():
                span = Span(self.encoding.path, v.offset, v.nbytes)
                part = Text.scan(self.encoding.size, span, self.pread)
            self.encoding.parts.append(part)
            if part.stop > self.size:
                self.corrupt("many arrays of the pickle share their text, which no writer does")
            v.place = (self.decoded, part.start, part.stop - part.start)
        return v.place

    # Opcodes that push.

    def int1(self) -> None:
        self.stack.append(self.take(1)[0])

    def int2(self) -> None:
        self.stack.append(int.from_bytes(self.take(2), "little"))

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))

    def long4(self) -> None:
        n = int.from_bytes(self.take(4), "little", signed=True)
        if n < 0:
            self.corrupt(f"an integer has {n} bytes")
        if n > MAX_INT:
            self.refuse(f"an integer of {n:,} bytes (LONG4) is not part of a checkpoint", "fetch or write it again")
        self.stack.append(int.from_bytes(self.take(n), "little", signed=True))

    def real(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def text(self, width: int) -> None:
        n = int.from_bytes(self.take(width), "little")
        if n > _LAZY:
            self.stack.append(_LongText(self.skip(n), n))
            return
        self.texts += n
        if self.texts > MAX_TEXTS:
            self.afford(0)
        text = self.decode(self.take(n))
        if self.protocol == 2:
            self.text_at[id(text)] = self.tell() - n
        self.stack.append(text)

    def blob(self, width: int) -> None:
        n = int.from_bytes(self.take(width), "little")
        self.stack.append(_Blob(self.skip(n), n))

    def empty_dict(self) -> None:
        self.made += 1
        self.stack.append({})

    def empty_list(self) -> None:
        self.made += 1
        self.stack.append([])

    # Opcodes that take and put.

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            self.refuse(f"the pickle has more than {MAX_MARKS:,} open marks", "no known checkpoint has so many")
        self.below += len(self.stack)
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items = self.stack
        if not self.marks:
            self.corrupt("the pickle closes a mark that it did not set")
        self.stack = self.marks.pop()
        self.below -= len(self.stack)
        return items

    def tuple_of(self, items: list[Any]) -> None:
        self.made += 1 + len(items)
        value = tuple(items)
        for i in items:
            if type(i) not in self.plain_types:
                self.stack.append(_Args(value))
                return
        self.stack.append(value)

    def tuple_n(self, n: int) -> None:
        stack = self.stack
        if len(stack) < n:
            raise IndexError
        items = stack[-n:]
        del stack[-n:]
        self.tuple_of(items)

    def tuple_marked(self) -> None:
        self.tuple_of(self.pop_mark())

    def append(self) -> None:
        v = self.plain(self.stack.pop())
        self.made += 1
        self.target(list).append(v)

    def appends(self) -> None:
        items = self.pop_mark()
        self.made += len(items)
        self.target(list).extend([self.plain(v) for v in items])

    def setitem(self) -> None:
        v = self.stack.pop()
        k = self.stack.pop()
        self.store([k, v])

    def setitems(self) -> None:
        self.store(self.pop_mark())

    def store(self, items: list[Any]) -> None:
        target, plain_types = self.target(dict), self.plain_types
        self.made += len(items)
        if len(items) % 2:
            self.corrupt("a dict has a key without a value")
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                key = self.key(key)
            if key in target:
                raise ConflictError(
                    f"a dict has the key {quoted(key)} twice", where=self.where(), hint="write the file again"
                )
            value = items[i + 1]
            target[key] = value if type(value) in plain_types else self.plain(value)

    def key(self, key: Any) -> Any:
        """A key whose hash and comparisons cost nothing, whatever the pickle's author intended."""
        key = self.plain(key)
        flat = key if type(key) is tuple and len(key) <= MAX_AXES else (key,)
        for k in flat:
            # Great integers could be chosen to meet in one slot of the dict.
            fine = type(k) in _KEYS and (type(k) is not int or abs(k) < 1 << 48)
            if not fine and not (type(k) is PickledObject and k is key):
                if self.vocabulary.keeps_odd:
                    return self.inert(f"a key of type {type(key).__name__}", key)
                self.refuse(f"a dict has a key of type {type(k).__name__}", "no known checkpoint has such keys")
        return key

    def target(self, kind: type) -> Any:
        v = self.stack[-1]
        if type(v) is PickledObject and kind is not PickledObject and v.cls not in self.vocabulary.records.values():
            v = v.fields.setdefault("items", kind())  # an inert one is no list and no dict, whatever its class is
        if type(v) is not kind:
            self.corrupt(f"items for a {kind.__name__} are put into a {type(v).__name__.strip('_')}")
        return v

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def get1(self) -> None:
        at = self.take(1)[0]
        if at >= len(self.memo):
            self.never(at)
        self.stack.append(self.memo[at])

    def never(self, at: int) -> NoReturn:
        self.corrupt(f"the pickle recalls value {at:,}, which it never remembered")

    def put(self, width: int) -> None:
        at = int.from_bytes(self.take(width), "little")
        if at < len(self.memo):
            self.memo[at] = self.stack[-1]
        elif at == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            # Every pickler counts; a table with gaps would cost memory for nothing.
            self.corrupt(f"the pickle remembers value {at:,} after {len(self.memo):,}")

    def get(self, width: int) -> None:
        at = int.from_bytes(self.take(width), "little")
        if at >= len(self.memo):
            self.never(at)
        self.stack.append(self.memo[at])

    def frame(self) -> None:
        n = int.from_bytes(self.take(8), "little")
        at = self.base + self.pos
        if at + n > self.size:
            self.short(at + n)

    # Opcodes that name and call.

    def global_lines(self) -> None:
        module = self.line()
        self.resolve(module, self.line())

    def global_stack(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            self.corrupt("a class is named by something that is not a string")
        self.resolve(module, name)

    def resolve(self, module: str, name: str) -> None:
        found = Global(module, name)
        words = self.vocabulary
        if found not in words.calls and found not in words.records and words.refuses(found):
            self.refuse(f"the pickle asks for `{found}`, which is not part of a checkpoint of tensors")
        self.stack.append(found)

    def reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        is_made = type(function) is PickledObject and self.vocabulary.keeps_odd
        if type(function) is not Global and not is_made:
            self.corrupt(f"the pickle calls a {type(function).__name__.strip('_')}")
        items: tuple[Any, ...]
        if type(args) is _Args:
            items = args.items
        elif type(args) is tuple:
            items = args
        else:
            self.corrupt(f"the pickle calls `{function}` with something that is not a tuple")
        if is_made:  # by functools.partial: how protocol 2 has an instance made with keywords
            self.stack.append(self.inert(function.cls, function, *[self.plain(i) for i in items]))
            return
        call = self.vocabulary.calls.get(function, Machine.call_inert)
        self.stack.append(call(self, function, items))

    def not_so(self, function: Global) -> NoReturn:
        self.refuse(f"the pickle calls `{function}` in a way that {self.vocabulary.writer} does not")

    def not_called(self, function: Global, _args: tuple[Any, ...]) -> Any:
        self.not_so(function)

    def call_inert(self, function: Global, args: tuple[Any, ...]) -> Any:
        """Record a call of an unknown function as a PickledObject with its arguments; nothing is imported or called."""
        if function in self.vocabulary.records:
            self.not_so(function)
        self.made += 2 + len(args)
        return PickledObject(str(function), {"args": tuple([self.plain(a) for a in args])})

    def call_reconstruct(self, function: Global, args: tuple[Any, ...]) -> Any:
        if len(args) != 3 or args[0] != Global("numpy", "ndarray") or type(args[0]) is not Global:
            self.not_so(function)
        return _Empty()

    def call_scalar(self, function: Global, args: tuple[Any, ...]) -> Any:
        if len(args) == 2 and type(args[0]) is _Dtype and not args[0].name:
            return self.call_inert(function, args)
        if len(args) != 2 or type(args[0]) is not _Dtype or type(args[1]) is not _Blob:
            self.not_so(function)
        data = self.bytes_of(args[1])
        if len(data) != args[0].size:
            self.corrupt(f"a numpy number of {args[0].code} has {len(data)} bytes")
        parts = struct.unpack("<" + _STRUCT[args[0].code], data)
        return parts[0] if len(parts) == 1 else complex(*parts)

    def call_dtype(self, function: Global, args: tuple[Any, ...]) -> Any:
        # numpy writes (code, False, True): align and copy.
        if not 1 <= len(args) <= 3 or type(args[0]) is not str or any(type(a) not in (bool, int) for a in args[1:]):
            self.not_so(function)
        code = args[0]
        bare = code[1:] if code[:1] in ("<", "|", "=") else code
        if bare not in _KINDS and self.vocabulary.keeps_odd:
            return _Dtype(code, "", 0)
        if bare[:1] == "O":
            self.refuse("an array holds Python objects (dtype object), not numbers")
        if bare not in _KINDS:
            self.refuse(
                f"an array has the numpy dtype `{printable(code)}`", "known dtypes: " + ", ".join(sorted(_KINDS))
            )
        return _Dtype(bare, *_KINDS[bare])

    def call_encode(self, function: Global, args: tuple[Any, ...]) -> Any:
        if len(args) != 2 or type(args[0]) not in (str, _LongText) or args[1] not in ("latin1", "latin-1"):
            self.not_so(function)
        text = args[0]
        if type(text) is _LongText:
            # One text is decoded once, however often it is asked for.
            text.blob = text.blob or _Blob(text.offset, text.nbytes, text=True)
            return text.blob
        self.made += 1
        data = text.encode("utf-8", "surrogatepass")
        at = self.text_at.get(id(text), self.size)
        if self.pread(at, len(data)) != data:
            self.not_so(function)
        return _Blob(at, len(data), text=True)

    def call_ordered_dict(self, function: Global, args: tuple[Any, ...]) -> Any:
        self.made += 1
        if not args:
            return {}
        # Python 2: OrderedDict([[key, value], ...]).
        if len(args) != 1 or type(args[0]) is not list or any(type(p) not in (list, tuple) for p in args[0]):
            self.not_so(function)
        self.make(len(args[0]))
        self.stack.append({})
        for pair in args[0]:
            if len(pair) != 2:
                self.not_so(function)
            self.store(list(pair))
        return self.stack.pop()

    def call_tuple(self, function: Global, args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or type(args[0]) not in (tuple, _Args):
            self.not_so(function)
        return args[0]

    def call_bytes(self, function: Global, args: tuple[Any, ...]) -> Any:
        if args:
            self.not_so(function)
        return _Blob(0, 0)

    def call_slice(self, function: Global, args: tuple[Any, ...]) -> Any:
        if len(args) != 3 or any(a is not None and type(a) is not int for a in args):
            self.not_so(function)
        return slice(*args)

    def new(self) -> None:
        args = self.stack.pop()
        cls = self.stack.pop()
        if type(cls) is not Global:
            self.corrupt("the pickle makes an instance of something that is not a class")
        words = self.vocabulary
        known = words.records.get(cls)
        if known is None and cls not in words.calls and type(args) in (tuple, _Args):
            self.stack.append(self.call_inert(cls, args if type(args) is tuple else args.items))
            return
        if known is None or args != ():
            self.not_so(cls)
        self.made += 1
        self.stack.append(PickledObject(known, {}))

    def build(self) -> None:
        state = self.stack.pop()
        v = self.stack[-1]
        kind = type(v)
        if kind is _Empty:
            self.build_array(v, state)
        elif kind is _Dtype:
            self.build_dtype(v, state)
        elif (build := self.vocabulary.builds.get(kind)) is not None:
            build(self, v, state)
        elif kind is PickledObject:
            if type(state) is not dict or len(state) > MAX_FIELDS or any(type(k) is not str for k in state) or v.fields:
                self.corrupt(f"the state of a {v.cls} is not a dict of fields")
            self.made += len(state)
            v.fields.update(state)
        else:
            self.refuse(f"the pickle sets the state of a {kind.__name__.strip('_')} (BUILD)")

    def build_dtype(self, v: _Dtype, state: Any) -> None:
        """Check the state that numpy pickles for a dtype. One that is kept unread (``keeps_odd``) loses its name."""
        # Version, byte order, subarray, names, fields, size, alignment, flags.
        if type(state) is _Args and not v.name:
            state = state.items  # the unit of a time is among its metadata
        if type(state) is not tuple or len(state) not in (8, 9) or any(type(n) is not int for n in state[5:8]):
            self.corrupt("the state of a numpy dtype is not numpy's tuple of 8")  # 9 with metadata, which say nothing
        if type(state[0]) is not int or state[0] not in _DTYPE_VERSIONS:
            self.corrupt("the state of a numpy dtype has a version that numpy does not read")
        if self.vocabulary.keeps_odd and (state[1] not in ("<", "|", "=") or state[2:5] != (None, None, None)):
            v.name = ""
        elif state[1] not in ("<", "|", "="):
            self.refuse(f"an array of {v.code} has a byte order {quoted(state[1])}", "little-endian arrays are read")
        elif any(s is not None for s in state[2:5]):
            self.refuse("an array has elements with fields", "ckpttool reads arrays of numbers")

    def build_array(self, v: _Empty, state: Any) -> None:
        # Version, shape, dtype, whether it is column-major, bytes.
        items = state.items if type(state) is _Args else ()
        if v.array is not None or len(items) != 5 or type(items[2]) is not _Dtype or type(items[3]) not in (bool, int):
            self.corrupt("the state of an array is not numpy's (version, shape, dtype, order, bytes)")
        version, shape, dtype, fortran, data = items
        if type(version) is not int or version != 1:
            self.corrupt("the state of an array has a version that numpy does not read")
        if (
            type(shape) is not tuple
            or len(shape) > MAX_AXES
            or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape)
        ):
            self.corrupt("the shape of an array is not a tuple of sizes")
        if not dtype.name:
            v.array = self.inert("numpy.ndarray", dtype.code, shape)
            return
        if type(data) is not _Blob:
            self.refuse("the elements of an array are not bytes")
        file, offset, size = self.payload(data)
        want = prod(shape) * dtype.size
        if size != want:
            self.corrupt(f"an array {dtype.name} {list(shape)} needs {want:,} bytes, the pickle has {size:,} for it")
        self.made += 1
        v.array = PickledArray(dtype.name, shape, offset, size, file, bool(fortran) and len(shape) > 1)


_TABLE: dict[bytes, Callable[[Machine], None]] = {
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"K": Machine.int1,
    b"M": Machine.int2,
    b"J": Machine.int4,
    b"\x8a": Machine.long1,
    b"\x8b": Machine.long4,
    b"G": Machine.real,
    b"\x8c": lambda m: m.text(1),
    b"X": lambda m: m.text(4),
    b"\x8d": lambda m: m.text(8),
    b"C": lambda m: m.blob(1),
    b"B": lambda m: m.blob(4),
    b"\x8e": lambda m: m.blob(8),
    b"}": Machine.empty_dict,
    b"]": Machine.empty_list,
    b")": lambda m: m.stack.append(()),
    b"(": Machine.mark,
    b"t": Machine.tuple_marked,
    b"\x85": lambda m: m.tuple_n(1),
    b"\x86": lambda m: m.tuple_n(2),
    b"\x87": lambda m: m.tuple_n(3),
    b"a": Machine.append,
    b"e": Machine.appends,
    b"s": Machine.setitem,
    b"u": Machine.setitems,
    b"\x94": Machine.memoize,
    b"q": lambda m: m.put(1),
    b"r": lambda m: m.put(4),
    b"h": Machine.get1,
    b"j": lambda m: m.get(4),
    b"\x95": Machine.frame,
    b"c": Machine.global_lines,
    b"\x93": Machine.global_stack,
    b"R": Machine.reduce,
    b"\x81": Machine.new,
    b"b": Machine.build,
}

_BY_CODE = [_TABLE.get(bytes([code])) for code in range(256)]

NUMPY: dict[tuple[str, str], Call] = {
    ("numpy", "ndarray"): Machine.not_called,
    ("numpy", "dtype"): Machine.call_dtype,
    ("_codecs", "encode"): Machine.call_encode,
    ("collections", "OrderedDict"): Machine.call_ordered_dict,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Machine.call_reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): Machine.call_scalar for core in ("core", "_core")},
    **{(b, "tuple"): Machine.call_tuple for b in ("builtins", "__builtin__")},
    **{(b, "bytes"): Machine.call_bytes for b in ("builtins", "__builtin__")},
    **{(b, "slice"): Machine.call_slice for b in ("builtins", "__builtin__")},
}
"""Arrays, numbers and plain values. numpy renamed its private modules in 2.0, and protocol 2 uses Python 2's name of
builtins. bytes: only as bytes(), which is how protocol 2 says b"", the elements of an empty array."""


@contextmanager
def opened(path: Place) -> Iterator[OpenFile]:
    """A file that is read. Raises what ``readable`` raises."""
    with readable(path, "a pickle"), open_file(path) as f:
        yield f


def interpret(
    file: OpenFile,
    vocabulary: PickleVocabulary,
    *,
    begin: int = 0,
    end: int | None = None,
    whole: bool = True,
) -> tuple[Any, int]:
    """The plain values of the pickle at ``begin``, with an Array for every numpy array, and the byte where it ends.

    Raises CorruptError for what is no pickle, contradicts itself or, when ``whole``, ends before ``end``;
    IncompleteError for one that is cut off; and UnsupportedError for anything that is not in the vocabulary (above all,
    code).
    """
    machine = Machine(file, vocabulary, begin, file.info.size if end is None else end)
    # Nothing that is made before the end of the pickle is garbage; looking for some takes a third of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = machine.run(whole=whole)
    finally:
        if collects:
            gc.enable()
    return value, machine.tell()
