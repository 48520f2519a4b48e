"""The family files: which there are, and what stands in the one that is wanted.

``families/*.yaml`` are written by hand, and cut as engines do. ``families/transformers/*.yaml`` are generated, and cut
as transformers does. A model is looked up among the first, then among the second. For that only the head of a file is
read, which has one line for each of ``family``, ``about``, ``model_types`` and ``architectures``: there are many files,
and a run needs one of them.

A file may be written on top of another one:

``extends``     the model is built like those of another family: the maps of both files are joined
``inside``      the model has a language model of another family in it, under longer names
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ckpttool.core.words import either
from ckpttool.errors import LayoutError, UnsupportedError, UsageError
from ckpttool.layout.classes import causal_classes

FAMILIES = Path(__file__).with_name("families")
HEAD = ("family", "about", "model_types", "architectures")
"""The first keys of a built-in file, each on a line of its own."""
_LONGEST = 4096
"""Bytes in which these lines are."""
_KINDS = ("*.yaml", "transformers/*.yaml")
"""Patterns of family files: written by hand, and generated."""
_CHOSEN_BY = ("architectures", "model_types")
_SOURCES = frozenset({"from", "expr"})
"""Keys that say where a size comes from."""
_OWN = ("family", "about", "model_types", "architectures", "extends", "base")
"""Keys that a file does not inherit from the one that it extends."""


class UniqueKeys(yaml.SafeLoader):
    """A key that stands twice in one map is an error, where YAML itself lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's own signature
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"`{key.value}` stands twice in one map", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class FamilyFile(NamedTuple):
    """A built-in family file, by its head."""

    name: str
    path: Path
    chosen_by: Mapping[str, frozenset[str]]
    """``architectures`` and ``model_types`` of config.json that choose it."""


@lru_cache(maxsize=1)
def builtin() -> Mapping[str, FamilyFile]:
    """The built-in files by the name of their family; those that are written by hand come first."""
    return {f.name: f for kind in _KINDS for f in _heads(kind)}


@lru_cache(maxsize=len(_KINDS))
def _heads(kind: str) -> tuple[FamilyFile, ...]:
    return tuple(map(_head, sorted(FAMILIES.glob(kind))))


def _head(path: Path) -> FamilyFile:
    with path.open("rb", buffering=0) as file:
        lines = file.read(_LONGEST).decode("utf-8", "ignore").split("\n", len(HEAD))
    found = dict(line.partition(": ")[::2] for line in lines[: len(HEAD)])
    lists = {key: frozenset(found.get(key, "").strip("[]").split(", ")) - {""} for key in _CHOSEN_BY}
    return FamilyFile(found["family"], path, lists)


def find_file(config: Mapping[str, Any]) -> str | None:
    """The family whose architectures or model types the config names, or None."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list):
        architectures = [config["_class_name"]] if isinstance(config.get("_class_name"), str) else []
    said = {
        "architectures": [a for a in architectures if isinstance(a, str)],
        "model_types": [m for m in (config.get("model_type"),) if isinstance(m, str)],
    }
    found = _find(said)
    if found is None and not said["model_types"]:  # the class of a base model, or of one with another head
        said["architectures"] = [c for a in said["architectures"] for c in causal_classes(a)]
        found = _find(said)
    return found


def _find(said: Mapping[str, list[str]]) -> str | None:
    for kind in _KINDS:
        for key in _CHOSEN_BY:
            for file in _heads(kind):
                if not file.chosen_by[key].isdisjoint(said[key]):
                    return file.name
    return None


def read_builtin(name: str) -> dict[str, Any]:
    """The content of a built-in family's file, as it is. Raises UnsupportedError for an unknown name."""
    if name not in builtin():
        import difflib

        close = difflib.get_close_matches(name, [*builtin()], n=3)
        hint = f"did you mean {either([f'`{c}`' for c in close])}? Or " if close else "docs/families.md lists them; or "
        raise UnsupportedError(f"unknown family `{name}`", hint=f"{hint}--family FILE.yaml")
    data: dict[str, Any] = json.loads(_as_json(name))
    return data


