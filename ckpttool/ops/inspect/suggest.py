"""A family file to start from, for a model that no family is for: what is sure, what is alike, and what is not known.

Rules come from the family whose names are nearest (layout/nearest.py). A tensor that it does not name has the rule that
other families have for such a name, marked; what no family knows is whole on every rank, which is never wrong as data,
and marked. Nothing is believed of it until somebody has compared it with the model's own parallel code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.core.words import count, some
from ckpttool.errors import UnsupportedError
from ckpttool.formats.config import HEADS, LAYERS, config_places, whole_number
from ckpttool.layout.family import load_family
from ckpttool.layout.nearest import NameTemplate, Nearest, kind_of, nearest
from ckpttool.layout.rules import parse_rule
from ckpttool.layout.sizes import SizeSpec
from ckpttool.layout.spec import FamilySpec

_MOST_LINES = 2000
"""Kinds of tensors; more are no model, but names with hashes in them."""
_HEAD = """\
# A draft from `ckpttool inspect --suggest-family`. Names are a hint, not a proof:
# compare every line with the model's own parallel code before you trust it.
# Lines that were not known say so.
"""


class FamilyLine(NamedTuple):
    """One rule of the file."""

    kind: NameTemplate
    pattern: str
    rule: str
    doubt: str
    """What could not be known; "" where the nearest family has the rule."""


class Suggestion(NamedTuple):
    """A family file, and how far it can be believed."""

    text: str
    family: str
    """The nearest family; "" where none is near."""
    named: int
    """Kinds of tensors that it names."""
    kinds: int
    doubts: tuple[str, ...]
    """Patterns whose rules were not known."""


def suggest(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Suggestion:
    """A family file for a model with tensors of these names and shapes.

    Raises UnsupportedError for names that are those of no model.
    """
    examples: dict[NameTemplate, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        examples.setdefault(kind_of(name), shape)
    if len(examples) > _MOST_LINES:
        raise UnsupportedError(f"{len(examples):,} kinds of tensors are more than a family file can have")
    near = nearest(shapes)
    spec = load_family(near.family, config).spec if near else None
    sizes = _sizes(spec, config)
    lines = [_line(kind, shape, near, sizes) for kind, shape in examples.items()]
    main = _main_stack(shapes, near, config)
    text = "\n".join([*_head(config, near), "", *_size_lines(sizes), "", *_sections(lines, main)]) + "\n"
    doubts = tuple(_full(line) for line in lines if line.doubt)
    return Suggestion(text, near.family if near else "", near.named if near else 0, len(lines), doubts)


def _head(config: Mapping[str, Any], near: Nearest | None) -> list[str]:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    kind = model_type if isinstance(model_type, str) else ""
    classes = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list) else []
    if not classes and isinstance(said := config.get("_class_name"), str):  # of diffusers
        classes = [said]
    name = re.sub(r"\W+", "_", kind.lower()) or "my_model"
    about = "nothing is near"
    if near:
        about = f"near {near.family}, whose rules name {near.named} of {near.kinds} kinds of tensor"
    return [
        _HEAD.rstrip(),
        f"family: {name}",
        f"about: {about}",
        f"model_types: [{_quoted(kind) if kind else ''}]",
        f"architectures: [{', '.join(map(_quoted, classes))}]",
    ]


def _quoted(text: str) -> str:
    """As YAML has it; the escapes of JSON are YAML's, too."""
    return text if re.fullmatch(r"[A-Za-z_][\w.]*", text, re.ASCII) else json.dumps(text)


def _sizes(spec: FamilySpec | None, config: Mapping[str, Any]) -> dict[str, str]:
    """What the file says of each size, as far as config.json has a field for it."""
    places = config_places(config)
    out = {}
    for name, said in (spec.sizes if spec else {}).items():
        fields = [said] if isinstance(said, str) else said
        size = fields if isinstance(fields, SizeSpec) else SizeSpec.model_validate({"from": fields})
        there = [f for f in size.fields if any(type(p.get(f)) is int for p in places)]
        if there and not size.plus:
            shared = f"{{from: [{there[0]}], default: heads, shared: true}}"
            out[name] = shared if size.shared else there[0]
    for field in LAYERS if "layers" not in out else ():
        if whole_number(config, field) is not None:
            out["layers"] = field
            break
    if "vocab" not in out and whole_number(config, "vocab_size") is not None:
        out["vocab"] = "vocab_size"
    return out


