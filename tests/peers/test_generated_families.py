"""The families as transformers cuts are those that scripts/make_families.py makes, and it refuses what is not right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.layout.files import FAMILIES
from ckpttool.layout.rules import CutSize
from scripts.family_rules import TOLERANCE, Cut, Prover, Reading, Refused, cut_of, groups_of, prove, read
from scripts.family_tensors import condition, expression
from scripts.make_families import check_owners, chosen, make, written
from tests.peers.families.tiny import find

GENERATED = FAMILIES / "transformers"


@pytest.mark.parametrize("model_type", ["flint", "granitemoe", "deepseek_v3"])
def test_a_family_made_again_is_the_same(model_type: str, tmp_path: Path) -> None:
    made, _ = make(chosen([model_type])[0][0], tmp_path)
    assert made.read_text(encoding="utf-8") == (GENERATED / f"{model_type}.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llama() -> Reading:
    return read(find("llama")[0])


def test_a_file_that_does_not_cut_as_the_plan_is_refused(llama: Reading, tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text(written(llama), encoding="utf-8")
    check_owners(llama, file)
    file.write_text(written(llama).replace("mlp.down_proj.*: row", "mlp.down_proj.*: replicate"), encoding="utf-8")
    with pytest.raises(
        Refused, match=r"2 tensors are not cut as by the plan: model\.layers\.0\.mlp\.down_proj\.weight"
    ):
        check_owners(llama, file)


def test_heads_can_be_exchanged_and_torn_heads_cannot(llama: Reading) -> None:
    prover = Prover(llama.architecture)
    attention = next(g for g in groups_of(llama.kinds) if g[0].pattern.startswith("self_attn"))
    sizes = {"heads": CutSize(8), "kv_heads": CutSize(2, shared=True)}
    prove(prover, attention, sizes)
    # Twice as many shares as heads: every one is half a head
    torn = {"heads": CutSize(16), "kv_heads": CutSize(4, shared=True)}
    assert prover.exchanged(attention, torn, 16, 0, 1, alike=True) > 100 * TOLERANCE
    with pytest.raises(Refused, match="exchanged change the logits"):
        prove(prover, attention, torn)
    assert prover.exchanged(attention[:1], sizes, 2, 0, 1) > 100 * TOLERANCE  # queries without their keys


def test_cuts_are_read_off_the_holders_of_elements() -> None:
    def of(*masks: int) -> Cut:
        return cut_of(np.array(masks), 2)

    assert of(3, 3, 3) == Cut()
    assert of(1, 1, 2, 2) == Cut(-1, ("cut",))
    assert of(1, 2, 1, 1, 2, 2, 3) == Cut(-1, ("cut", "cut", "whole"), (2, 4, 1))
    for masks in ((1, 1), (2, 1), (1, 2, 2, 1)):
        with pytest.raises(Refused):
            of(*masks)


def test_expressions_and_conditions_are_the_smallest_that_fit() -> None:
    words = {"heads": (4, 8, 6, 12), "kv_heads": (2, 2, 3, 1), "head_dim": (5, 16, 7, 9), "hidden": (20, 64, 11, 13)}
    heads, kv_heads, width, hidden = (np.array(v) for v in words.values())
    assert expression(tuple(hidden), words) == "hidden"
    assert expression(tuple(heads * width), words) in ("heads * head_dim", "head_dim * heads")
    fused = expression(tuple((heads + 2 * kv_heads) * width), words)
    assert fused is not None
    assert [eval(fused, {}, {n: v[i] for n, v in words.items()}) for i in range(4)] == [40, 192, 84, 126]  # noqa: S307 - made of the words above
    assert expression((1, 5, 1, 977), words) is None
    known = {"a": [True, True, False], "b": [True, False, True], "not a": [False, False, True]}
    assert condition([True, True, True], known) == ""
    assert condition([False, False, True], known) == "not a"
    assert condition([True, False, False], known) == "a and b"
    assert condition([False, False, False], {}) is None