@lru_cache(maxsize=512)
def _as_json(name: str) -> str:
    """A built-in file in JSON, which is read in a tenth of the time: a program may open one model after another."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return json.dumps(yaml.load(builtin()[name].path.read_text(encoding="utf-8"), Loader=loader))  # noqa: S506 - the safe loader, in C where there is one


def read_own(path: Path) -> Any:
    """The content of a user's file. Raises UsageError (it cannot be read) and LayoutError (no valid YAML)."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)  # noqa: S506 - a safe loader
    except OSError as e:
        raise UsageError(f"cannot read the family file: {e.strerror}", where=str(path)) from None
    except RecursionError:
        raise LayoutError("the family file is nested too deeply", where=str(path)) from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what = f"the family file is not valid YAML: {e.problem or e.context}"
        raise LayoutError(what, where=f"{path}{line}") from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: no UTF-8, or a date that is none
        raise LayoutError(f"the family file is not valid YAML: {str(e).splitlines()[0]}", where=str(path)) from None


def completed(data: Any, config: Mapping[str, Any], origin: str) -> Any:
    """A file with what it takes from others. Raises LayoutError and UnsupportedError for one that cannot be taken."""
    if isinstance(data, dict) and "extends" in data:
        data = _extended(data, config, origin)
    if isinstance(data, dict) and "inside" in data:
        data = _around(data, config, origin)
    return data


def _of_other(key: str, said: Any, allowed: Mapping[str, type], origin: str) -> dict[str, Any]:
    """The keys of a file about the family that it extends, checked for their types."""
    wrong = not isinstance(said, dict) or [
        k for k, v in said.items() if k not in allowed or not isinstance(v, allowed[k]) or not _of_texts(v)
    ]
    if wrong:
        what = f"`{wrong[0]}` is not right there" if isinstance(wrong, list) else "this is not a map"
        raise LayoutError(
            f"the family file is not valid at `{key}`: {what}", where=origin, hint=f"it has {', '.join(allowed)}"
        )
    out: dict[str, Any] = said
    return out


def _of_texts(said: Any) -> bool:
    """Whether a text, a list or a map of a family file has nothing but texts in it."""
    inner = [*said, *said.values()] if isinstance(said, dict) else said
    return all(isinstance(text, str) for text in inner)


