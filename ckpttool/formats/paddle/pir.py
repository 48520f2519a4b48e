"""A PIR program as paddle 3 writes it in JSON (``model.json``, ``inference.json``): read in passing, and checked.

    {"base_code": {"magic": "pir", "trainable": bool, "version": N},
     "program": {"regions": [{"#": "region_0", "blocks": [{"#": "block_0", "args": [...], "ops": [Op, ...]}]}]}}

    Op         {"#": "1.matmul", "I": [{"%": id}], "O": [{"%": id, "TT": type}], "A": [attribute], "regions"?}
    parameter  {"#": "p", "A": [is_distributed, is_parameter, need_clip, name], "O": {"%": id, "TT": type},
                "OA": [persistable, stop_gradient, trainable]}
    type       {"#": "0.t_dtensor", "D": [{"#": "0.t_f32"}, [dims], "NCHW", [], 0]}
    attribute  {"N": name, "AT": {"#": "0.a_f32", "D": value}}; "VD": "INF" for "D" where JSON has no such number

The number before a dot is a dialect. Value 0 is "none", block arguments are negative, and all others are defined once.
Source: paddle 3.3.1 (fluid/pir/serialize_deserialize), measured.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckpttool.containers.json_stream import JsonError, JsonStream
from ckpttool.core.files import Place
from ckpttool.formats.paddle.program_parts import BY_PIR, Program, ProgramTensor
from ckpttool.storage.place import readable

MAGIC = "pir"
NEWEST = 4
"""The version that paddle 3.3.1 writes, and the newest that is known here."""
DIALECTS = {"0": "builtin", "1": "pd_op", "2": "cf", "3": "custom_op", "4": "dist"}
VOID = ("NAN", "INF", "-INF")
"""Values that paddle 3.3.1 reads under "VD"; it writes ``NaN`` for the first."""
_INFINITE = ("INF", "-INF")
VOID_WRITTEN = "NaN"
_FLOATS = ("0.a_f32", "0.a_f64")
_DENSE = "0.t_dtensor"
_DIST = "4."
_TESTS = ("-1", "-2")
_ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "0.a_bool": (bool,),
    "0.a_pointer": (object,),
    "0.a_type": (dict,),
    **dict.fromkeys(("0.a_f32", "0.a_f64", "0.a_i32", "0.a_i64", "0.a_index"), (int, float)),
    **dict.fromkeys(("0.a_str", "0.a_tensorname", "1.a_dtype", "1.a_layout"), (str,)),
    **dict.fromkeys(("0.a_array", "0.a_c64", "0.a_c128", "1.a_intarray", "1.a_scalar", "1.a_place"), (list,)),
}
"""Python types of attributes' values, for the dialects 0 and 1, which Paddle lists completely."""
_TYPES = ("0.t_vec", "0.t_tensorname", "0.t_undefined")
"""Types of dialect 0 besides dense tensors and their elements."""

PROBLEMS = {
    "json": "the file is not JSON",
    "magic": "`base_code` does not say that this is a PIR program",
    "version": "the version is not a number from 1",
    "version-newer": "a later version than any known here",
    "structure": "something that every program has is missing, or is of the wrong kind",
    "operator": "an operator of a dialect that Paddle does not have",
    "attribute": "an attribute has a type that Paddle does not have, or a value that is not of its type",
    "value-undefined": "an operator takes a value that none defines",
    "value-order": "an operator takes a value that is only defined after it",
    "value-scope": "an operator takes a value that is defined in a block inside another operator",
    "value-twice": "two operators define the same value",
    "type": "an element type that Paddle does not have",
    "parameter-twice": "two parameters have the same name, and are not the same tensor",
    "parameter-shared": "a parameter is declared twice",
    "parameter-nested": "a parameter is declared in a block inside an operator, where Paddle does not look for it",
    "parameter-flags": "the program was saved as not trainable, and Paddle cannot load its parameters",
    "attribute-nan": "a NaN in the spelling that Paddle writes and cannot read",
    "attribute-void": "`VD` is none of NAN, INF and -INF",
}
"""Findings of ``read_pir``."""


def looks_like_pir(path: Place) -> bool:
    """Whether a JSON file begins like a program; reads its first bytes only."""
    try:
        with path.open("rb") as f:
            head = f.read(256)
    except OSError:
        return False
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    # `program` first is another order than Paddle's, which means nothing in JSON.
    return head.startswith(b"{") and (b'"base_code"' in head or head[1:].lstrip().startswith(b'"program"'))


