"""Every architecture that has a family: its config.json finds it, and each of its tensors has a rule."""

from __future__ import annotations

import pytest

from ckpttool.layout.family import find_family, load_family
from tests.helpers.stored_names import Stored, pack, read, unpack

ALL = list(read())


@pytest.mark.sample("gemma3-Gemma3ForConditionalGeneration", "t5-T5ForConditionalGeneration", "qwen3-Qwen3Model")
@pytest.mark.parametrize("stored", ALL, ids=[s.label for s in ALL])
def test_each_tensor_has_a_rule(stored: Stored) -> None:
    assert find_family(stored.config) == stored.family
    family = load_family(stored.family, stored.config)
    without = []
    for naming in ("", *family.spec.hf_namings):
        place_of = family.placer(family.statements(naming) if naming else ())
        without.append([n for n in stored.names if place_of(n) is None])
    assert [] in without, min(without, key=len)[:3]


def test_names_are_packed_and_unpacked() -> None:
    names = ["a.0.b.weight", "a.0.b.weight.1", "a.0.c", "b", "lm_head"]
    assert pack(names) == "0:a.0.b.weight 4:1 2:c 0:b 0:lm_head"
    assert unpack(pack(names)) == names
