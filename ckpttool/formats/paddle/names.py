"""Structured names (``fc1.weight``) of parameters that a program calls ``linear_0.w_0``.

Two files have them, and neither lies beside a program of paddle 3: a saved ``net.state_dict()``, in its table
``StructuredToParameterName@@``, and the ``.pdiparams.info`` of a legacy export. The names of parameters count the
layers of a process, so those of one run say nothing about another; and what is in no state dict (buffers that do not
persist, tensors that forward makes) has none. Source: paddle 3.3.1 (framework/io.py, jit/api.py), measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpttool.containers.paddle_pickle import STRUCTURED, read_paddle, read_pickle
from ckpttool.containers.pickle import PickledArray
from ckpttool.core.files import Place
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.paddle.program_parts import ProgramProblem, ProgramTensor
from ckpttool.storage.place import open_file


@dataclass(slots=True)
class StructuredNames:
    """The structured names in one file."""

    path: Place
    of: dict[str, list[str]] = field(default_factory=dict)
    """Structured names of a parameter; several when layers share it, in the order of the file."""
    tensors: dict[str, ProgramTensor] = field(default_factory=dict)
    """Tensors by structured name, where the file holds the tensors too."""


def match_names(
    parameters: Sequence[ProgramTensor], said: StructuredNames
) -> tuple[dict[str, str], list[ProgramProblem]]:
    """The structured name of each parameter that has one (the first of several), and what is wrong with them."""
    out = {p.name: said.of[p.name][0] for p in parameters if p.name in said.of}
    if not out and parameters:
        known = next(iter(said.of))
        text = f"{said.path.name} names none of the program's parameters: it has `{known}`, the program"
        return {}, [ProgramProblem("names-none", f"{text} `{parameters[0].name}`")]
    problems = []
    if unnamed := [p.name for p in parameters if p.name not in out]:
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        problems.append(ProgramProblem("names-missing", f"without a structured name: `{unnamed[0]}`{more}"))
    owner: dict[str, str] = {}
    for p in parameters:
        name = out.get(p.name, p.name)
        if name in owner:
            text = f"`{name}` would be the name of two parameters, `{owner[name]}` and `{p.name}`"
            problems.append(ProgramProblem("names-twice", text))
        owner[name] = p.name
        for s in said.of.get(p.name, ()):
            t = said.tensors.get(s)
            if t is not None and (t.shape != p.shape or t.dtype not in ("", p.dtype)):
                text = f"`{s}` is {t.dtype} {list(t.shape)} in {said.path.name}, and `{p.name}` is {p.dtype}"
                problems.append(ProgramProblem("names-shape", f"{text} {list(p.shape)} in the program"))
    return out, problems


def read_names(path: Place) -> StructuredNames:
    """Raises what reading a pickle raises, and UnsupportedError for a file without such names."""
    try:
        with open_file(path):
            pass
    except FileNotFoundError:
        raise IncompleteError("the file of names does not exist", where=str(path)) from None
    except OSError as e:
        raise CorruptError(f"the file of names cannot be read: {e.strerror}", where=str(path)) from None
    names = StructuredNames(path)
    if path.name.endswith(".info"):
        value = read_pickle(path)
        if isinstance(value, dict):
            for parameter, about in value.items():
                said = about.get("structured_name") if isinstance(about, dict) else None
                if isinstance(parameter, str) and isinstance(said, str):
                    names.of.setdefault(parameter, []).append(said)
        if not names.of:
            raise UnsupportedError("the file has no structured names", where=str(path), hint="give a .pdiparams.info")
        return names
    found = read_paddle(path)
    for structured, parameter in found.structured.items():
        names.of.setdefault(parameter, []).append(structured)
        a: PickledArray | None = found.tensors.get(structured)
        if a is not None:
            names.tensors[structured] = ProgramTensor(structured, _dtype(a.dtype), a.shape)
    if not names.of:
        raise UnsupportedError(
            f"the file has no table `{STRUCTURED}`, which says what parameters are called in a program",
            where=str(path),
            hint="give what paddle.save(net.state_dict(), PATH) wrote in the run that exported the program",
        )
    return names


def _dtype(stored: str) -> str:
    """A pickle holds bfloat16 as uint16, and FP8 as int8: only the size is known then."""
    return {"U16": "BF16", "I8": ""}.get(stored, stored)