def read_pir(path: Place) -> Program:
    """Read a program to its end. What is wrong with it is in ``problems``.

    Raises IncompleteError when there is no such file and CorruptError when it cannot be read at all.
    """
    reader = _PirReader(Program(path, "pir"))
    with readable(path), path.open("rb", buffering=0) as f:
        try:
            stream = JsonStream(f)
            reader.top(stream)
            stream.end()
        except JsonError as e:
            reader.give_up(f"the file cannot be read as JSON: {e.what}", f"byte {e.at:,}")
        except RecursionError:
            reader.give_up("blocks lie in one another too deeply to be read", "")
        except _StopError:
            pass
        else:
            reader.finish()
    return reader.program


class _StopError(Exception):
    """Nothing more can be told about the file."""


class _StructureError(Exception):
    """An object is not what it must be; the reader says where."""


@dataclass(slots=True)
class _PirBlock:
    """One block that is being read."""

    label: str
    defined: list[int] = field(default_factory=list)
    pending: list[tuple[int, str]] = field(default_factory=list)
    """Block arguments that were taken before they were seen, with the operator."""


def operator_name(compressed: str) -> str:
    """``pd_op.matmul`` for ``1.matmul``; names of dialects without a number are written in full."""
    if compressed == "p":
        return "builtin.parameter"
    dialect, dot, name = compressed.partition(".")
    return f"{DIALECTS.get(dialect, dialect)}{dot}{name}"


