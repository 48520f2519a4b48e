"""Reading a recipe's text: every value knows its key path and line, and whatever is wrong is said at once.

A recipe that is only half understood is worse than none, so a key that nobody reads is an error. All of them are
collected, together with everything else, into one error.
"""

from __future__ import annotations

import bisect
import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ckpttool.core.files import Place
from ckpttool.errors import CkptError, ConflictError, UnsupportedError, UsageError
from ckpttool.storage.listing import near

BYTES = 1 << 20
VALUES = 100_000
DEPTH = 40
"""Limits of a recipe, aliases written out."""


@dataclass(slots=True)
class Problems:
    """Problems found in a recipe."""

    source: str
    """File that the recipe is in, or what else it came from."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key path."""
    found: list[CkptError] = field(default_factory=list)
    """Problems in the order of the document."""
    _at: list[int] = field(default_factory=list)

    def place(self, path: str) -> str:
        """``FILE:LINE: key.path``."""
        line = self.lines.get(path)
        spot = f"{self.source}:{line}" if line else self.source
        return ": ".join(p for p in (spot, f"`{path}`" if path else "") if p)

    def add(self, what: str, *, at: str = "", hint: str | None = None, error: type[CkptError] = UsageError) -> None:
        """Remember one thing that is wrong at a key path."""
        line = self.lines.get(at, 0)
        i = bisect.bisect(self._at, line)
        self._at.insert(i, line)
        self.found.insert(i, error(what, where=self.place(at), hint=hint))

    def check(self) -> None:
        """Raise what was found: one thing as it is, several as one error that lists them."""
        if not self.found:
            return
        if len(self.found) == 1:
            raise self.found[0]
        kinds = {type(e) for e in self.found}
        raise (kinds.pop() if len(kinds) == 1 else UsageError)(
            f"{len(self.found)} things are wrong with {self.source or 'the recipe'}",
            where=[f"{e.where[0]}: {e.what}{f' ({e.hint})' if e.hint else ''}".lstrip(": ") for e in self.found],
        )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """``did you mean ...?``, or all that would be right."""
    choices = sorted(known)
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known: {', '.join(choices)}" if choices else None


def _elsewhere(key: str, keys: Collection[str], hints: Mapping[str, str]) -> str | None:
    """A hint for a key that is not among ``keys``, but may be one of ``hints``, or like one."""
    close = difflib.get_close_matches(key, [*keys, *hints], n=1, cutoff=0.6)
    if not close or close[0] not in hints:
        return nearest(key, keys)
    right = "" if close[0] == key else f"did you mean `{close[0]}`? "
    return right + hints[close[0]]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the document. The readers below note a problem and return None when it is of another type."""

    data: Any
    path: str
    problems: Problems

    def wrong(self, what: str, *, hint: str | None = None, error: type[CkptError] = UsageError) -> None:
        """Note that something is wrong here."""
        self.problems.add(what, at=self.path, hint=hint, error=error)

    def fields(self) -> dict[str, Value]:
        """The entries of a mapping; {} for null and anything else."""
        if self.data is None:
            return {}
        if not isinstance(self.data, dict):
            inside = re.fullmatch(r"(models|slices|sources|parameters)\[\d+\]", self.path.rpartition(".")[2])
            hint = f"write `- model: {self.data}`" if inside and isinstance(self.data, str) else None
            self.wrong(f"{_shown(self.data)} is not a mapping of names to values", hint=hint)
            return {}
        dot = f"{self.path}." if self.path else ""
        return {k: Value(v, f"{dot}{k}", self.problems) for k, v in self.data.items()}

    def known(self, keys: Collection[str], hints: Mapping[str, str] | None = None) -> dict[str, Value]:
        """The entries of a mapping that are not null; every other key than ``keys`` is a problem.

        ``hints`` say more about keys that belong elsewhere.
        """
        entries = self.fields()
        for key, value in entries.items():
            if key not in keys:
                self.problems.add(f"unknown key `{key}`", at=value.path, hint=_elsewhere(key, keys, hints or {}))
        return {k: v for k, v in entries.items() if k in keys and v.data is not None}

    def items(self) -> list[Value]:
        """The items of a list."""
        if not isinstance(self.data, list):
            self.wrong(f"{_shown(self.data)} is not a list")
            return []
        return [Value(v, f"{self.path}[{i}]", self.problems) for i, v in enumerate(self.data)]

    def text(self) -> str | None:
        """A text that is not empty."""
        if isinstance(self.data, str) and self.data.strip():
            return self.data
        self.wrong(f"{_shown(self.data)} is not a string")
        return None

    def whole(self, least: int = 0) -> int | None:
        """A whole number."""
        if isinstance(self.data, int) and not isinstance(self.data, bool) and self.data >= least:
            return self.data
        self.wrong(f"{_shown(self.data)} is not a whole number from {least} on")
        return None

    def flag(self) -> bool | None:
        """true or false."""
        if isinstance(self.data, bool):
            return self.data
        self.wrong(f"{_shown(self.data)} is neither true nor false")
        return None


def _shown(data: Any) -> str:
    if data is None:
        return "an empty value"
    text = json.dumps(data, ensure_ascii=False, default=str)
    return f"`{text[:60]}...`" if len(text) > 60 else f"`{text}`"


def read_text(path: Place) -> str:
    """The text of a recipe. Raises UsageError when it is not readable or too long to be one."""
    try:
        with path.open("rb") as f:
            data = f.read(BYTES + 1)
        if len(data) > BYTES:
            raise UsageError(f"a recipe has at most {BYTES >> 20} MiB", where=str(path))
        return data.decode("utf-8-sig")
    except OSError as e:
        hint = near(path) if isinstance(path, Path) and not path.exists() else ""
        raise UsageError(f"the recipe cannot be read: {e.strerror}", where=str(path), hint=hint or None) from None
    except UnicodeDecodeError:
        raise UsageError("the recipe is not valid UTF-8", where=str(path)) from None


def home(recipe: Place) -> Path | None:
    """The directory from which a recipe's relative paths count, too; one from elsewhere has none."""
    return recipe.parent if isinstance(recipe, Path) else None


