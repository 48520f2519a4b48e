"""The tables of docs/merge/ say what the methods are: formulas, parameters, bases, passes.

`python -m tests.docs.test_merge_table` prints the one that follows from the code alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import MergeTensor, Method, Parameter
from ckpttool.kernels.merge.draws import CounterDraws
from tests.docs.runner import ROOT
from tests.merge.driver import ArrayChunk

ENTRY = ROOT / "docs" / "merge.md"
PAGES = {"methods": "methods.md", "passes": "mergekit.md"}
"""The page of each table, in docs/merge/."""
SHAPE = (64, 64)
GIVEN = {"weight": 0.5, "density": 0.5, "epsilon": 0.1, "t": 0.5, "decay": 0.5}
"""Values that make every method do all of its work; other parameters have their defaults."""


def code(text: str) -> str:
    """A code span that may stand in a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def value(parameter: Parameter) -> str:
    """The default, as recipes write it; nothing where there is none."""
    if parameter.default is None:
        return ""
    return f" {str(parameter.default).lower() if parameter.kind == 'bool' else f'{parameter.default:g}'}"


def parameters(schema: Mapping[str, Parameter]) -> str:
    return ", ".join(f"`{name}`{value(p)}" for name, p in schema.items())


def models(method: Method) -> str:
    least, most = method.models
    return str(least) if least == most else f"{least} or more" if most is None else f"{least} to {most}"


def methods_table() -> list[str]:
    """A row for each method."""
    rows = ["| method | value | base | models | for each model | for the whole merge |", f"|{' --- |' * 6}"]
    for m in METHODS.values():
        name = f"[`{m.name}`]({m.paper})" if m.paper else f"`{m.name}`"
        cells = (name, code(m.formula), m.base, models(m), parameters(m.per_model), parameters(m.whole))
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return rows


def passes(method: Method) -> int:
    """How often a method looks at a tensor that is small enough not to be sampled, the last pass included."""
    count = max(method.models[0], min(2, method.models[1] or 2))
    rng = np.random.default_rng(0)
    base, *arrays = (rng.standard_normal(prod(SHAPE)).astype(np.float32) for _ in range(count + 1))

    def complete(schema: Mapping[str, Parameter]) -> dict[str, float | int | bool | None]:
        return {name: GIVEN.get(name, p.default) for name, p in schema.items()}

    tensor = MergeTensor(
        "w",
        SHAPE,
        (complete(method.per_model),) * count,
        complete(method.whole),
        method.base != "refused",
        CounterDraws(0, "w"),
    )
    chunk = ArrayChunk(0, tensor.size, base if tensor.has_base else None, arrays)
    program = method.program(tensor)
    seen = 1
    while True:
        try:
            see = next(program)
        except StopIteration:
            return seen
        see(chunk)
        seen += 1


def table(name: str) -> list[str]:
    """The lines of a table, which stands between two comments of its page."""
    text = (ROOT / "docs" / "merge" / PAGES[name]).read_text(encoding="utf-8")
    return text.split(f"<!-- begin {name} -->\n")[1].split(f"<!-- end {name} -->")[0].strip().splitlines()


def test_methods() -> None:
    assert table("methods") == methods_table(), "run: python -m tests.docs.test_merge_table"


def test_their_number() -> None:
    assert f"\n- There are {len(METHODS)} methods:" in ENTRY.read_text(encoding="utf-8")


def test_every_method_has_its_passes() -> None:
    shown = [re.match(r"\| `(\w+)` \| (\d+)\b", row) for row in table("passes")[2:]]
    found = {m[1]: int(m[2]) for m in shown if m}
    assert list(found) == list(METHODS)
    assert found == {name: passes(m) for name, m in METHODS.items()}


def test_rows_have_equally_many_cells() -> None:
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in methods_table()}) == 1


if __name__ == "__main__":
    print("\n".join(methods_table()))  # noqa: T201