class _PirReader:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.counts: dict[str, int] = {}
        self.types: dict[str, int] = {}
        self.defined: set[int] = {0}
        self.closed: set[int] = set()
        """Values of blocks that have ended."""
        self.unknown: dict[int, tuple[str, str]] = {}
        """Values that were taken before anything defined them: by which operator, and what came of it."""
        self.named: dict[str, ProgramTensor] = {}
        self.flagless = 0
        """Parameters that say nothing about themselves."""
        self.blocks: list[_PirBlock] = []

    # -- the file

    def top(self, stream: JsonStream) -> None:
        """The outermost object."""
        program, seen = self.program, set()
        if not stream.starts("{"):
            stream.value()
            program.report("magic", "the file is JSON and not an object: no PIR program")
            raise _StopError
        for key in stream.names():
            if key in seen:
                program.report("structure", f"`{key}` is there twice")
                raise _StopError
            seen.add(key)
            if key == "base_code":
                self._base(stream.value())
            elif key == "program" and stream.starts("{"):
                self._body(stream)
            else:
                stream.value()
        if "base_code" not in seen:
            program.report("magic", "there is no `base_code`: not a PIR program")
            raise _StopError
        if "program" not in seen or not program.blocks:
            program.report("structure", "there is no `program` with a region and a block")

    def give_up(self, text: str, where: str) -> None:
        """Report one finding and drop those that only follow from a file that ends early."""
        self.program = Program(self.program.path, self.program.kind, self.program.version, self.program.trainable)
        self.program.report("json", text, where)

    def _base(self, base: Any) -> None:
        program = self.program
        if not isinstance(base, dict) or base.get("magic") != MAGIC:
            found = base.get("magic") if isinstance(base, dict) else base
            program.report("magic", f"`base_code` has the magic {_shown(found)}, a PIR program has `{MAGIC}`")
            raise _StopError
        version = base.get("version")
        if type(version) is not int or version < 1:
            program.report("version", f"the version is {_shown(version)}, a number from 1 is expected", "base_code")
        else:
            program.version = version
            if version > NEWEST:
                program.report(
                    "version-newer",
                    f"version {version} is newer than {NEWEST}, the newest that is known; Paddle reads it all the same",
                    "base_code",
                )
        trainable = base.get("trainable")
        if "trainable" in base and not isinstance(trainable, bool):
            program.report("structure", f"`trainable` is {_shown(trainable)}, true or false is expected", "base_code")
        program.trainable = trainable if isinstance(trainable, bool) else None

    def _body(self, stream: JsonStream) -> None:
        for key in stream.names():
            if key == "regions" and stream.starts("["):
                self._regions(stream, "")
            else:
                stream.value()

    def finish(self) -> None:
        """Run the checks that need the whole program."""
        if self.flagless and self.program.trainable is False:
            text = f"{self.flagless} parameters say nothing about themselves (trainable=False when it was saved)"
            self.program.report("parameter-flags", text + ": Paddle cannot load them")
        elif self.flagless:
            self._wrong(f"`OA` is missing: {self.flagless} parameters have no flags", "parameters")
        # What an operator defines that could not be read, or that was given another's number, is missed later.
        hidden = any(p.id in ("structure", "value-twice") for p in self.program.problems)
        for value, (where, found) in self.unknown.items():
            if found == "later":
                self.program.report("value-order", f"value {value} is taken before it is defined", where)
            elif not hidden:
                self.program.report("value-undefined", f"value {value} is taken, and no operator defines it", where)
        self.program.operators.update({operator_name(n): count for n, count in self.counts.items()})
        self.program.elements.update({_dtype(e): count for e, count in self.types.items()})
        self.program.parameters.sort(key=lambda p: p.name)

    # -- regions and blocks: in passing while they are large, decoded once they are near

    def _regions(self, stream: JsonStream, owner: str) -> None:
        for r in stream.items():
            if r and not owner:
                self._wrong("a program has one region, and here are more", "program")
                raise _StopError
            if not stream.starts("{"):
                self._wrong("a region is not an object", owner or "program")
                stream.value()
                continue
            for key in stream.names():
                if key != "blocks" or not stream.starts("["):
                    stream.value()
                    continue
                for b in stream.items():
                    if b and not owner:
                        self._wrong("a program has one block, and here are more, which Paddle does not read", "program")
                        raise _StopError
                    if not stream.starts("{"):
                        self._wrong("a block is not an object", owner or "program")
                        stream.value()
                        continue
                    self._block(stream, _label(owner, r, b))

    def _block(self, stream: JsonStream, label: str) -> None:
        block, seen = self._open(label), set()
        for key in stream.names():
            if key in seen:
                self._wrong(f"`{key}` is there twice", label)
                raise _StopError
            seen.add(key)
            if key in ("args", "kwargs"):
                self._arguments(stream.value())
            elif key == "ops" and stream.starts("["):
                for number in stream.items():
                    self._next(stream, block, number)
            else:
                stream.value()
        for key in ("args", "ops"):
            if key not in seen:
                self._wrong(f"`{key}` is missing", label)
        self._close()

    def _next(self, stream: JsonStream, block: _PirBlock, number: int) -> None:
        near = stream.ahead()
        if near is not None:
            self._operator(near[0], block, number)
            return
        # Longer than what is read at a time: it holds a large attribute, or blocks of its own.
        if not stream.starts("{"):
            stream.value()
            self._wrong("an operator is not an object", f"{block.label} operator {number}")
            return
        op: dict[str, Any] = {}
        for key in stream.names():
            if key == "regions" and stream.starts("["):
                op[key] = ()
                self._regions(stream, f"{block.label} operator {number}")
            elif key in ("A", "OA") and stream.starts("["):
                op[key] = self._attributes(stream, block, number, op.get("#", ""))
            else:
                op[key] = stream.value()
        self._operator(op, block, number)

    def _attributes(self, stream: JsonStream, block: _PirBlock, number: int, operator: str) -> list[Any]:
        """Attributes of an operator that is too long; a long list in one is checked in passing and left empty."""
        out = []
        for _ in stream.items():
            near = stream.ahead()
            if near is not None:
                out.append(near[0])
                continue
            if not stream.starts("{"):
                out.append(stream.value())
                continue
            attribute: dict[str, Any] = {}
            for key in stream.names():
                if key != "AT" or not stream.starts("{"):
                    attribute[key] = stream.value()
                    continue
                attr = attribute[key] = {}
                for part in stream.names():
                    if part == "D" and stream.starts("["):
                        attr[part] = []
                        for batch in stream.batches():
                            for item in batch if isinstance(batch[0], dict) else ():
                                self._item(item, block, number, operator)
                    else:
                        attr[part] = stream.value()
            out.append(attribute)
        return out

    def _item(self, item: Any, block: _PirBlock, number: int, operator: str) -> None:
        try:
            self._attribute(item, "...", block, number, operator)
        except (KeyError, TypeError, AttributeError):
            self._wrong("a part of a list is of the wrong kind", _where(block, number, operator))

    def _open(self, label: str) -> _PirBlock:
        self.program.blocks += 1
        block = _PirBlock(label)
        self.blocks.append(block)
        return block

    def _close(self) -> None:
        block = self.blocks.pop()
        for value, where in block.pending:
            if value in self.defined:
                self.unknown.pop(value, None)
            elif self.blocks:
                self.blocks[-1].pending.append((value, where))
            else:
                self.unknown[value] = (where, "")
        if self.blocks:  # nothing comes after the outermost block
            self.defined.difference_update(block.defined)
            self.closed.update(block.defined)

    def _arguments(self, arguments: Any) -> None:
        block = self.blocks[-1]
        if not isinstance(arguments, list):
            self._wrong("`args` is not a list", block.label)
            return
        for a in arguments:
            value = a.get("#") if isinstance(a, dict) else None
            if type(value) is not int:
                self._wrong("an argument of a block has no number", block.label)
                continue
            self._define(value, block.label)

    # -- operators

    def _operator(self, op: Any, block: _PirBlock, number: int) -> None:
        """One decoded operator; its blocks, unless they were read in passing."""
        name = op.get("#") if isinstance(op, dict) else None
        if type(name) is not str:
            self._wrong("an operator has no name", f"{block.label} operator {number}")
            return
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            if name == "p":
                self._parameter(op, block)
                return
            if name == _WRITTEN_OUT:
                self._parameter(_compressed(op), block)
                return
            defined = self.defined
            for operand in op["I"]:
                value = operand["%"]
                if value not in defined:
                    self._unknown(value, block, _where(block, number, name))
            for region, blocks in enumerate(op.get("regions", ())):
                for b, inner in enumerate(blocks["blocks"]):
                    self._inner(inner, _label(f"{block.label} operator {number}", region, b))
            for result in op["O"]:
                value = result["%"]
                if type(value) is not int:
                    raise _StructureError("a result has no number")
                if value in defined or value in self.closed or value in self.unknown:
                    self._define(value, _where(block, number, name))
                else:
                    defined.add(value)
                    block.defined.append(value)
                self._type(result["TT"], block, number, name)
            if type(op["A"]) is not list:
                raise _StructureError("the attributes are not a list")
            for attribute in op["A"]:
                self._attribute(attribute["AT"], attribute["N"], block, number, name)
            for attribute in op.get("OA", ()):
                self._attribute(attribute["AT"], attribute["N"], block, number, name)
            dialect = name.partition(".")[0]
            if dialect not in DIALECTS and dialect not in _TESTS:
                text = f"`{name}` is of no dialect: Paddle writes a number before the dot"
                self.program.report("operator", text, _where(block, number, name))
            if name in _ENDS:
                self._end(name, op)
        except _StructureError as e:
            self._wrong(str(e), _where(block, number, name))
        except KeyError as e:
            self._wrong(f"{e.args[0]!r} is missing".replace("'", "`"), _where(block, number, name))
        except (TypeError, ValueError, AttributeError, IndexError):
            self._wrong("a part of the operator is of the wrong kind", _where(block, number, name))

    def _inner(self, inner: Mapping[str, Any], label: str) -> None:
        block = self._open(label)
        self._arguments(inner["args"])
        if "kwargs" in inner:
            self._arguments(inner["kwargs"])
        for number, op in enumerate(inner["ops"]):
            self._operator(op, block, number)
        self._close()

    def _define(self, value: int, where: str) -> None:
        """A value that may be known already, in one way or another."""
        if value in self.defined or value in self.closed:
            self.program.report("value-twice", f"value {value} is defined a second time", where)
            return
        if value in self.unknown:
            self.unknown[value] = (self.unknown[value][0], "later" if value > 0 else "pending")
        self.defined.add(value)
        self.blocks[-1].defined.append(value)

    def _unknown(self, value: Any, block: _PirBlock, where: str) -> None:
        if type(value) is not int:
            raise _StructureError("an operand has no number")
        if value in self.closed:
            self.program.report("value-scope", f"value {value} belongs to a block that has ended", where)
        elif value not in self.unknown:
            if value < 0:
                block.pending.append((value, where))
                self.unknown[value] = (where, "pending")
            else:
                self.unknown[value] = (where, "")

    def _type(self, kind: Any, block: _PirBlock, number: int, name: str) -> None:
        if kind["#"] != _DENSE:
            if kind["#"][:2] == "0." and kind["#"] not in _TYPES and not _known(kind["#"]):
                self.program.report("type", f"`{kind['#']}` is not a type of Paddle", _where(block, number, name))
            return
        element = _element(kind)
        self.types[element] = self.types.get(element, 0) + 1
        if not _known(element):
            self.program.report("type", f"`{element}` is not an element type of Paddle", _where(block, number, name))

    def _attribute(self, attr: Mapping[str, Any], name: Any, block: _PirBlock, number: int, operator: str) -> None:
        """One attribute, or all of a list of them. Others than those of the dialects 0 and 1 are not looked at."""
        kind = attr["#"]
        if type(name) is not str:
            raise _StructureError("an attribute has no name")
        expected = _ATTRIBUTES.get(kind)
        if "D" not in attr:
            if kind == _NULL:
                return
            spelled, where = attr.get("VD"), _where(block, number, operator)
            if spelled == VOID_WRITTEN and kind in _FLOATS:
                text = f"attribute `{name}` is NaN, spelled in a way Paddle cannot read"
                self.program.report("attribute-nan", text, where)
            elif spelled not in VOID or kind not in _FLOATS:
                said = f"`VD` is {_shown(spelled)}" if "VD" in attr else "there is no `D`"
                self.program.report("attribute-void", f"attribute `{name}` has no value: {said}", where)
            else:
                self.program.infinite += spelled in _INFINITE
            return
        if expected is None:
            if kind[:2] in ("0.", "1."):
                text = f"attribute `{name}` is of the type `{kind}`, which Paddle does not have"
                self.program.report("attribute", text, _where(block, number, operator))
            return
        value = attr["D"]
        right = isinstance(value, expected) and (type(value) is not bool or expected == (bool,))
        if not right or (kind == _FLOATS[0] and abs(value) > _LARGEST_F32):
            text = f"attribute `{name}` of the type `{kind}` has the value {_shown(value)}"
            self.program.report("attribute", text, _where(block, number, operator))
        elif isinstance(value, list) and kind == _ARRAY:
            for item in value:
                self._attribute(item, name, block, number, operator)

    def _parameter(self, op: Mapping[str, Any], block: _PirBlock) -> None:
        if len(op["A"]) != len(_PARAMETER[0]):
            raise _StructureError(f"a parameter has {len(op['A'])} attributes, and {len(_PARAMETER[0])} are expected")
        name, result = op["A"][3], op["O"]
        value, kind = result["%"], result["TT"]
        if type(name) is not str or type(value) is not int:
            raise _StructureError("a parameter has no name or no number")
        where = f"parameter `{name}`"
        self._define(value, where)
        if str(kind["#"]).startswith(_DIST):
            kind = kind["D"][0]
        if kind["#"] != _DENSE:
            raise _StructureError(f"parameter `{name}` is not a dense tensor but {_shown(kind['#'])}")
        element, dims = _element(kind), kind["D"][1]
        self.types[element] = self.types.get(element, 0) + 1
        if not _known(element):
            self.program.report("type", f"`{element}` is not an element type of Paddle", where)
            return
        if min(dims, default=0) < 0 or len(dims) > _MOST_AXES:
            raise _StructureError(f"parameter `{name}` has no shape: {_shown(dims)}")
        # A program that was saved as not trainable says nothing of its results.
        self.flagless += "OA" not in op
        said = op.get("OA", (1, 0, 0))
        if len(said) != len(_PARAMETER[1]):
            raise _StructureError(f"a parameter has {len(said)} flags, and {len(_PARAMETER[1])} are expected")
        if len(self.blocks) > 1:
            self.program.report("parameter-nested", f"`{name}` is declared in {block.label}", where)
        elif said[0]:
            self._add(name, element, dims, where)

    def _add(self, name: str, element: str, dims: list[int], where: str) -> None:
        """A tensor of the parameter file."""
        found = ProgramTensor(name, BY_PIR[element.partition(".")[2]].dtype, tuple(dims))
        before = self.named.setdefault(name, found)
        if before is found:
            self.program.parameters.append(found)
        elif before == found:
            text = (
                f"`{name}` is declared twice and is one tensor: of Paddle's loaders only load_inference_model takes it"
            )
            self.program.report("parameter-shared", text)
        else:
            text = f"there are two parameters `{name}`: {before.dtype} {list(before.shape)} and {found.dtype} {dims}"
            self.program.report("parameter-twice", text, where)

    def _end(self, name: str, op: Mapping[str, Any]) -> None:
        """Read an operator that feeds or fetches data."""
        said = {a["N"]: a["AT"].get("D") for a in op["A"]}
        kind = op["O"][0]["TT"]
        if kind["#"] != _DENSE:
            return
        element, dims = kind["D"][0]["#"], kind["D"][1]
        title = str(said.get("name", ""))
        flags = {a["N"]: _plain(a["AT"].get("D")) for a in op.get("OA", ())}
        if name == _DATA and flags.get("persistable") is True and len(self.blocks) == 1:
            # The state of an optimizer, which is not declared as a parameter and is in the file like one.
            if not _known(element) or not all(type(n) is int and n >= 0 for n in dims):
                raise _StructureError(f"the persistable data `{title}` has no shape: {_shown(dims)}")
            self._add(title, element, dims, f"data `{title}`")
            return
        found = self.program.outputs if name == _FETCH else self.program.inputs
        found.append(ProgramTensor(title, _dtype(element), tuple(dims)))

    def _wrong(self, text: str, where: str) -> None:
        self.program.report("structure", text, where)