def from_json(text: str, source: str) -> Value:
    """The value of a JSON text. Raises UsageError where it is none, ConflictError for a key that comes twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            keys = [k for k, _ in pairs]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise ConflictError(f"the key `{twice}` comes twice", where=source, hint="keep one of the two")
        return out

    try:
        return Value(json.loads(text, object_pairs_hook=once), "", Problems(source))
    except json.JSONDecodeError as e:
        raise UsageError(f"this is not JSON: {e.msg}", where=f"{source}:{e.lineno}") from None
    except (RecursionError, ValueError):
        raise UsageError("this JSON is too deep, or has numbers that are too long", where=source) from None


def from_yaml(text: str, source: str) -> Value:
    """The value of a YAML text, read with the safe rules. Keys are texts, as they are written.

    Raises UsageError where it is no YAML or goes beyond the limits, ConflictError for a key that comes twice.
    """
    if len(text) > BYTES:
        raise UsageError(f"a recipe has at most {BYTES >> 20} MiB", where=source)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_node() if loader.check_node() else None
        if root is not None and loader.check_node():
            second = loader.get_node()
            raise UnsupportedError(
                "this file holds several recipes",
                where=f"{source}:{second.start_mark.line + 1 if second else 1}",
                hint="merge one after the other, each from a file of its own",
            )
        reader = _YamlReader(loader, source)
        data = None if root is None else reader.read(root, "", 0)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"this is not YAML: {e.problem or e.context}", where=f"{source}{line}") from None
    except yaml.YAMLError as e:
        raise UsageError(f"this is not YAML: {str(e).splitlines()[0]}", where=source) from None
    except RecursionError:
        raise UsageError(f"this YAML is nested deeper than {DEPTH} levels", where=source) from None
    return Value(data, "", Problems(source, reader.lines))


class _YamlReader:
    """Turns YAML nodes into plain data and remembers the lines."""

    PLAIN = tuple(f"tag:yaml.org,2002:{t}" for t in ("str", "int", "float", "bool", "null"))
    AS_TEXT = "tag:yaml.org,2002:timestamp"
    MERGE = "tag:yaml.org,2002:merge"

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self.loader, self.source = loader, source
        self.lines: dict[str, int] = {}
        self.values = 0

    def read(self, node: Any, path: str, depth: int) -> Any:
        self.values += 1
        line = node.start_mark.line + 1
        if self.values > VALUES or depth > DEPTH:
            raise UsageError(
                f"a recipe has at most {VALUES:,} values, {DEPTH} levels deep, its aliases written out",
                where=f"{self.source}:{line}",
            )
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.read(n, f"{path}[{i}]", depth + 1) for i, n in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag == self.AS_TEXT:
            return node.value
        if isinstance(node, yaml.ScalarNode) and node.tag in self.PLAIN:
            try:
                value = self.loader.construct_object(node)
            except (ValueError, KeyError):
                value = 1 << 63
            if not isinstance(value, int) or abs(value) < 1 << 63:  # 0xfff... and 59:59:... have no limit of digits
                return value
            raise UsageError(
                f"`{str(node.value)[:60]}` is not a value of the type it claims", where=f"{self.source}:{line}"
            )
        raise UsageError(f"the YAML tag `{node.tag}` means nothing here", where=f"{self.source}:{line}")

    def _mapping(self, node: Any, path: str, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, int] = {}
        later = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError("a key must be a text", where=f"{self.source}:{line}")
            if key.tag == self.MERGE:
                later.append(value)
                continue
            name = str(key.value)
            if name in first:
                raise ConflictError(
                    f"the key `{name}` comes twice",
                    where=[f"{self.source}:{line}", f"{self.source}:{first[name]}"],
                    hint="keep one of the two",
                )
            first[name] = line
            at = f"{path}.{name}" if path else name
            self.lines[at] = line
            own[name] = self.read(value, at, depth + 1)
        for value in later:
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                data = self.read(part, path, depth + 1)
                if not isinstance(data, dict):
                    raise UsageError("`<<` merges only mappings", where=f"{self.source}:{part.start_mark.line + 1}")
                merged = data | merged
        return merged | own
