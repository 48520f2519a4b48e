"""Names that differ only in numbers become one line: ``model.layers.{0..60}.mlp.experts.{0..255}.up_proj.weight``.

Numbers are put together only where everything below them is the same, so ``layers.{0..2}`` and ``layers.{3..60}``
are two lines when the first three layers have another structure. A line therefore says exactly which tensors there
are. The work is done on name templates, of which there are dozens, and not on names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.core.catalog import in_order
from ckpttool.core.tensor_names import SLOT, printable, templates
from ckpttool.core.words import natural, ranges
from ckpttool.ops.inspect.listing import TensorRow

LEVELS = 100
"""Levels of the tree. What a name has beyond them stands on one line; names that are published have ten."""


@dataclass(slots=True)
class TreeNode:
    """A line of the tree. ``label`` is what it adds to the name of its parent."""

    label: str
    count: int = 0
    """Tensors."""
    elements: int = 0
    nbytes: int = 0
    dtype: str = ""
    """"" for a line that is no tensor."""
    shape: tuple[int, ...] = ()
    times: int = 1
    """How often the children stand in the checkpoint: the number of numbers in the label."""
    children: list[TreeNode] = field(default_factory=list)
    mark: str = ""
    """What is to be said of the tensor besides: which states it stands for, or what it is derived from."""


class Summed(NamedTuple):
    """Like a row, for a leaf that stands for several tensors of one parameter or has something to be said of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    mark: str
    tensors: int
    elements: int


DERIVED = "rounded master weight"


def by_component(rows: Sequence[TensorRow]) -> dict[str, tuple[str, Sequence[TensorRow | Summed]]]:
    """Rows by component, in the order of the components, under the names of their parameters.

    The states of an optimizer are one leaf for each parameter. With each component comes the mark that all of its
    leaves have, which then stands on none of them.
    """
    found: dict[str, list[TensorRow]] = {}
    for r in rows:
        found.setdefault(r[7], []).append(r)
    out: dict[str, tuple[str, Sequence[TensorRow | Summed]]] = {}
    for component in in_order(found):
        mine = found[component]
        if component == "model" and not any(r[9] for r in mine):
            out[component] = ("", mine)
            continue
        leaves = _leaves(mine)
        marks = {leaf.mark for leaf in leaves}
        every = marks.pop() if len(marks) == 1 else ""
        out[component] = (every, [leaf._replace(mark="") for leaf in leaves] if every else leaves)
    return out


def _leaves(rows: Sequence[TensorRow]) -> list[Summed]:
    """A leaf for each parameter: its dtypes and states, the shape of its largest tensor."""
    out: dict[str, Summed] = {}
    for r in rows:
        name, elements = r.parameter, prod(r.shape)
        mark = r.state or (DERIVED if r.derived else "")
        known = out.get(name)
        if known is None:
            out[name] = Summed(name, r.dtype, r.shape, r.nbytes, mark, 1, elements)
            continue
        out[name] = Summed(
            name,
            known.dtype if r.dtype in known.dtype.split(", ") else f"{known.dtype}, {r.dtype}",
            max(known.shape, r.shape, key=prod),
            known.nbytes + r.nbytes,
            f"{known.mark}, {mark}" if mark else known.mark,
            known.tensors + 1,
            known.elements + elements,
        )
    # In the order of their names, whatever order the rows came in.
    return [t._replace(mark=", ".join(sorted(t.mark.split(", "), key=_state))) for t in out.values()]


def _state(name: str) -> tuple[bool, str]:
    """Moments first, powers of beta after them."""
    return name.startswith("beta"), name


def _join(one: str, other: str) -> str:
    """Two parts of a name; a tensor whose name ends in a number adds nothing to that."""
    return f"{one}.{other}" if one and other else one or other


def _words(text: str) -> list[str]:
    """The parts of a name, the last of them with all that would lie too deep."""
    return text.strip(".").split(".", LEVELS)


class _Leaf(NamedTuple):
    text: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    mark: str = ""
    tensors: int = 1
    elements: int = -1
    """-1: what the shape says."""


_DOT = "\ue000"
"""Stands for the dots of names that have components without a character (``../x``, ``a..b``): they are one word."""


def _components(name: str) -> str:
    return name.replace(".", _DOT) if ".." in f".{name}." else name


class _Numbered(NamedTuple):
    text: str
    numbers: tuple[int, ...]
    content: int
    """What stands below each of the numbers."""


_Item = _Leaf | _Numbered
_Below = dict[str, dict[tuple[int, ...], list[int]]]
"""Template up to its last slot -> numbers in the slots -> items that stand there."""