_FETCH = "1.fetch"
_ARRAY = "0.a_array"
_NULL = "NULL"
_WRITTEN_OUT = "0.parameter"
_PARAMETER = (
    ("is_distributed", "is_parameter", "need_clip", "parameter_name"),
    ("persistable", "stop_gradient", "trainable"),
)
_LAYOUTS = {"NHWC", "NCHW", "NDHWC", "NCDHW", "ANYLAYOUT", "UNDEFINED(ANYLAYOUT)", "MKLDNNLAYOUT", "ONEDNNLAYOUT"}
_LAYOUTS |= {"SPARSE_COO", "SPARSE_CSR", "PSTRING_UNION", "STRIDED"}
"""paddle/common/layout.h; their case does not matter."""
_MOST_AXES = 9
_LARGEST_F32 = 3.4028235677973366e38
"""The largest number that does not round to infinity in float32."""
_DATA = "1.data"
_ENDS = (_DATA, "1.feed", _FETCH)
_MORE_ELEMENTS = ("t_index",)
"""Element types that a value may have and a parameter may not."""


def _element(kind: Mapping[str, Any]) -> str:
    """Element type of a dense tensor's type: [element, dimensions, layout, levels of detail, offset]."""
    element, dims, layout, levels, offset = kind["D"]
    if type(dims) is not list or not all(type(n) is int for n in dims):
        raise _StructureError(f"a type has the dimensions {_shown(dims)}")
    if str(layout).upper() not in _LAYOUTS or not _is_levels(levels) or type(offset) is not int:
        raise _StructureError(f"a type says {_shown([layout, levels, offset])} of its layout")
    name = element["#"]
    if type(name) is not str:
        raise _StructureError(f"a type has the element {_shown(name)}")
    return name


