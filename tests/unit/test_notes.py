"""Notes have a kind where code decides by them; what users see is the text."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.core.notes import Note, is_kind
from ckpttool.execute import run
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target

ZCC = Path(__file__).parents[2] / "fixtures/paddle_zcc/ep2_tp2_sharding2_ema"


def test_a_note_is_its_text() -> None:
    note = Note("lacking", "`a` is required")
    assert note == "`a` is required"
    assert json.dumps([note]) == '["`a` is required"]'
    for again in (note, copy.deepcopy(note), pickle.loads(pickle.dumps(note))):  # noqa: S301
        assert is_kind(again, "lacking")
        assert not is_kind(again, "removed")
    assert not is_kind("`a` is required", "lacking")


@pytest.mark.parametrize("form", ["hybrid", "flex"])
def test_averages_as_the_model_come_without_a_note_on_rounded_masters(tmp_path: Path, form: str) -> None:
    """However the format words it: what is written are the averages."""
    source = ZCC
    if form == "flex":
        source = tmp_path / "flex"
        run(prepare(ZCC, OpenOptions(), Target(format="flex")).plan, source)
        shutil.rmtree(source / "model_state")
    derived = [n for n in open_checkpoint(source, OpenOptions()).notes if is_kind(n, "derived weights")]
    assert len(derived) == 1
    notes = prepare(source, OpenOptions(), Target(format="hf", tp=1, ep=1, ema=True)).notes
    assert derived[0] not in notes
    notes = prepare(source, OpenOptions(), Target(format="hf", tp=1, ep=1)).notes
    assert derived[0] in notes