def collapse(rows: Sequence[TensorRow | Summed]) -> TreeNode:
    """The tree of all rows; the root has no label."""
    items: dict[_Item, int] = {}
    """Every distinct thing that can stand below a parent, numbered."""
    below: dict[int, _Below] = {}
    """By number of slots."""
    known: dict[str, tuple[str, dict[tuple[int, ...], list[int]], dict[tuple[Any, ...], int]]] = {}
    for split, row in zip(templates([_components(r.name) for r in rows]), rows, strict=True):
        template, numbers = split if split[0].count(".") <= LEVELS else (printable(row.name), ())
        if template not in known:
            cut = template.rfind(SLOT) + 1
            known[template] = (template[cut:], below.setdefault(len(numbers), {}).setdefault(template[:cut], {}), {})
        text, places, leaves = known[template]
        kind: tuple[Any, ...] = row[1:] if isinstance(row, Summed) else row[1:3]
        item = leaves.get(kind)
        if item is None:
            more = row[4:] if isinstance(row, Summed) else ()
            item = leaves[kind] = items.setdefault(_Leaf(text, row[1], row[2], row[3], *more), len(items))
        if numbers in places:
            places[numbers].append(item)
        else:
            places[numbers] = [item]
    contents: dict[frozenset[int], int] = {}
    for depth in range(max(below, default=0), 0, -1):
        for prefix, places in below.get(depth, {}).items():
            grouped: dict[tuple[tuple[int, ...], int], list[int]] = {}
            for numbers, found in places.items():
                content = contents.setdefault(frozenset(found), len(contents))
                grouped.setdefault((numbers[:-1], content), []).append(numbers[-1])
            cut = prefix.rfind(SLOT, 0, -1) + 1
            outer = below.setdefault(depth - 1, {}).setdefault(prefix[:cut], {})
            for (parent, content), same in grouped.items():
                numbered = _Numbered(prefix[cut:-1], tuple(sorted(same)), content)
                outer.setdefault(parent, []).append(items.setdefault(numbered, len(items)))
    top = below.get(0, {}).get("", {}).get((), [])
    return _Builder(list(items), [list(c) for c in contents]).node("", top, 1)


class _Trie:
    """Components of names on the way to what stands below them."""

    __slots__ = ("children", "items")

    def __init__(self) -> None:
        self.children: dict[str, _Trie] = {}
        self.items: list[_Item] = []


@dataclass(slots=True)
class _Builder:
    items: list[_Item]
    contents: list[list[int]]

    def node(self, label: str, content: Iterable[int], times: int) -> TreeNode:
        trie = _Trie()
        for number in content:
            item = self.items[number]
            at = trie
            *path, last = _words(item.text)
            for word in path:
                at = at.children.setdefault(word, _Trie())
            if isinstance(item, _Numbered) and last:
                at = at.children.setdefault(last, _Trie())
            at.items.append(item)
        return self._from_trie(label, trie, times)

    def _from_trie(self, label: str, trie: _Trie, times: int) -> TreeNode:
        children = []
        for item in trie.items:
            if isinstance(item, _Leaf):
                name = _words(item.text)[-1].replace(_DOT, ".")
                elements = prod(item.shape) if item.elements < 0 else item.elements
                leaf = TreeNode(name, item.tensors, elements, item.nbytes, item.dtype, item.shape, mark=item.mark)
                children.append(leaf)
            else:
                braces = "{" + ranges(item.numbers) + "}" if len(item.numbers) > 1 else str(item.numbers[0])
                children.append(self.node(braces, self.contents[item.content], len(item.numbers)))
        children += [self._from_trie(word, below, 1) for word, below in trie.children.items()]
        flat: list[TreeNode] = []
        for child in children:
            if not child.dtype and len(child.children) == 1:
                # A line with one line below it says nothing by itself.
                (only,) = child.children
                only.label = _join(child.label, only.label)
                only.times *= child.times
                only.count, only.elements, only.nbytes = child.count, child.elements, child.nbytes
                flat.append(only)
            elif not child.dtype and all(c.label.startswith("{") or c.label[:1].isdigit() for c in child.children):
                # `layers` and below it `{0..2}` and `{3..60}`: the numbers belong on the line of the word.
                for c in child.children:
                    c.label = _join(child.label, c.label)
                    c.times, c.count = c.times * child.times, c.count * child.times
                    c.elements, c.nbytes = c.elements * child.times, c.nbytes * child.times
                flat += child.children
            else:
                flat.append(child)
        flat.sort(key=lambda n: natural(n.label.replace("{", "")))
        node = TreeNode(label, times=times, children=flat)
        node.count = times * sum(c.count for c in flat)
        node.elements = times * sum(c.elements for c in flat)
        node.nbytes = times * sum(c.nbytes for c in flat)
        return node


class TreeLine(NamedTuple):
    """A node where it stands: how deep, with its full name, and over how many numbers."""

    depth: int
    name: str
    node: TreeNode
    times: int
    """How often the node itself stands in the checkpoint."""


def lines(root: TreeNode, depth: int | None = None) -> list[TreeLine]:
    """The tree from top to bottom; with ``depth`` only so many levels."""
    out: list[TreeLine] = []

    def walk(node: TreeNode, level: int, name: str, times: int) -> None:
        full = _join(name, node.label)
        out.append(TreeLine(level, full, node, times))
        if depth is None or level + 1 < depth:
            for child in node.children:
                walk(child, level + 1, full, times * node.times)

    for child in root.children:
        walk(child, 0, "", root.times)
    return out