def _is_levels(levels: Any) -> bool:
    return type(levels) is list and all(type(x) is list and all(type(n) is int for n in x) for x in levels)


def _dtype(element: str) -> str:
    name = element.partition(".")[2]
    return BY_PIR[name].dtype if name in BY_PIR else element


@cache
def _known(element: str) -> bool:
    dialect, _, name = element.partition(".")
    return dialect == "0" and (name in BY_PIR or name in _MORE_ELEMENTS)


def _label(owner: str, region: int, block: int) -> str:
    here = f"region {region} block {block}" if region or block else "block 0"
    return f"{owner}, {here}" if owner else here


def _where(block: _PirBlock, number: int, name: str) -> str:
    return f"{block.label} operator {number} ({operator_name(name)})"


def _compressed(op: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter that is written like any other operator, in the form that Paddle writes."""
    attributes = {a["N"]: _plain(a["AT"]["D"]) for a in op["A"]}
    flags = {a["N"]: _plain(a["AT"]["D"]) for a in op.get("OA", ())}
    found = {"A": [attributes[n] for n in _PARAMETER[0]], "O": op["O"][0]}
    return {**found, "OA": [flags[n] for n in _PARAMETER[1]]} if "OA" in op else found


def _plain(value: Any) -> Any:
    """An attribute's value, or the only item of a list."""
    return value[0]["D"] if isinstance(value, list) and value else value


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else f"`{value}`"
    return text if len(text) <= 80 else text[:77] + "..."
