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
Measured with programs that paddlepaddle 3.3.1 and 2.6.2 wrote.

Variables and operators are read by protobuf's own library. The two levels above them are walked here, because a program
may be hundreds of megabytes, nearly all of it constants and call stacks in attributes, and because a file that is cut
off is told from byte to byte and read as far as it goes: the library only takes whole messages, and only says that one
is broken. The file is mapped, and what is kept of it are the names of its variables, once for each block. In an
operator of more than a megabyte, attributes of more than 64 KiB are passed over.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from ckpttool.containers.protobuf import message_classes, parsed
from ckpttool.core.files import Mapped, Place
from ckpttool.errors import CorruptError
from ckpttool.formats.paddle.program_parts import BY_NUMBER, Program, ProgramTensor
from ckpttool.storage.place import open_file, readable

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
"""Findings of ``read_pdmodel``."""

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
"""Variables of which nothing is said."""

_STEPS = 1 << 22
"""Most steps from block to parent, for all names; no program known needs a thousandth, and one made for it would take
days."""

_LARGE_OPERATOR, _LARGE_ATTRIBUTE = 1 << 20, 1 << 16
_FORGET = 1 << 24

_MESSAGES = {
    "Version": "1:version:int64",
    "OpVersion": "1:name:bytes 2:version:Version",
    "OpVersions": "1:pair:OpVersion*",
    "Tensor": "1:data_type:int32 2:dims:int64*",
    "Levels": "1:tensor:Tensor",
    "Type": "1:type:int32 2:selected_rows:Tensor 3:dense_tensor:Levels 4:tensor_array:Levels",
    "Variable": "1:name:bytes 2:type:Type 3:persistable:bool 4:need_check_feed:bool",
    "Arguments": "1:parameter:bytes 2:arguments:bytes*",
    "Attribute": "1:name:bytes 2:type:int32 3:i:int32 12:block_idx:int32 14:blocks_idx:int32*",
    "Operator": "1:inputs:Arguments* 2:outputs:Arguments* 3:type:bytes 4:attrs:Attribute*",
}
"""The fields that are read here of the messages below a block."""
_PROGRAM = {1: 2, 4: 2, 5: 2}
_BLOCK_DESC = {1: 0, 2: 0, 3: 2, 4: 2, 5: 0}
"""Wire types of the fields: 0 varint, 1 eight bytes, 2 a length and so many bytes, 5 four bytes."""


class _BrokenError(Exception):
    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.text, self.at = text, at


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


@dataclass(slots=True)
class _ProgramBlock:
    """One block, read."""

    idx: int | None = None
    parent: int | None = None
    forward: int = -1
    ops: int = 0
    vars: dict[bytes, int] = field(default_factory=dict)
    types: dict[bytes, _Type] = field(default_factory=dict)
    """Types of variables that are fed or fetched, or might be: block 0 only."""
    written: set[bytes] = field(default_factory=set)
    taken: dict[bytes, _Taken] = field(default_factory=dict)
    carriers: list[tuple[int, bytes, list[int]]] = field(default_factory=list)
    """Operators with blocks inside: number, type, blocks."""
    twice: list[bytes] = field(default_factory=list)


def read_pdmodel(path: Place) -> Program:
    """Read a program to its end. What is wrong with it is in ``problems``.

    Raises IncompleteError when there is no such file and CorruptError when it cannot be read, or is no ProgramDesc.
    """
    program = Program(path, KIND)
    try:
        with readable(path, "a program"), open_file(path) as f:
            size = f.info.size
            if not size:
                raise CorruptError("the file is empty", where=str(path), hint="fetch or write the file again")
            with closing(f.map()) as data:
                _PdmodelReader(program, data, size).read()
    except ValueError as e:  # of mmap, when the file has shrunk since
        raise CorruptError(f"the file cannot be read: {e}", where=str(path)) from None
    return program


