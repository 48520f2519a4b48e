"""Checked expressions: what a family file may compute from config.json, in ``sizes:`` and in ``tensors:``.

==============================  ================================================================================
``2``, ``'text'``, ``[0, 1]``   a number, a text, a list
``hidden_size``                 a word; what it means is the scope's to say (layout/sizes.py)
``vision_config.hidden_size``   a field of a part of config.json
``layer``                       number of the layer
``+ - * // %``                  whole numbers only
``== != < <= > >= in not in``   comparisons
``and or not``, ``a if b else c``
``list[i]``, ``len(list)``      also of a text: ``'M-M*'[2]`` is ``'M'``
``blocks[layer].heads``         a field of an element
==============================  ================================================================================

and nothing else: no other calls. An expression is worked out once, or once for each layer if it asks for the layer.
"""

from __future__ import annotations

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

Value = int | str | list[Any]
"""The values that an expression can have. A truth value is a number, as in Python."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_NODES = (ast.List, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Compare, ast.Subscript)
"""Syntax that an expression may contain beside words, numbers and texts."""
_OTHER_SIGNS = (
    ast.Div, ast.Pow, ast.MatMult, ast.LShift, ast.RShift, ast.BitOr, ast.BitXor, ast.BitAnd, ast.UAdd, ast.Invert,
    ast.Is, ast.IsNot,
)  # fmt: skip


class Refused(Exception):  # noqa: N818 - why an expression has no value; users see LayoutError
    """Becomes a LayoutError once it is known where the expression stands."""

    def __init__(self, why: str, *, hint: str | None = None, lacks: bool = False) -> None:
        """``lacks``: nothing is wrong but that config.json does not say something."""
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.lacks = lacks
        self.through: list[str] = []
        """The names through which it was reached, from near to far."""


@cache
def parsed(text: str) -> ast.expr:
    """The tree of an expression; what it may hold is checked when it is worked out. Raises Refused."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refused("this is not an expression") from None


def checked(text: str) -> str:
    """The same text. Raises Refused for one that is no expression, whatever its words mean."""
    todo: list[ast.AST] = [parsed(text)]
    while todo:
        node = todo.pop()
        if (measured := _measured(node)) is not None:
            todo.append(measured)
            continue
        if _path(node):
            continue
        inner = list(ast.iter_child_nodes(node))
        field = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Subscript | ast.Attribute)
        constant = isinstance(node, ast.Constant) and type(node.value) in (int, bool, str)
        if not (constant or field or isinstance(node, _NODES)) or any(isinstance(n, _OTHER_SIGNS) for n in inner):
            raise _nothing(node)
        todo += [n for n in inner if isinstance(n, ast.expr)]
    return text


def words(text: str) -> list[str]:
    """The words of an expression, dotted paths as one; [] for what is none."""
    found: list[str] = []
    try:
        todo: list[ast.AST] = [parsed(text)]
    except Refused:
        return []
    while todo:
        node = todo.pop(0)
        if (measured := _measured(node)) is not None:
            todo.append(measured)
        elif path := _path(node):
            found.append(path)
        else:
            todo += ast.iter_child_nodes(node)
    return found


def _path(node: ast.AST) -> str:
    """``a`` or ``a.b.c``; "" for anything else."""
    fields: list[str] = []
    while isinstance(node, ast.Attribute):
        fields.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(fields)]) if isinstance(node, ast.Name) else ""


