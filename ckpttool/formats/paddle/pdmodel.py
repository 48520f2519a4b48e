"""Reading Paddle's programs of before PIR: a ``ProgramDesc`` in protobuf, ``model.pdmodel``.

    ProgramDesc   1 blocks*  4 version {1 version}  5 op_version_map
    BlockDesc     1 idx  2 parent_idx  3 vars*  4 ops*  5 forward_block_idx
    VarDesc       1 name  2 type  3 persistable  4 need_check_feed  5 is_parameter  6 stop_gradient  7 attrs*
    VarType       1 type  2 selected_rows  3 dense_tensor {1 tensor}  4 tensor_array {1 tensor}  ...
    TensorDesc    1 data_type  2 dims*
    OpDesc        1 inputs*  2 outputs*  3 type  4 attrs*  5 is_target       inputs, outputs: 1 parameter  2 arguments*
    OpDesc.Attr   1 name  2 type  3 i  6 ints*  7 floats*  8 strings*  12 block_idx  14 blocks_idx*  ...

Source: ``paddle.base.proto.framework_pb2`` of paddlepaddle 3.3.1, whose descriptor says all of the above, and what
``static/io.py`` and ``framework/io_utils.py`` of it do with a program (which variables they save, in which order).
Measured with programs that paddlepaddle 3.3.1 and 2.6.2 wrote. The wire format: protobuf's "Encoding" page.

The protobuf package is not needed. A program may be hundreds of megabytes, nearly all of it constants and call stacks
in attributes: the file is mapped, and attributes are looked at where they lie. What is kept of a program are the names
of its variables, once for each block.

A file whose wire format is broken gives the one problem ``protobuf``: reading stops there, and what is missing behind
would only be told again in other words.

What is not checked, because valid programs would be called wrong:

* the order of definitions in blocks inside operators (a loop's second turn takes what its first has left), in operators
  that have such blocks (``while`` lists what its body will define among its inputs), and of variables that are no dense
  tensors (nothing defines an empty array);
* what operators of a backward pass take: batch_norm_grad of paddle 2.6.2 names a ReserveSpace that nothing defines;
* what nothing defines, in a program that feeds nothing by operators (``paddle.static.save`` writes such programs), and
  variables with need_check_feed, which are fed by name;
* an argument that only an operator of another block defines, without a variable for it;
* whether operators, their arguments and attributes are those that Paddle knows;
* whether an attribute's type is one of AttrType, and values in packed arrays and scalars.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from ckpttool.errors import CorruptError, IncompleteError
from ckpttool.formats.paddle.program_parts import BY_NUMBER, Parameter, Program

KIND = "pdmodel"
VERSION = 3_003_001
"""The version that paddle 3.3.1 writes, and the newest that is known here; builds between releases write 0."""

PROBLEMS = {
    "protobuf": "the file breaks protobuf's wire format, or lacks a field that every program has",
    "program-empty": "there is no block, or no operator in any",
    "version-newer": "a later version than any known here",
    "block": "a block's number, its parent's, or one that an operator names, is not that of a block that can be there",
    "value-undefined": "an operator takes something that is neither declared nor defined",
    "value-order": "an operator takes something before an operator defines it",
    "parameter-twice": "a block declares two variables of one name, and saves it",
    "parameter-shape": "a parameter's shape is missing or has a length that is not known",
    "type": "a parameter has a type that is not known here",
}
"""What ``read_pdmodel`` reports."""

MAX_BLOCKS = 1 << 16
"""Each costs some memory for a few bytes of the file; large detection models have some hundred."""

_EMPTY = (b"", b"@EMPTY@")
"""``kEmptyVarName``: an argument that is not there."""

# VarType.Type, where it is no element type.
_DENSE_TENSOR = 7
_NOT_SAVED = frozenset({9, 10, 11, 12, 14, 15, 17, 18, 28})
"""FEED_MINIBATCH, FETCH_LIST, READER and RAW are passed over when parameters are saved; the others hold no data."""
_KINDS = {8: "SELECTED_ROWS", 13: "DENSE_TENSOR_ARRAY", 25: "STRING", 26: "STRINGS", 27: "VOCAB"}

# AttrType
_INT, _BLOCK, _BLOCKS = 0, 8, 10

# What is known of a variable.
_PERSISTABLE, _DENSE, _FED = 1, 2, 4
_UNCERTAIN = _PERSISTABLE
"""Of which nothing is said."""

_STEPS = 1 << 22
"""From block to parent, for all names; no program known needs a thousandth, and one made for it would take days."""

_COPY = 1 << 20
"""Messages up to so many bytes are taken out of the map: indexing bytes is faster."""
_FORGET = 1 << 24
_REMEMBER = 1 << 14
"""Attributes and types that are known by their bytes, each kind."""

_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_SCALAR = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (11, *range(1, 11), *range(12, 33)))
"""The length of a message and so many bytes; eleven are a number with a point."""
_RUNS = {
    int(first[:2], 16): re.compile(
        b"(?:" + b"".join(b"\\x" + x for x in first.split()) + b"(?:" + value + b")){1,4096}", re.DOTALL
    )
    for first, value in (
        (b"30", _VARINT),  # ints
        (b"3d", b".{4}"),  # floats
        (b"58", _VARINT),  # bools
        (b"78", _VARINT),  # longs
        (b"81 01", b".{8}"),  # float64s
        (b"aa 01", _SCALAR),  # scalars
    )
}
"""Arrays in attributes, first byte of the tag -> some thousand elements: constants have millions, each with its tag.
Not all at once, because a match takes memory for each turn of a group."""


def _types(fields: str) -> dict[int, int]:
    """``1:2`` is field 1 with wire type 2."""
    return {int(number): int(wire) for number, wire in (f.split(":") for f in fields.split())}


# Wire types of the fields of each message: 0 varint, 1 eight bytes, 2 a length and so many bytes, 5 four bytes.
_PROGRAM = _types("1:2 4:2 5:2")
_VERSION = _types("1:0")
_MAP, _PAIR = _types("1:2"), _types("1:2 2:2")
_BLOCK_DESC = _types("1:0 2:0 3:2 4:2 5:0")
_VAR = _types("1:2 2:2 3:0 4:0 5:0 6:0 7:2")
_VAR_TYPE = _types("1:0 2:2 3:2 4:2 5:2 7:2 8:2 9:2 10:2 11:2 12:2")
_LEVELS = _types("1:2 2:0")
_TENSOR = _types("1:0 2:0")
_OP = _types("1:2 2:2 3:2 4:2 5:0")
_ARGUMENTS = _types("1:2 2:2")
_ATTR = _types("1:2 2:0 3:0 4:5 5:2 6:0 7:5 8:2 10:0 11:0 12:0 13:0 14:0 15:0 16:1 17:2 18:2 19:1 20:2 21:2")
_PACKED = {id(_TENSOR): frozenset({2}), id(_ATTR): frozenset({6, 7, 11, 14, 15, 16})}
"""Numbers that are repeated may also stand together in one field; Paddle writes none so, and its reader takes both."""


class _BrokenError(Exception):
    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.text, self.at = text, at


class _Span(NamedTuple):
    """A message: its bytes, or the whole file, and where in them it lies."""

    data: bytes | mmap.mmap
    pos: int
    end: int
    base: int
    """Of ``data`` in the file."""


class _Type(NamedTuple):
    """A VarType."""

    kind: int
    number: int
    dims: tuple[int, ...]
    described: bool
    """There is a description of a tensor."""


class _Taken(NamedTuple):
    """An argument that nothing before its operator has defined."""

    number: int
    operator: bytes
    carries: bool
    """The operator has blocks inside."""


class _Block:
    """One block, read."""

    __slots__ = (
        "carriers",
        "forward",
        "idx",
        "ops",
        "parent",
        "taken",
        "twice",
        "types",
        "vars",
        "written",
    )

    def __init__(self) -> None:
        self.idx: int | None = None
        self.parent: int | None = None
        self.forward = -1
        self.ops = 0
        self.vars: dict[bytes, int] = {}
        self.types: dict[bytes, _Type] = {}
        """Of what is fed or fetched, or might be: block 0 only."""
        self.written: set[bytes] = set()
        self.taken: dict[bytes, _Taken] = {}
        self.carriers: list[tuple[int, bytes, list[int]]] = []
        """Operators with blocks inside: number, type, blocks."""
        self.twice: list[bytes] = []


def read_pdmodel(path: Path) -> Program:
    """Read a program to its end. What is wrong with it is in ``problems``.

    Raises IncompleteError when there is no such file and CorruptError when it cannot be read, or is no ProgramDesc.
    """
    program = Program(path, KIND)
    try:
        with path.open("rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            if not size:
                raise CorruptError("the file is empty", where=str(path), hint="fetch or write the file again")
            with mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ) as data:
                _Reader(program, data, size).read()
    except FileNotFoundError:
        raise IncompleteError("the file does not exist", where=str(path)) from None
    except IsADirectoryError:
        raise CorruptError("this is a directory, not a program", where=str(path)) from None
    except (OSError, ValueError) as e:  # ValueError: of mmap, when the file has shrunk since
        raise CorruptError(f"the file cannot be read: {getattr(e, 'strerror', None) or e}", where=str(path)) from None
    return program


class _Reader:
    """One file being read."""

    def __init__(self, program: Program, data: mmap.mmap, size: int) -> None:
        self.program = program
        self.data, self.size = data, size
        self.blocks: list[_Block] = []
        self.ops: dict[bytes, int] = {}
        self.found: dict[bytes, tuple[int, _Type]] = {}
        """Parameters, with the block that declares each first."""
        self.ends: dict[bytes, list[tuple[int, bytes]]] = {b"feed": [], b"fetch": []}
        self.any = False
        """Something was in the file that only a program has."""
        self.types: dict[bytes, _Type] = {}
        self.forgotten = 0
        self.steps = 0
        self.defined: set[bytes] | None = None
        self.plain: set[bytes] = set()
        """Attributes that are in order and say nothing about blocks."""

    def read(self) -> None:
        """Fill the program."""
        problem: _BrokenError | None = None
        try:
            self.top()
        except _BrokenError as e:
            problem = e
        if problem is not None and not self.any:
            raise CorruptError(
                f"this is not a ProgramDesc: {problem.text}",
                where=f"{self.program.path} [byte {problem.at:,}]",
                hint=self.guess(),
            )
        self.fill()
        if problem is not None:
            self.program.report("protobuf", problem.text, f"byte {problem.at:,}")
            return
        self.check()

    def guess(self) -> str:
        head = bytes(self.data[:64])
        if head.startswith(b"version https://git-lfs"):
            return "this is a git-lfs pointer, not the file: run `git lfs pull`"
        if head.lstrip().startswith(b"{"):
            return "this looks like JSON: a program of Paddle 3 has the name .json"
        return "the file is cut off, or is something else; fetch or write it again"

    # The wire format.

    def broken(self, text: str, at: int) -> NoReturn:
        raise _BrokenError(text, at)

    def varint(self, s: _Span, pos: int) -> tuple[int, int]:
        """Value and the position behind."""
        data, end = s.data, s.end
        value = shift = 0
        start = pos
        while pos < end:
            byte = data[pos]
            pos += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & 0xFFFF_FFFF_FFFF_FFFF, pos
            shift += 7
            if shift == 70:
                self.broken("a number has more than ten bytes", s.base + start)
        raise _BrokenError("a number is cut off", s.base + start)

    def fields(self, s: _Span, known: dict[int, int], what: str) -> Iterator[tuple[int, int, int, int]]:
        """Field number, value, and start and end of what has a length; also of what was added to the format since."""
        data, pos, end, base = s
        while pos < end:
            start = pos
            tag = data[pos]
            if tag < 128:
                pos += 1
            else:
                tag, pos = self.varint(s, pos)
            number, wire = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                self.broken(f"{what} has a field with the number {number}", base + start)
            value = first = last = 0
            expected = known.get(number, wire)
            if wire != expected and not (wire == 2 and number in _PACKED.get(id(known), ())):
                self.broken(f"field {number} of {what} has the wire type {wire}, not {expected}", base + start)
            if wire in (0, 2):
                if pos < end and data[pos] < 128:
                    value = data[pos]
                    pos += 1
                else:
                    value, pos = self.varint(s, pos)
            if wire == 0:
                pass
            elif wire == 2:
                first = pos
                last = pos = first + value
                if last > end:
                    self.broken(
                        f"field {number} of {what} has {value:,} bytes, and {end - first:,} are left", base + start
                    )
            elif wire in (1, 5):
                pos += 8 if wire == 1 else 4
                if pos > end:
                    self.broken(f"field {number} of {what} is cut off", base + start)
            else:
                self.broken(f"field {number} of {what} has the wire type {wire}, which is not in use", base + start)
            yield number, value, first, last

    def inside(self, s: _Span, first: int, last: int) -> _Span:
        """A message in a message, as bytes where it is small enough."""
        if last - first > _COPY or type(s.data) is bytes:
            return _Span(s.data, first, last, s.base)
        return _Span(s.data[first:last], 0, last - first, s.base + first)

    def text(self, s: _Span, first: int, last: int, what: str) -> bytes:
        raw = s.data[first:last]
        if not raw.isascii():
            try:
                raw.decode()
            except UnicodeDecodeError:
                self.broken(f"{what} is not UTF-8", s.base + first)
        return raw

    def packed(self, s: _Span, first: int, last: int) -> list[int]:
        out = []
        part = s._replace(end=last)
        while first < last:
            value, first = self.varint(part, first)
            out.append(value)
        return out

    # The messages.

    def top(self) -> None:
        whole = _Span(self.data, 0, self.size, 0)
        within = False
        try:
            for number, _, first, last in self.fields(whole, _PROGRAM, "the program"):
                within = True
                if number == 1:
                    if len(self.blocks) == MAX_BLOCKS:
                        self.broken(f"there are more than {MAX_BLOCKS:,} blocks", first)
                    self.block(_Span(self.data, first, last, 0))
                elif number == 4:
                    for _, value, _, _ in self.fields(self.inside(whole, first, last), _VERSION, "the version"):
                        self.program.version = _signed(value, 64)
                elif number == 5:
                    self.op_versions(self.inside(whole, first, last))
                within = False
        except _BrokenError as e:
            if not within:
                self.salvage(e.at)
            raise
        if not self.blocks and self.program.version is None:
            self.broken("it has neither blocks nor a version", 0)

    def op_versions(self, s: _Span) -> None:
        """Nothing is kept of them: Paddle writes all that it knows, used or not."""
        for pair, _, first, last in self.fields(s, _MAP, "the operators' versions"):
            if pair != 1:
                continue
            for inner, _, a, b in self.fields(_Span(s.data, first, last, s.base), _PAIR, "an operator's version"):
                if inner == 2:
                    for _ in self.fields(_Span(s.data, a, b, s.base), _VERSION, "an operator's version"):
                        pass

    def salvage(self, at: int) -> None:
        """Where the file ends inside of a block, read what is there of it."""
        data = self.data
        if at >= self.size or data[at] != 1 << 3 | 2:
            return
        try:
            length, first = self.varint(_Span(data, 0, self.size, 0), at + 1)
            if first + length > self.size and len(self.blocks) < MAX_BLOCKS:
                self.block(_Span(data, first, self.size, 0))
        except _BrokenError:
            return

    def forget(self, pos: int) -> None:
        """Give back the pages of the file that have been read; their memory would only look taken."""
        if pos - self.forgotten > _FORGET:
            upto = pos - pos % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, self.forgotten, upto - self.forgotten)
            self.forgotten = upto

    def block(self, s: _Span) -> None:
        block = _Block()
        place = len(self.blocks)
        self.blocks.append(block)
        what = f"block {place}"
        for number, value, first, last in self.fields(s, _BLOCK_DESC, what):
            if number == 4:
                self.op(self.inside(s, first, last), block, place)
                self.forget(last)
            elif number == 3:
                self.var(self.inside(s, first, last), block, place)
            elif number == 1:
                block.idx = _signed(value, 32)
            elif number == 2:
                block.parent = _signed(value, 32)
            elif number == 5:
                block.forward = _signed(value, 32)
            # A text that happens to begin like a message has been refused by now.
            self.any = self.any or number in (3, 4)
        if block.idx is None or block.parent is None:
            self.broken(f"{what} lacks its number or its parent's", s.base + s.pos)
        self.any = True

    def var(self, s: _Span, block: _Block, place: int) -> None:
        name: bytes | None = None
        kind: _Type | None = None
        persistable = fed = False
        for number, value, first, last in self.fields(s, _VAR, "a variable"):
            if number == 1:
                name = self.text(s, first, last, "the name of a variable")
            elif number == 2:
                raw = s.data[first:last]
                kind = self.types.get(raw)
                if kind is None:
                    kind = self.var_type(_Span(raw, 0, len(raw), s.base + first))
                    if len(self.types) < _REMEMBER and len(raw) < 256:
                        self.types[raw] = kind
            elif number == 3:
                persistable = bool(value)
            elif number == 4:
                fed = bool(value)
        if name is None or kind is None:
            self.broken("a variable lacks its name or its type", s.base + s.pos)
        known = block.vars.get(name)
        if known is not None and (persistable or known & _PERSISTABLE):
            block.twice.append(name)
        dense = kind.kind == _DENSE_TENSOR
        block.vars[name] = (known or 0) | persistable * _PERSISTABLE | dense * _DENSE | fed * _FED
        if persistable and kind.kind not in _NOT_SAVED:
            self.found.setdefault(name, (place, kind))
        if place == 0:
            block.types[name] = kind

    def var_type(self, s: _Span) -> _Type:
        kind: int | None = None
        data_type, dims, described = -1, list[int](), False
        for number, value, first, last in self.fields(s, _VAR_TYPE, "a type"):
            if number == 1:
                kind = _signed(value, 32)
            elif number in (3, 4):
                part = _Span(s.data, first, last, s.base)
                for inner, _, a, b in self.fields(part, _LEVELS, "a type"):
                    if inner == 1:
                        data_type, dims = self.tensor(_Span(s.data, a, b, s.base))
                        described = True
            elif number == 2:
                data_type, dims = self.tensor(_Span(s.data, first, last, s.base))
                described = True
        if kind is None:
            self.broken("a type lacks its number", s.base + s.pos)
        return _Type(kind, data_type, tuple(dims), described)

    def tensor(self, s: _Span) -> tuple[int, list[int]]:
        data_type: int | None = None
        dims: list[int] = []
        for number, value, first, last in self.fields(s, _TENSOR, "a tensor's description"):
            if number == 1:
                data_type = _signed(value, 32)
            elif number == 2:
                values = self.packed(s, first, last) if last else [value]
                dims += [_signed(v, 64) for v in values]
        if data_type is None:
            self.broken("a tensor's description lacks its type", s.base + s.pos)
        return data_type, dims

    def op(self, s: _Span, block: _Block, place: int) -> None:
        """One operator: what it takes is known, or noted; what it gives is known from here on."""
        data, pos, end, base = s
        start = pos
        name: bytes | None = None
        takes: list[bytes] = []
        gives: list[bytes] = []
        inside: list[int] = []
        column = 0
        plain = self.plain
        # Written out for the four fields that nearly all of a program consists of: this loop is where the time goes.
        while pos < end:
            tag = data[pos]
            if tag in (0x0A, 0x12, 0x1A, 0x22) and pos + 1 < end and data[pos + 1] < 128:
                first = pos + 2
                last = first + data[pos + 1]
                if last > end:
                    self.broken(
                        f"field {tag >> 3} of an operator has {last - first:,} bytes, and {end - first:,} are left",
                        base + pos,
                    )
                number = tag >> 3
                pos = last
                if number == 4 and data[first:last] in plain:
                    continue
            else:
                number, _, first, last = next(self.fields(_Span(data, pos, end, base), _OP, "an operator"))
                pos = last or self.after_varint(s, pos)
            if number == 1:
                self.arguments(data, first, last, base, takes)
            elif number == 2:
                self.arguments(data, first, last, base, gives)
            elif number == 3:
                name = self.text(s, first, last, "the type of an operator")
            elif number == 4:
                found = self.attr(_Span(data, first, last, base))
                if found is not None:
                    inside += found[1]
                    column = column if found[0] is None else found[0]
        if name is None:
            self.broken("an operator lacks its type", base + start)
        self.ops[name] = self.ops.get(name, 0) + 1
        number = block.ops
        block.ops = number + 1
        if inside:
            block.carriers.append((number, name, inside))
        if name == b"feed":
            takes, ends = [], gives
        elif name == b"fetch":
            gives, ends = [], takes
        else:
            ends = []
        if ends and place == 0:
            self.ends[name] += [(column, n) for n in ends]
        written, declared, taken = block.written, block.vars, block.taken
        for n in takes:
            if n not in written and not declared.get(n, 0) & _PERSISTABLE and n not in taken and n not in _EMPTY:
                taken[n] = _Taken(number, name, bool(inside))
        written.update(gives)

    def after_varint(self, s: _Span, pos: int) -> int:
        """Behind a field that has no length."""
        tag, pos = self.varint(s, pos)
        wire = tag & 7
        return self.varint(s, pos)[1] if wire in (0, 2) else pos + (8 if wire == 1 else 4)

    def arguments(self, data: bytes | mmap.mmap, pos: int, end: int, base: int, into: list[bytes]) -> None:
        what = "an operator's input or output"
        named = False
        while pos < end:
            tag = data[pos]
            if tag in (0x0A, 0x12) and pos + 1 < end and data[pos + 1] < 128:
                first = pos + 2
                pos = first + data[pos + 1]
                if pos > end:
                    self.broken(
                        f"{what} has {pos - first:,} bytes in a field, and {end - first:,} are left", base + first
                    )
                number, last = tag >> 3, pos
            else:
                s = _Span(data, pos, end, base)
                number, _, first, last = next(self.fields(s, _ARGUMENTS, what))
                pos = last or self.after_varint(s, pos)
            if number == 2:
                raw = data[first:last]
                if not raw.isascii():
                    self.text(_Span(data, first, last, base), first, last, f"an argument of {what}")
                into.append(raw)
            elif number == 1:
                named = True
        if not named:
            self.broken(f"{what} lacks its name", base + end)

    def attr(self, s: _Span) -> tuple[int | None, list[int]] | None:
        """The column of what is fed or fetched, or None, and blocks; None for an attribute that is about neither."""
        data, pos, end, base = s
        name: bytes | None = None
        kind: int | None = None
        value_i, block, blocks = 0, 0, list[int]()
        while pos < end:
            tag = data[pos]
            if (runs := _RUNS.get(tag)) and (run := runs.match(data, pos, end)):
                pos = run.end()
                if data is self.data:
                    self.forget(pos)
                continue
            if tag == 0x42 and pos + 1 < end and (after := pos + 2 + data[pos + 1]) <= end and data[pos + 1] < 128:
                pos = after  # a line of a call stack, of which there are many
                continue
            number, value, first, last = next(self.fields(_Span(data, pos, end, base), _ATTR, "an attribute"))
            pos = last or self.after_varint(s, pos)
            if number == 1:
                name = self.text(s, first, last, "the name of an attribute")
            elif number == 2:
                kind = _signed(value, 32)
            elif number == 3:
                value_i = _signed(value, 32)
            elif number == 12:
                block = _signed(value, 32)
            elif number == 14:
                values = self.packed(s, first, last) if last else [value]
                blocks += [_signed(v, 32) for v in values]
        if name is None or kind is None:
            self.broken("an attribute lacks its name or its type", base + s.pos)
        if kind == _BLOCK:
            return None, [block]
        if kind == _BLOCKS:
            return None, blocks
        if name == b"col" and kind == _INT:
            return value_i, []
        if end - s.pos < 128 and len(self.plain) < _REMEMBER:
            self.plain.add(data[s.pos : end])
        return None

    # What it means.

    def fill(self) -> None:
        """What the program says; parameters that are not right are left out."""
        program = self.program
        program.blocks = len(self.blocks)
        program.operators.update({_name(k): n for k, n in self.ops.items()})
        for name, (_, kind) in sorted(self.found.items()):  # the order of UTF-8 is that of Python's strings
            if (
                kind.kind == _DENSE_TENSOR
                and kind.number in BY_NUMBER
                and kind.described
                and min(kind.dims, default=0) >= 0
            ):
                program.parameters.append(Parameter(_name(name), BY_NUMBER[kind.number].dtype, kind.dims))
        for end, into in ((b"feed", program.inputs), (b"fetch", program.outputs)):
            for _, name in sorted(self.ends[end], key=lambda e: e[0]):
                known = self.blocks[0].types.get(name) if self.blocks else None
                if known is not None:
                    into.append(Parameter(_name(name), _dtype(known), known.dims))

    def check(self) -> None:
        """Everything wrong with a program that was read to its end."""
        program = self.program
        if program.version is not None and program.version > VERSION:
            text = f"the version is {_release(program.version)}, and {_release(VERSION)} is the newest known here"
            program.report("version-newer", text, "version")
        if not any(b.ops for b in self.blocks):
            text = "the program has no operators" if self.blocks else "the program has no blocks"
            program.report("program-empty", text)
        for name, (place, kind) in self.found.items():
            self.check_parameter(_shown(name), kind, f"block {place}")
        for place, block in enumerate(self.blocks):
            for name in block.twice:
                text = f"`{_shown(name)}` is declared twice, and is saved with the parameters"
                program.report("parameter-twice", text, f"block {place}")
        sound = self.check_blocks()
        self.check_values(sound)

    def check_parameter(self, name: str, kind: _Type, where: str) -> None:
        if kind.kind != _DENSE_TENSOR:
            said = _KINDS.get(kind.kind, f"of the type {kind.kind}")
            self.program.report("type", f"parameter `{name}` is not a tensor but {said}", where)
        elif not kind.described:
            self.program.report("parameter-shape", f"parameter `{name}` has no shape", where)
        elif kind.number not in BY_NUMBER:
            self.program.report("type", f"parameter `{name}` has the unknown data_type {kind.number}", where)
        elif min(kind.dims, default=0) < 0:
            text = f"parameter `{name}` has the shape {_dims(kind.dims)}, whose length is not known"
            self.program.report("parameter-shape", text, where)

    def check_blocks(self) -> list[bool]:
        """Which blocks know their ancestors."""
        count = len(self.blocks)
        sound: list[bool] = []
        for place, block in enumerate(self.blocks):
            where = f"block {place}"
            if block.idx != place:
                self.program.report("block", f"block {place} says that it is block {block.idx}", where)
            parent = -1 if block.parent is None else block.parent
            right = parent == -1 if place == 0 else 0 <= parent < place
            if not right:
                wanted = "-1, which is none" if place == 0 else "a block before it"
                self.program.report("block", f"the parent of block {place} is {parent}, not {wanted}", where)
            elif not -1 <= block.forward < count:
                self.program.report("block", f"block {place} belongs to block {block.forward} of {count}", where)
            sound.append(right and (place == 0 or sound[parent]))
        for place, block in enumerate(self.blocks):
            for number, name, inside in block.carriers:
                for i in inside:
                    text = None
                    if not 0 <= i < count:
                        text = f"the operator has block {i} inside, and the program has {count}"
                    elif name in _INSIDE and sound[i] and self.blocks[i].parent != place:
                        text = f"the operator has block {i} inside, whose parent is block {self.blocks[i].parent}"
                        sound[i] = False
                    if text:
                        self.program.report("block", text, _where(place, number, name))
        for place, block in enumerate(self.blocks):  # parents come first
            if place and sound[place]:
                sound[place] = block.parent is not None and sound[block.parent]
        return sound

    def check_values(self, sound: list[bool]) -> None:
        """What operators take; see the file's head for what is not looked at."""
        whole = all(sound) and all(
            0 <= i < len(sound) for b in self.blocks for _, _, inside in b.carriers for i in inside
        )
        told: set[bytes] = set()
        inside: dict[bytes, int] | None = None
        feeds = bool(self.ends[b"feed"])
        for place, block in enumerate(self.blocks):
            if not sound[place]:
                continue
            for name, taken in block.taken.items():
                where = _where(place, taken.number, taken.operator)
                flags = self.declared(place, name)
                if flags is None and name not in self.everything():
                    if name not in told:
                        text = f"`{_shown(name)}` is taken, and neither declared nor defined"
                        self.program.report("value-undefined", text, where)
                        told.add(name)
                    continue
                if place or not whole or taken.carries or taken.operator.endswith(b"_grad"):
                    continue
                if flags is not None and (flags & (_PERSISTABLE | _FED) or not flags & _DENSE):
                    continue
                inside = self.defined_inside() if inside is None else inside
                if inside.get(name, taken.number) < taken.number:
                    continue
                if name in block.written:
                    text = f"`{_shown(name)}` is taken before an operator defines it"
                    self.program.report("value-order", text, where)
                elif feeds and flags is not None and name not in inside:
                    text = f"`{_shown(name)}` is taken, and is neither fed nor defined by an operator"
                    self.program.report("value-order", text, where)

    def everything(self) -> set[bytes]:
        """All names that any operator defines."""
        if self.defined is None:
            self.defined = set().union(*(b.written for b in self.blocks))
        return self.defined

    def declared(self, place: int, name: bytes) -> int | None:
        """What a block knows of a variable, by itself, its ancestors, and the block that it goes back through."""
        seen = set()
        ahead = [place]
        while ahead:
            i = ahead.pop()
            if i in seen or not 0 <= i < len(self.blocks):
                continue
            seen.add(i)
            block = self.blocks[i]
            if name in block.vars:
                return block.vars[name]
            self.steps += 1
            if self.steps > _STEPS:
                return _UNCERTAIN
            ahead += [block.forward, -1 if block.parent is None else block.parent]
        return None

    def defined_inside(self) -> dict[bytes, int]:
        """What blocks inside of operators of block 0 define, with the first such operator."""
        first: dict[bytes, int] = {}
        seen = {0}
        for number, _, inside in self.blocks[0].carriers:
            ahead = list(inside)
            while ahead:
                i = ahead.pop()
                if i in seen or not 0 <= i < len(self.blocks):
                    continue
                seen.add(i)
                for name in self.blocks[i].written:
                    first.setdefault(name, number)
                ahead += [j for _, _, deeper in self.blocks[i].carriers for j in deeper]
        return first


_INSIDE = frozenset({b"while", b"conditional_block", b"conditional_block_infer"})
"""Operators whose blocks are children of their own; others may name a block of another program."""


def _signed(value: int, bits: int) -> int:
    """An int32 or int64 of a varint, which is cut to its bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _name(raw: bytes) -> str:
    return raw.decode()


def _dtype(kind: _Type) -> str:
    if kind.kind in (25, 26, 27):
        return _KINDS[kind.kind]
    return BY_NUMBER[kind.number].dtype if kind.number in BY_NUMBER else f"data_type {kind.number}"


def _dims(dims: tuple[int, ...]) -> str:
    short = [str(d) for d in dims[:8]] + ["..."] * (len(dims) > 8)
    return f"[{', '.join(short)}]"


def _release(version: int) -> str:
    """``3.3.1`` for 3003001."""
    return f"{version // 1_000_000}.{version // 1000 % 1000}.{version % 1000}"


def _shown(raw: bytes, most: int = 120) -> str:
    """A name, which may hold anything, for a message on a terminal."""
    text = raw.decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most]) + (
        "..." if len(text) > most else ""
    )


def _where(block: int, number: int, name: bytes) -> str:
    return f"block {block}, operator {number} ({_shown(name)})"