def _other(name: str, config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    try:
        data = completed(read_builtin(name), config, f"{name}.yaml")
    except RecursionError:
        raise LayoutError(f"the family file is written on top of itself, through `{name}`", where=origin) from None
    assert isinstance(data, dict)  # noqa: S101 - our own file
    return data


def _with_namings(other: dict[str, Any], taken: list[str], origin: str) -> dict[str, Any]:
    """The other family with these of its namings only."""
    namings = other.get("namings", {})
    if missing := [n for n in taken if n not in namings]:
        raise LayoutError(f"family `{other['family']}` has no naming `{missing[0]}`", where=origin)
    out = {k: v for k, v in other.items() if k not in _OWN}
    out["namings"] = {n: namings[n] for n in taken}
    for key in ("hf_namings", "trainer_namings"):
        out[key] = [n for n in other.get(key, []) if n in taken]
    return out


def _extended(data: dict[str, Any], config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    said = _of_other("extends", data["extends"], {"family": str, "namings": list}, origin)
    other = _with_namings(_other(said.get("family", ""), config, origin), said.get("namings", []), origin)
    return _joined(data, other)


def _joined(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both maps; the own keys come first, and a null takes the other's key away.

    A size that says where it comes from is another one.
    """
    out = dict(own)
    for key, value in other.items():
        if key not in out:
            out[key] = value
        elif isinstance(value, dict) and isinstance(out[key], dict) and _SOURCES.isdisjoint(out[key]):
            out[key] = _joined(out[key], value)
    return {k: v for k, v in out.items() if v is not None or k not in other}


def _around(data: dict[str, Any], config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """A family around the one of its language model."""
    allowed = {"config": list, "family": str, "default": str, "names": dict, "namings": list}
    said = _of_other("inside", data["inside"], allowed, origin)
    inner = inner_config(said.get("config", []), config)
    name = said.get("family") or find_file(inner) or (said.get("default") if "model_type" not in inner else None)
    if name is None:
        raise UnsupportedError(
            f"the language model in it is a `{inner.get('model_type')}`, of which no rules are known",
            where=origin,
            hint="--family FILE.yaml, or single tensors: --split",
        )
    other = _other(name, inner, origin)
    # What the language model cannot be brought to, the model around it cannot either.
    lacking = {n for n in said.get("namings", []) if n not in other.get("namings", {})}
    other = _with_namings(other, [n for n in said.get("namings", []) if n not in lacking], origin)
    around = _renamed(other, _longer(said.get("names", {})))
    if "tensors" not in data:  # those of the language model are not all
        around.pop("tensors", None)
    out = _joined(data, around)
    # Its statements come first: those around it go on from the names that they lead to.
    namings, own = around["namings"], data.get("namings", {})
    if not isinstance(own, dict) or not all(isinstance(ops, list) for ops in own.values()):
        raise LayoutError(
            "the family file is not valid at `namings`: this is not a map of lists",
            where=origin,
            hint="a naming is a list of statements",
        )
    out["namings"] = {n: [*namings.get(n, []), *own.get(n, [])] for n in out["namings"] if n not in lacking}
    return out


def inner_config(paths: list[str], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of these parts of a config (``thinker_config.text_config``) that is there; {} where none is."""
    for path in paths:
        found: Any = config
        for key in str(path).split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return {}


_CAPTURE = re.compile(r"\{\w+\}")


def _longer(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function from a language model's patterns to those of the model around it."""

    def longer(pattern: str) -> str:
        for there, here in names.items():
            if pattern.startswith(there):
                return here + pattern[len(there) :]
        if names and _CAPTURE.match(pattern):
            return next(iter(names.values())) + pattern
        return pattern

    return longer


_PATTERN_MAPS = ("rename", "stack", "unstack", "read_as", "tie", "tie_as", "tie_staged")
_PATTERN_KEYS = ("rotary_pairs", "rules", "refuse", "shapes")
_PATTERN_LISTS = ("transpose", "squeeze", "drop", "own")


def _renamed(data: dict[str, Any], longer: Callable[[str], str]) -> dict[str, Any]:
    """A family with all its names changed."""
    out = dict(data)

    def keys(found: Mapping[str, Any]) -> dict[str, Any]:
        return {
            k if k.startswith("if ") else longer(k): keys(v) if k.startswith("if ") else v for k, v in found.items()
        }

    for key in ("first", "last"):
        out[key] = keys(data.get(key, {}))
    for stack in ("layers", *data.get("stacks", {})):
        holder = out if stack == "layers" else out["stacks"]
        holder[stack] = {**holder[stack], "prefix": longer(holder[stack]["prefix"])}
    for key in ("ties", "shared"):
        out[key] = {longer(k): longer(v) for k, v in data.get(key, {}).items()}
    out["fusions"] = {
        name: {**f, "whole": longer(f["whole"]), "parts": [longer(p) for p in f["parts"]]}
        for name, f in data.get("fusions", {}).items()
    }
    out["namings"] = {name: [_statement(op, longer) for op in ops] for name, ops in data.get("namings", {}).items()}
    if tensors := data.get("tensors"):
        out["tensors"] = {
            **tensors, "first": keys(tensors.get("first", {})), "last": keys(tensors.get("last", {})),
            **({"prefix": longer(tensors["prefix"])} if tensors.get("prefix") else {}),
            "stacks": {
                name: {**stack, **({"prefix": longer(stack["prefix"])} if stack.get("prefix") else {})}
                for name, stack in tensors.get("stacks", {}).items()
            },
        }  # fmt: skip
    out.pop("parameters", None)  # the order of a model that has more than these
    return out


def _statement(op: Mapping[str, Any], longer: Callable[[str], str]) -> dict[str, Any]:
    out = dict(op)
    for key, value in op.items():
        if key in _PATTERN_MAPS:
            out[key] = {longer(a): longer(b) for a, b in value.items()}
        elif key in _PATTERN_KEYS:
            out[key] = {longer(a): b for a, b in value.items()}
        elif key in _PATTERN_LISTS:
            out[key] = [longer(a) for a in value]
        elif key == "copies":
            out[key] = {longer(a): {"of": longer(c["of"]), "beside": longer(c["beside"])} for a, c in value.items()}
    return out
