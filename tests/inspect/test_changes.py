"""A source that changes while it is looked at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.ops.inspect.views.base import InspectedSource
from ckpttool.ops.inspect.views.registry import VIEWS
from tests.helpers.command import ckpttool

FIXTURE = Path(__file__).parents[2] / "fixtures/merge/inputs/ft1"
FILE = "model-00002-of-00003.safetensors"


def replaced(model: Path) -> None:
    """As ``--force`` of another run does it."""
    shutil.copytree(model, model.with_name("new"))
    model.rename(model.with_name("old"))
    model.with_name("new").rename(model)


def written(model: Path) -> None:
    with (model / FILE).open("ab") as f:
        f.write(b"more")


def changes(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let something happen after a view has looked, and before its answer is believed."""
    for view in VIEWS:

        def changing(self: Any, at: InspectedSource, look: Callable[[Any, InspectedSource], Any] = view.look) -> Any:
            found = look(self, at)
            change()
            return found

        monkeypatch.setattr(view, "look", changing)


@pytest.mark.parametrize(
    ("question", "change"),
    [
        ([], replaced),
        (["--list"], written),
        (["--hash"], written),
        (["--check"], replaced),
        (["--diff", FIXTURE], written),
    ],
)
def test_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: list[object], change: Callable[[Path], None]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(FIXTURE, model)
    changes(monkeypatch, lambda: change(model))
    done = ckpttool("inspect", model, *question)
    assert (done.code, done.out) == (1, "")
    assert "error: a source has changed while it was read" in done.err


def test_what_lies_beside_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a training run, say."""
    model = tmp_path / "model"
    shutil.copytree(FIXTURE, model)

    def logging() -> None:
        (model / "train.log").write_text("step 1")
        os.utime(model / "config.json")

    changes(monkeypatch, logging)
    assert ckpttool("inspect", model).code == 0
