"""The border of the API: unknown arguments, and messages that name options of the command line.

Commands and the API share everything below them, so errors and notes speak of options: ``--tp-out 2``. ``public``
turns these into arguments (``tp=2``), here and nowhere else. Options of other software stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from ckpttool.core.catalog import COMPONENTS
from ckpttool.errors import CkptError, UsageError
from ckpttool.formats.registry import READERS

P = ParamSpec("P")
R = TypeVar("R")

ARGUMENTS = {
    "check": "check()",
    "diff": "diff()",
    "ep-out": "ep",
    "etp-out": "etp",
    "filter": "patterns",
    "from": "format",
    "html": "report()",
    "keep-keys": "keep",
    "keep-preset": "preset",
    "list": "list(checkpoint)",
    "list-methods": "method",
    "param": "params",
    "pp-out": "pp",
    "quant-method": "method",
    "ranks-out": "ranks",
    "remove-keys": "remove",
    "sharding-out": "sharding",
    "show": "read()",
    "stats": "report(stats=True)",
    "tp-out": "tp",
}
"""Options whose argument has another name; the others are called alike."""
_MEANT = {
    "exist_ok": "force=True",
    "expert_parallel": "ep=",
    "format": "to=",
    "headers_only": "values=False",
    "html": "file=",
    "overwrite": "force=True",
    "pipeline_parallel": "pp=",
    "tensor_parallel": "tp=",
}
"""What is meant by arguments that a function does not have."""
_OF_SOURCE = frozenset(("tp", "pp", "ep", "etp", "sharding", "from"))
"""Options about the source: arguments of ``open`` even where the function has one of the same name."""
_OF_OUTPUT = "-out"
"""How options about the output end: never arguments of ``open``."""
_UNREACHABLE = {
    "anonymous": "the command line's anonymous option",
    "checkpoints": "the command line's checkpoints option",
    "code": "the command line's code option",
    "config": "a config.json in the directory",
    "fix": "ckpttool convert-json",
    "hash": "ckpttool inspect",
    "header": "ckpttool convert-json",
    "offline": "HF_HUB_OFFLINE=1",
    "requant": "the command line's requant option",
    "suggest-family": "ckpttool inspect",
    "with-paddle": "Paddle",
}
"""Options that the API lacks, and what stands for them in a sentence."""
_PRECISIONS = ("bf16", "f16", "f32", "f64")
_CHOICES = ("auto", "base", "counter", "max", "mergekit", "min", "skip")
_VALUES = {*READERS, *COMPONENTS, *_PRECISIONS, *_CHOICES}
_WORDS = "|".join(sorted(_VALUES, key=len, reverse=True))
_COMMAND = r"`ckpttool [^`]*`|ckpttool [a-z0-9.-]+(?: (?:[A-Z]+|--[a-z-]+))*"
_OPTION = re.compile(
    rf"(?P<command>{_COMMAND})|(?<![\w-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
    rf"(?:[ =](?P<value>\d[\w./,-]*\w|\d+|'[^']*'|[A-Z][A-Z0-9_]*(?:[=|][A-Z][A-Z0-9_.a-z]*)*|(?:{_WORDS})\b))?"
)
_FUNCTIONS: dict[str, Mapping[str, Any]] = {}
"""Parameters and their defaults of every public function, by its name."""


class UnknownArgumentError(UsageError, TypeError):
    """The function cannot be called with these arguments; a TypeError, too, as of any function."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the API, whose errors name its arguments.

    Raises UnknownArgumentError with the nearest name for an argument that it does not have.
    """
    name = function.__name__.rstrip("_")
    shape = signature(function)
    own = {n: p.default for n, p in shape.parameters.items() if n != "self"}
    _FUNCTIONS[name] = {**own, **_FUNCTIONS.get(name, {})}  # a method and a function of one name take the same

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given not in own:
                raise UnknownArgumentError(f"{name}() has no argument {given}", hint=_nearest(given, own))
        try:
            shape.bind(*args, **kwargs)
        except TypeError as e:
            named = ", ".join(f"{n}=" for n, p in shape.parameters.items() if p.kind is p.KEYWORD_ONLY)
            hint = f"pass these by name: {named}" if "positional" in str(e) and named else ""
            raise UnknownArgumentError(f"{name}(): {e}", hint=hint) from None
        try:
            return function(*args, **kwargs)
        except CkptError as e:
            e.what, e.hint = in_arguments(e.what, name), in_arguments(e.hint, name) if e.hint else e.hint
            e.where = tuple([in_arguments(w, name) for w in e.where])
            e.args = (e.what,)
            raise

    return call


def _nearest(given: str, own: Iterable[str]) -> str:
    name = given.strip("_")
    meant = _MEANT.get(name.removesuffix("_size"), f"{ARGUMENTS.get(name.replace('_', '-'), name)}=")
    if meant.partition("=")[0] not in own:
        found = get_close_matches(name, own, 1, 0.6)
        if not found:
            method = f"params={{'{name}': ...}} for a parameter of a merge method; " if "params" in own else ""
            return f"{method}its arguments: {', '.join(own)}"
        meant = f"{found[0]}="
    return f"did you mean {meant}?"


def in_arguments(text: str, function: str) -> str:
    """A sentence in which options of the command line are the arguments of the API, as seen by one of its functions."""
    return _OPTION.sub(lambda match: match["command"] or _argument(match, function), text)


def notes_in_arguments(notes: Iterable[str], function: str) -> list[str]:
    """The same for notes."""
    return [in_arguments(note, function) for note in notes]


def _argument(match: re.Match[str], function: str) -> str:
    option, value = match["name"], match["value"]
    gap = match[0][len(option) + 2 : len(option) + 3] if value else ""
    if option in _UNREACHABLE:
        return _UNREACHABLE[option] + gap + (value or "")
    plain = option.replace("-", "_")
    name = plain if plain in _FUNCTIONS.get(function, {}) else ARGUMENTS.get(option, plain)
    owner = _owner(name, option, function)
    if not owner:
        negated = plain.removeprefix("no_")
        if option.startswith("no-") and (owner := _owner(negated, option, function)):
            name = f"{negated}=False"
        elif name.isidentifier():
            return match[0]  # of other software
    elsewhere = "" if owner in ("", function) else f" in {owner}()"
    if _FUNCTIONS.get(owner, {}).get(name) is False:
        return f"{name}=True{elsewhere}{gap}{value or ''}"
    if value is None:
        quoted = match.string[match.start() - 1 : match.start()] == "`" or not name.isidentifier()
        return (name if quoted else f"`{name}`") + elsewhere
    if not (value.isdigit() or value.isupper() or value.startswith("'")):
        value = f'"{value}"'
    return f"{name}={value}{elsewhere}"


def _owner(name: str, option: str, function: str) -> str:
    """The function that has the argument: this one, else the first that has; "" for none."""
    order = ["open", *_FUNCTIONS] if option in _OF_SOURCE else [function, "open", "reshard", "run", *_FUNCTIONS]
    if option.endswith(_OF_OUTPUT):
        order = [f for f in order if f != "open"]
    return next((f for f in order if name in _FUNCTIONS.get(f, {})), "")