def _measured(node: ast.AST) -> ast.expr | None:
    """The argument of ``len()``; None for any other node."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[value], keywords=[]):
            return value
    return None


def _nothing(node: ast.AST) -> Refused:
    return Refused(
        f"`{ast.unparse(node)}` is nothing that an expression may hold",
        hint="names, whole numbers, + - * // %, comparisons, and, or, not, `a if b else c`, list[i], len(list)",
    )


class Expressions(ABC):
    """Works expressions out, each once, or once for each layer; a subclass says what words mean."""

    def __init__(self) -> None:
        self._layer: int | None = None
        self._known: dict[str, Value] = {}
        """Values by name or, in backquotes, by expression."""
        self._in_layer: dict[str, Value] = {}
        """The same for what depends on the layer."""
        self._depends = False
        """Whether what is being worked out has asked for the layer."""
        self._open: list[str] = []
        """Names that are being worked out, outermost first."""
        self.given: dict[str, int] = {}
        """Words with a value of their own."""

    @abstractmethod
    def meaning(self, name: str) -> Value:
        """The value of a word. Raises Refused."""

    @abstractmethod
    def element(self, of: str, value: object) -> Value:
        """An element of a list, called ``of``, as an expression can use it. Raises Refused."""

    def enter(self, layer: int | None) -> None:
        """Evaluate the following expressions in this layer."""
        self._layer = layer
        self._in_layer.clear()

    def work_out(self, text: str) -> Value:
        """Evaluate an expression. Raises Refused, and RecursionError for one that is too deep."""
        return self._remembered(f"`{text}`", lambda: self.evaluate(parsed(text)))

    def depends(self, work: Callable[[], object]) -> bool:
        """Whether the work asks for the layer, may it succeed or be refused."""
        outer, self._depends = self._depends, False
        try:
            work()
        except Refused:
            pass
        finally:
            asked, self._depends = self._depends, outer
        return asked

    def _remembered(self, key: str, work: Callable[[], Value]) -> Value:
        """The result of ``work``, done once, or once for each layer if it asks for the layer."""
        if key in self._known:
            return self._known[key]
        if key in self._in_layer:
            self._depends = True
            return self._in_layer[key]
        outer, self._depends = self._depends, False
        try:
            got = work()
            (self._in_layer if self._depends else self._known)[key] = got
        finally:
            self._depends = self._depends or outer
        return got

    def layer(self, asking: str = "") -> int:
        """The number of the layer, for what differs from layer to layer. Raises Refused outside of layers."""
        self._depends = True
        if self._layer is None:
            what = f"`{asking}` differs from layer to layer, and" if asking else "`layer`"
            raise Refused(f"{what} has a meaning only in `layers`")
        return self._layer

    def _name(self, name: str) -> Value:
        if name == "layer":
            return self.layer()
        if name in self.given:
            return self.given[name]
        if name in self._open:
            raise Refused(f"`{name}` is explained by itself")
        self._open.append(name)
        try:
            return self._remembered(name, lambda: self.meaning(name))
        finally:
            self._open.pop()

    def evaluate(self, node: ast.expr) -> Value:
        """Evaluate a part of an expression. Raises Refused."""
        if path := _path(node):
            return self._name(path)
        match node:
            case ast.Constant(value=int() | str() as value):
                return value
            case ast.List(elts=elements):
                return [self.evaluate(e) for e in elements]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                a, b = self._whole(left), self._whole(right)
                if b == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                    raise Refused(f"`{ast.unparse(right)}` is 0, and nothing divides by it")
                if abs(got := _ARITHMETIC[type(op)](a, b)) >> 64:
                    raise Refused(f"`{ast.unparse(node)}` is too large for any size")
                return got
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._whole(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._truth(operand)
            case ast.BoolOp(op=op, values=values):
                holds = all if isinstance(op, ast.And) else any
                return holds(self._truth(v) for v in values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.evaluate(body if self._truth(test) else orelse)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compared(left, ops, others)
            case ast.Subscript() | ast.Attribute(value=ast.Subscript() | ast.Attribute()):
                return self.element(ast.unparse(node), self._object(node))
            case ast.Call() if (measured := _measured(node)) is not None:
                return len(self._sequence(measured))
        raise _nothing(node)

    def _truth(self, node: ast.expr) -> bool:
        got = self.evaluate(node)
        if isinstance(got, str):
            raise Refused(f"`{ast.unparse(node)}` is {got!r}, which is neither true nor false")
        return bool(got)

    def _whole(self, node: ast.expr) -> int:
        got = self.evaluate(node)
        if type(got) is not int:
            raise Refused(f"`{ast.unparse(node)}` is {got!r}, not a whole number")
        return got

    def _compared(self, left: ast.expr, ops: Sequence[ast.cmpop], others: Sequence[ast.expr]) -> bool:
        a = self.evaluate(left)
        for op, other in zip(ops, others, strict=True):
            b = self.evaluate(other)
            try:
                holds = _COMPARISONS[type(op)](a, b)
            except (KeyError, TypeError):
                raise Refused(f"{a!r} and {b!r} cannot be compared like this") from None
            if not holds:
                return False
            a = b
        return True

    def _sequence(self, node: ast.expr) -> str | list[Any]:
        got = self.evaluate(node)
        if not isinstance(got, str | list):
            raise Refused(f"`{ast.unparse(node)}` is {got!r}, which is neither a list nor a text")
        return got

    def _object(self, node: ast.expr) -> object:
        """An element of a list, or a field of an element that is a part of the config."""
        match node:
            case ast.Subscript(value=value, slice=index):
                elements, at = self._object(value), self._whole(index)
                if not isinstance(elements, str | list):
                    raise Refused(f"`{ast.unparse(value)}` is {elements!r}, which is neither a list nor a text")
                if not 0 <= at < len(elements):
                    raise Refused(f"`{ast.unparse(value)}` has no element {at}")
                return elements[at]
            case ast.Attribute(value=value, attr=name) if not _path(node):
                part = self._object(value)
                if not isinstance(part, Mapping) or name not in part:
                    raise Refused(f"`{ast.unparse(value)}` of config.json has no `{name}`", lacks=True)
                return part[name]
        return self.evaluate(node)