def _size_lines(sizes: Mapping[str, str]) -> list[str]:
    missing = [n for n in ("layers", "vocab", "heads") if n not in sizes]
    out = ["sizes:", *(f"  {name}: {said}" for name, said in sizes.items())]
    out += [f"  # {name}: not known; which field of config.json counts them?" for name in missing]
    return out if sizes else ["sizes: {}", *out[1:]]


def _line(kind: NameTemplate, shape: Sequence[int], near: Nearest | None, sizes: Mapping[str, str]) -> FamilyLine:
    rule, doubt = "replicate", ""
    if near and kind in near.rules:
        rule = near.rules[kind][1]
    elif near and kind in near.others:
        rule, families = near.others[kind]
        doubt = f"as in {some(list(families), 2)}; check it"
    elif len(shape) > 1:
        doubt = f"not known: {list(shape)}. Whole on every rank, unless you say column, row or fused"
    parsed = parse_rule(rule)
    unknown = {parsed.units, *(p.units for p in parsed.parts)} - {"", *sizes}
    if unknown := {u for u in unknown if not u.isdigit()}:
        doubt = f"`{rule}` elsewhere, but no field of config.json is known for {some(sorted(unknown), 2)}"
        rule = "replicate"
    return FamilyLine(kind, kind.pattern, rule, doubt)


def _main_stack(names: Iterable[str], near: Nearest | None, config: Mapping[str, Any]) -> str:
    """What stands in front of the number of the decoder's layers: of the stacks that have as many as the config says,
    or of all, the one of which the nearest family names most."""
    stacks = {stack: len(numbers) for stack, numbers in _numbers(names).items()}
    wanted = whole_number(config, *LAYERS)
    fitting = [s for s, n in stacks.items() if n == wanted] or [*stacks]
    return max(fitting, key=lambda s: (sum(k.stack == s for k in (near.rules if near else ())), stacks[s]), default="")


def _numbers(names: Iterable[str]) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for name in names:
        if stack := kind_of(name).stack:
            out.setdefault(stack, set()).add(name[len(stack) + 1 :].split(".")[0])
    return out


def _sections(lines: Sequence[FamilyLine], main: str) -> list[str]:
    """The rules by where they stand: in front of the layers, in them, in other stacks, behind them."""
    before, behind, stacks = [], [], dict[str, list[FamilyLine]]()
    for line in lines:
        if line.kind.stack:
            stacks.setdefault(line.kind.stack, []).append(line)
        elif "embed" in line.pattern or (line.rule == "vocab" and not line.pattern.endswith(HEADS)):
            before.append(line)
        else:
            behind.append(line)
    inside = stacks.pop(main, [])
    out = ["first:", *_rules(before, "  ")] if before else []
    out += ["", "layers:", f'  prefix: "{main}.{{layer}}."', *_under("  rules:", _rules(inside, "    "))]
    if stacks:
        out += ["", "# They live on the first pipeline stage.", "stacks:"]
    for i, (stack, held) in enumerate(stacks.items()):
        out += [f"  stack{i}:", f'    prefix: "{stack}.{{layer}}."', *_under("    rules:", _rules(held, "      "))]
    return [*out, "", "last:", *_rules(behind, "  ")] if behind else out


def _under(key: str, rules: list[str]) -> list[str]:
    return [key, *rules] if rules else [f"{key} {{}}"]


def _rules(lines: Sequence[FamilyLine], indent: str) -> list[str]:
    out = []
    for line in lines:
        if line.doubt:
            out.append(f"{indent}# {line.doubt}")
        out.append(f"{indent}{_quoted(line.pattern)}: {line.rule}")
    return out


def _full(line: FamilyLine) -> str:
    return f"{line.kind.stack}.{{layer}}.{line.pattern}" if line.kind.stack else line.pattern


def summary(found: Suggestion) -> str:
    """One line for people: how much of it can be believed."""
    near = "no family is near"
    if found.family:
        near = (
            f"the nearest family is {found.family}, which names {found.named} of {count(found.kinds, 'kind')} of tensor"
        )
    return f"{near}; {count(len(found.doubts), 'line')} to decide"
