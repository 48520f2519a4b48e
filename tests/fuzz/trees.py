"""JSON texts taken apart, damaged in one place, and put together again, with everything that a parser may not expect.

A text keeps what ``json`` would lose: the order of keys and keys that occur twice. Large maps are represented by their
first, second, middle and last entries: a checkpoint has a thousand tensors, and one kind of entry.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

TOKENS = (
    *("null", "true", "false", "-1", "0", "1", "3", "2147483648", "9223372036854775808", "1" + "0" * 30, "0.5"),
    *("1e400", "-1e400", "NaN", "Infinity", '""', '"x"', '"../../x"', '"/etc/hostname"', '"\\ud800"', '"\\u0000"'),
    *("[]", "{}", "[[]]", "[null]", "[-1]", '[""]', '{"": null}', '{"a": {"b": []}}', '"' + "y" * 70_000 + '"'),
    *("9" * 5000, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000),
)
"""What may stand where a value is expected: each JSON type, the edges of numbers, names that lead elsewhere."""


class Raw(str):
    """A value as its text."""

    __slots__ = ()


class Pairs(list[list[Any]]):
    """An object: [key, value] in order; keys may repeat."""


def parse(text: str | bytes) -> Any:
    """A JSON text as Pairs, lists and plain values."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([list(p) for p in pairs]))


def dump(node: Any) -> str:
    """The text of what ``parse`` gave, damaged or not."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(dump(v) for v in node) + "]"
    return json.dumps(node)


Path = tuple[int, ...]
Change = Callable[[Any, int], None]
Case = tuple[str, Callable[[], bytes]]
"""What is done, and the text or bytes that come of it."""


def chosen(count: int) -> list[int]:
    """Places that stand for all of them."""
    return sorted({0, 1, count // 2, count - 1}) if count > 6 else list(range(count))


def places(node: Any, path: Path = (), depth: int = 12) -> Iterator[tuple[Path, Any]]:
    """Every value of a tree, containers before what they hold; large containers by their ``chosen`` entries."""
    yield path, node
    if isinstance(node, list) and depth:
        for i in chosen(len(node)):
            child = node[i][1] if isinstance(node, Pairs) else node[i]
            yield from places(child, (*path, i), depth - 1)


def _value(parent: Any, i: int) -> Any:
    return parent[i][1] if isinstance(parent, Pairs) else parent[i]


def _put(value: Any) -> Change:
    def change(parent: Any, i: int) -> None:
        if isinstance(parent, Pairs):
            parent[i][1] = value
        else:
            parent[i] = value

    return change


def _drop(parent: Any, i: int) -> None:
    del parent[i]


def _twice(parent: Any, i: int) -> None:
    parent.insert(i, parent[i])


def _twice_differently(parent: Any, i: int) -> None:
    parent.insert(i, [parent[i][0], None] if isinstance(parent, Pairs) else None)


def _to_the_end(parent: Any, i: int) -> None:
    parent.append(parent.pop(i))


def _exchange(parent: Any, i: int) -> None:
    j = (i + 1) % len(parent)
    if isinstance(parent, Pairs):
        parent[i][1], parent[j][1] = parent[j][1], parent[i][1]
    else:
        parent[i], parent[j] = parent[j], parent[i]


def _rename(to: Callable[[str], str]) -> Change:
    def change(parent: Any, i: int) -> None:
        parent[i] = [to(parent[i][0]), parent[i][1]]

    return change


def _more(parent: Any, i: int) -> None:
    parent.insert(i, ["x-unknown", 1] if isinstance(parent, Pairs) else _value(parent, i))


def _wrap(parent: Any, i: int) -> None:
    _put([_value(parent, i)])(parent, i)


CHANGES: tuple[tuple[str, Change], ...] = (
    ("drop", _drop),
    ("twice", _twice),
    ("twice, other value", _twice_differently),
    ("to the end", _to_the_end),
    ("exchange with the next", _exchange),
    ("wrap", _wrap),
)
KEYS: tuple[tuple[str, Change], ...] = (
    ("rename +x", _rename(lambda k: k + "x")),
    ("rename empty", _rename(lambda _: "")),
    ("rename ../", _rename(lambda k: "../" + k)),
    ("rename surrogate", _rename(lambda k: k + "\ud800")),
    ("unknown field", _more),
)


def _near(value: Any) -> Iterator[Any]:
    """Values that are wrong by little."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value))
        case float():
            yield from (-value, str(value))
        case str():
            yield from (value + "x", value[:-1], value.upper(), value + "\n", value.replace("a", "b", 1))
        case Pairs():
            yield from (Pairs(), [])
        case list():
            yield from ([], value[::-1], [*value, 1], [*value, *value], Pairs())


def structures(text: str | bytes) -> Iterator[Case]:
    """The text with one value, key or entry damaged at a time."""
    tree = parse(text)

    def at(path: Path, change: Change) -> Callable[[], bytes]:
        def make() -> bytes:
            root = [parse(text)]
            parent: Any = root
            for i in (0, *path)[:-1]:
                parent = _value(parent, i)
            change(parent, (0, *path)[-1])
            return dump(root[0]).encode() if root else b""

        return make

    for path, node in places(tree):
        said = "/".join(map(str, path))
        for value in _near(node):
            yield f"/{said}: nearly", at(path, _put(value))
        for token in TOKENS:
            yield f"/{said}: {token[:20]}", at(path, _put(Raw(token)))
        if path:
            for name, change in CHANGES:
                yield f"/{said}: {name}", at(path, change)
            parent = tree
            for i in path[:-1]:
                parent = _value(parent, i)
            if isinstance(parent, Pairs):
                for name, change in KEYS:
                    yield f"/{said}: {name}", at(path, change)


def texts(data: bytes) -> Iterator[Case]:
    """A text file damaged as a text: other encodings, what comes before and behind."""
    whole = (
        ("empty", b""),
        ("white space", b" \n"),
        ("byte order mark", b"\xef\xbb\xbf" + data),
        ("UTF-16", data.decode("utf-8", "replace").encode("utf-16")),
        ("doubled", data + data),
        ("something behind", data + b"x"),
        ("white space behind", data + b"\n \t\r\n"),
        ("NUL behind", data + b"\0"),
        ("not UTF-8", data[: len(data) // 2] + b"\xff\xfe" + data[len(data) // 2 :]),
        ("DOS lines", data.replace(b"\n", b"\r\n")),
        ("zeros", bytes(len(data))),
    )
    for name, damaged in whole:
        yield name, lambda damaged=damaged: damaged  # type: ignore[misc]


def change(data: bytes, rng: random.Random) -> bytes:
    """A JSON text with one value, key or entry damaged by chance. Raises ValueError when it is not JSON."""
    try:
        root = [parse(data)]
    except RecursionError:
        return data
    parent: Any = root
    at = 0
    while rng.random() < 0.8:
        child = _value(parent, at)
        if not isinstance(child, list) or not child:
            break
        parent, at = child, rng.randrange(len(child))
    value = _value(parent, at)
    kind = rng.randrange(4) if parent is not root else rng.randrange(2)
    if kind == 0:
        _put(Raw(rng.choice(TOKENS[:-4])))(parent, at)
    elif kind == 1:
        _put(rng.choice([*_near(value), value]))(parent, at)
    elif kind == 2:
        rng.choice(CHANGES)[1](parent, at)
    elif isinstance(parent, Pairs):
        rng.choice(KEYS)[1](parent, at)
    return dump(root[0]).encode()