class _PdmodelReader:
    """One file being read."""

    def __init__(self, program: Program, data: Mapped, size: int) -> None:
        self.program = program
        self.data, self.size = data, size
        self.classes = message_classes(_MESSAGES)
        self.blocks: list[_ProgramBlock] = []
        self.ops: dict[bytes, int] = {}
        self.found: dict[bytes, tuple[int, _Type]] = {}
        """Parameters, with the block that declares each first."""
        self.ends: dict[bytes, list[tuple[int, bytes]]] = {b"feed": [], b"fetch": []}
        self.any = False
        """Something was in the file that only a program has."""
        self.forgotten = 0
        self.steps = 0

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

    def varint(self, pos: int, end: int) -> tuple[int, int]:
        """Value and the position behind."""
        value, start = 0, pos
        for shift in range(0, 70, 7):
            if pos == end:
                self.broken("a number is cut off", start)
            byte = self.data[pos]
            pos += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & 0xFFFF_FFFF_FFFF_FFFF, pos
        raise _BrokenError("a number has more than ten bytes", start)

    def fields(
        self, pos: int, end: int, known: Mapping[int, int], what: str
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Field number, value, where the field begins, start and end of its bytes; also of fields not known here."""
        while pos < end:
            start = pos
            tag, pos = self.varint(pos, end)
            number, wire = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                self.broken(f"{what} has a field with the number {number}", start)
            expected = known.get(number, wire)
            if wire != expected:
                self.broken(f"field {number} of {what} has the wire type {wire}, not {expected}", start)
            if wire not in (0, 1, 2, 5):
                self.broken(f"field {number} of {what} has the wire type {wire}, which is not in use", start)
            value, first = self.varint(pos, end) if wire in (0, 2) else (0, pos)
            pos = first + (value if wire == 2 else {0: 0, 1: 8, 5: 4}[wire])
            if pos > end:
                short = f"has {value:,} bytes, and {end - first:,} are left" if wire == 2 else "is cut off"
                self.broken(f"field {number} of {what} {short}", start)
            yield number, value, start, first, pos

    def message(self, kind: str, first: int, last: int, what: str) -> Any:
        """Parse a message with the library."""
        return self.parsed(kind, self.data[first:last], first, what)

    def parsed(self, kind: str, raw: bytes, at: int, what: str) -> Any:
        try:
            return parsed(self.classes[kind], raw)
        except ValueError:
            self.broken(f"{what} breaks the wire format", at)

    def text(self, raw: bytes, what: str, at: int) -> bytes:
        if not raw.isascii():
            try:
                raw.decode()
            except UnicodeDecodeError:
                self.broken(f"{what} is not UTF-8", at)
        return raw

    # The messages.

    def top(self) -> None:
        within = False
        try:
            for number, _, _, first, last in self.fields(0, self.size, _PROGRAM, "the program"):
                within = True
                if number == 1:
                    if len(self.blocks) == MAX_BLOCKS:
                        self.broken(f"there are more than {MAX_BLOCKS:,} blocks", first)
                    self.block(first, last)
                elif number == 4:
                    version = self.message("Version", first, last, "the version")
                    if version.HasField("version"):
                        self.program.version = version.version
                elif number == 5:
                    # Nothing is kept of them: Paddle writes all that it knows, used or not.
                    self.message("OpVersions", first, last, "an operator's version")
                within = False
        except _BrokenError as e:
            if not within:
                self.salvage(e.at)
            raise
        if not self.blocks and self.program.version is None:
            self.broken("it has neither blocks nor a version", 0)

    def salvage(self, at: int) -> None:
        """Read the rest of a block inside which the file ends."""
        if at >= self.size or self.data[at] != 1 << 3 | 2:
            return
        with suppress(_BrokenError):
            length, first = self.varint(at + 1, self.size)
            if first + length > self.size and len(self.blocks) < MAX_BLOCKS:
                self.block(first, self.size)

    def forget(self, pos: int) -> None:
        """Give back the pages of the file that have been read; their memory would only look taken."""
        if pos - self.forgotten > _FORGET:
            upto = pos - pos % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, self.forgotten, upto - self.forgotten)
            self.forgotten = upto

    def block(self, start: int, end: int) -> None:
        block = _ProgramBlock()
        place = len(self.blocks)
        self.blocks.append(block)
        what = f"block {place}"
        for number, value, _, first, last in self.fields(start, end, _BLOCK_DESC, what):
            if number == 4:
                self.operator(first, last, block, place)
                self.forget(last)
            elif number == 3:
                self.variable(first, last, block, place)
            elif number == 1:
                block.idx = _int32(value)
            elif number == 2:
                block.parent = _int32(value)
            elif number == 5:
                block.forward = _int32(value)
            # A text that happens to begin like a message has been refused by now.
            self.any = self.any or number in (3, 4)
        if block.idx is None or block.parent is None:
            self.broken(f"{what} lacks its number or its parent's", start)
        self.any = True

    def variable(self, first: int, last: int, block: _ProgramBlock, place: int) -> None:
        said = self.message("Variable", first, last, "a variable")
        if not said.HasField("name") or not said.HasField("type"):
            self.broken("a variable lacks its name or its type", first)
        name = self.text(said.name, "the name of a variable", first)
        kind = self.type_of(said.type, first)
        known = block.vars.get(name)
        if known is not None and (said.persistable or known & _PERSISTABLE):
            block.twice.append(name)
        flags = said.persistable * _PERSISTABLE | (kind.kind == _DENSE_TENSOR) * _DENSE | said.need_check_feed * _FED
        block.vars[name] = (known or 0) | flags
        if said.persistable and kind.kind not in _NOT_SAVED:
            self.found.setdefault(name, (place, kind))
        if place == 0:
            block.types[name] = kind

    def type_of(self, said: Any, at: int) -> _Type:
        if not said.HasField("type"):
            self.broken("a type lacks its number", at)
        holders = ((said, "selected_rows"), (said.dense_tensor, "tensor"), (said.tensor_array, "tensor"))
        tensor = next((getattr(holder, name) for holder, name in holders if holder.HasField(name)), None)
        if tensor is None:
            return _Type(said.type, -1, (), described=False)
        if not tensor.HasField("data_type"):
            self.broken("a tensor's description lacks its type", at)
        return _Type(said.type, tensor.data_type, tuple(tensor.dims), described=True)

    def operator(self, first: int, last: int, block: _ProgramBlock, place: int) -> None:
        """One operator: what it takes is known, or noted; what it gives is known from here on."""
        raw = self.data[first:last] if last - first <= _LARGE_OPERATOR else self.without_constants(first, last)
        said = self.parsed("Operator", raw, first, "an operator")
        if not said.HasField("type"):
            self.broken("an operator lacks its type", first)
        name = self.text(said.type, "the type of an operator", first)
        takes, gives = self.arguments(said.inputs, first), self.arguments(said.outputs, first)
        inside: list[int] = []
        column = 0
        for attribute in said.attrs:
            if not attribute.HasField("name") or not attribute.HasField("type"):
                self.broken("an attribute lacks its name or its type", first)
            kind, title = attribute.type, self.text(attribute.name, "the name of an attribute", first)
            if kind == _BLOCK:
                inside.append(attribute.block_idx)
            elif kind == _BLOCKS:
                inside += attribute.blocks_idx
            elif kind == _INT and title == b"col":
                column = attribute.i
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

    def without_constants(self, first: int, last: int) -> bytes:
        """The fields of an operator but for large attributes."""
        fields = self.fields(first, last, {1: 2, 2: 2, 3: 2, 4: 2, 5: 0}, "an operator")
        return b"".join(
            self.data[start:end] for number, _, start, at, end in fields if number != 4 or end - at <= _LARGE_ATTRIBUTE
        )

    def arguments(self, slots: Iterable[Any], at: int) -> list[bytes]:
        what = "an operator's input or output"
        names: list[bytes] = []
        for slot in slots:
            if not slot.HasField("parameter"):
                self.broken(f"{what} lacks its name", at)
            names += [self.text(n, f"an argument of {what}", at) for n in slot.arguments]
        return names

    # What it means.

    def fill(self) -> None:
        """Fill in the program; invalid parameters are omitted."""
        program = self.program
        program.blocks = len(self.blocks)
        program.operators.update({k.decode(): n for k, n in self.ops.items()})
        for name, (_, kind) in sorted(self.found.items()):  # the order of UTF-8 is that of Python's strings
            if (
                kind.kind == _DENSE_TENSOR
                and kind.number in BY_NUMBER
                and kind.described
                and min(kind.dims, default=0) >= 0
            ):
                program.parameters.append(ProgramTensor(name.decode(), BY_NUMBER[kind.number].dtype, kind.dims))
        for end, into in ((b"feed", program.inputs), (b"fetch", program.outputs)):
            for _, name in sorted(self.ends[end], key=lambda e: e[0]):
                known = self.blocks[0].types.get(name) if self.blocks else None
                if known is not None:
                    into.append(ProgramTensor(name.decode(), _dtype(known), known.dims))

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
        """Check which blocks know their ancestors."""
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
        """Check the inputs of operators; the module's docstring lists what is not checked."""
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
                if flags is None and name not in self.everything:
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

    @cached_property
    def everything(self) -> set[bytes]:
        """All names that any operator defines."""
        return set().union(*(b.written for b in self.blocks))

    def declared(self, place: int, name: bytes) -> int | None:
        """The declaration of a variable in a block, from itself, its ancestors, and the block that it goes back
        through."""
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
        """Variables that blocks inside operators of block 0 define, with the first such operator."""
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


def _int32(value: int) -> int:
    """The int32 of a varint, which is cut to its bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


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
