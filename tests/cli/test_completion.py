"""Completion in shells, through the protocol that their scripts speak: environment variables in, words out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.main import get_command

from ckpttool.cli import choices
from ckpttool.cli.app import app
from tests.helpers.command import ckpttool

STARTS = """
import sys
sys.argv = ["ckpttool"]
from ckpttool.cli.app import main
try:
    main()
finally:
    checkpoints = {"ckpttool.core.files", "ckpttool.answers.findings", "ckpttool.formats"}
    heavy = sorted(({"numpy", "torch", "yaml", "ml_dtypes"} | checkpoints) & set(sys.modules))
    assert not heavy, heavy
"""


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def asked(words: str, shell: str = "bash", **more: str) -> dict[str, str]:
    """What a shell sets for a command line that ends at the cursor."""
    line = f"ckpttool {words}"
    return {
        "_CKPTTOOL_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        **more,
    }


def completed(words: str, shell: str = "bash", **more: str) -> str:
    """What a shell gets for it."""
    with patch.dict(os.environ, asked(words, shell, **more)):
        return ckpttool().out


def test_completion_imports_nothing_heavy() -> None:
    environment = os.environ | asked("reshard --to h")
    done = subprocess.run(
        [sys.executable, "-c", STARTS], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.split() == ["hf", "hybrid"]


def test_every_shell_completes() -> None:
    assert completed("reshard --to h").split() == ["hf", "hybrid"]
    assert '"--tp-out":"Tensor-parallel ranks of DST."' in completed("reshard --tp-", "zsh")
    fish = completed("merge --method dare", "fish", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert fish.split() == ["dare_linear", "dare_ties"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell(shell: str) -> None:
    """What --show-completion prints and --install-completion installs."""
    with patch.dict(os.environ, {"_CKPTTOOL_COMPLETE": f"source_{shell}"}):
        done = ckpttool()
    assert done.code == 0
    assert f"_CKPTTOOL_COMPLETE=complete_{shell}" in done.out


def test_install_for_bash(tmp_path: Path) -> None:
    """In the home of the user, found from the shell that runs the command."""
    code = "import sys; sys.argv = ['ckpttool', '--install-completion']; from ckpttool.cli.app import main; main()"
    environment = {**os.environ, "HOME": str(tmp_path), "CODE": code, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", '"$PYTHON" -c "$CODE"; exit $?'], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bash completion installed" in done.stdout
    assert "bash_completions/ckpttool.sh" in (tmp_path / ".bashrc").read_text()


OFFERED: dict[tuple[str, str], tuple[str, ...]] = {
    **{
        (c, "--from"): (*choices.FORMATS, *choices.READ_ONLY)
        for c in ("reshard", "merge", "inspect", "quantize", "size")
    },
    **{(c, "--to"): choices.FORMATS for c in ("reshard", "merge")},
    ("quantize", "--to"): choices.PRECISIONS,
    ("reshard", "--target"): choices.TARGETS,
    ("reshard", "--only"): choices.COMPONENTS,
    ("inspect", "--only"): choices.COMPONENTS,
    ("reshard", "--dtype"): choices.CASTS,
    ("inspect", "--dtype"): choices.DTYPES,
    ("inspect", "--findings"): choices.FINDINGS,
    ("reshard", "--requant"): choices.RECIPES,
    ("quantize", "--recipe"): choices.RECIPES,
    ("size", "--recipe"): choices.SIZED,
    ("quantize", "--quant-method"): choices.QUANT_METHODS,
    ("quantize", "--keep-preset"): choices.PRESETS,
    ("size", "--kv"): choices.CACHES,
    ("size", "--by"): choices.GROUPINGS,
    ("merge", "--method"): choices.METHODS,
    ("reshard", "--on"): choices.ENGINES,
    ("reshard", "--part"): ("auto",),
    ("merge", "--vocab"): ("min", "max", "base"),
    ("inspect", "--sort"): choices.ORDERS,
}


@pytest.mark.parametrize(("command", "option"), OFFERED)
def test_what_is_offered(command: str, option: str) -> None:
    found = COMMANDS[command]
    parameter = next(p for p in found.params if option in p.opts)
    context = found.make_context(command, [], resilient_parsing=True)
    assert [item.value for item in parameter.shell_complete(context, "")] == list(OFFERED[command, option])


def test_families_are_those_that_are_built_in() -> None:
    from ckpttool.layout.family import family_names

    assert choices.families("") == family_names()
    assert choices.families("qwen2_m") == ["qwen2_moe"]
    assert choices.families("transformers/afm") == ["transformers/afmoe"]


def test_choices_are_those_of_the_code() -> None:
    from ckpttool.core.catalog import COMPONENTS
    from ckpttool.core.dtypes import CASTABLE, DTYPES
    from ckpttool.execute import fleets
    from ckpttool.formats.registry import READERS, WRITERS
    from ckpttool.kernels.merge import METHODS
    from ckpttool.ops.size import cache, stored
    from ckpttool.ops.size.answer import BY
    from ckpttool.ops.size.devices import GPUS
    from ckpttool.quant import keep, scheme
    from ckpttool.report.size import UNITS
    from ckpttool.targeting.recode import HIGH

    assert tuple(WRITERS) == choices.FORMATS
    assert {*choices.FORMATS, *choices.READ_ONLY} == set(READERS)
    assert set(choices.TARGETS) == {
        t for w in WRITERS.values() for t in (*w.capabilities.targets, *w.capabilities.namings)
    }
    assert choices.COMPONENTS == COMPONENTS
    assert {c.upper() for c in choices.CASTS} == CASTABLE
    assert {c.upper() for c in choices.PRECISIONS} == set(HIGH)
    assert {d.upper() for d in choices.DTYPES} == set(DTYPES)
    assert tuple(METHODS) == choices.METHODS
    assert tuple(fleets.ENGINES) == choices.ENGINES
    assert choices.RECIPES == scheme.RECIPES
    assert choices.SIZED == stored.CHOICES
    assert set(choices.QUANT_METHODS) == {m for some in scheme.METHODS.values() for m in some}
    assert choices.EDGES == scheme.EDGES
    assert set(choices.PRESETS) == set(keep.PRESETS)
    assert choices.CACHES == cache.KINDS
    assert tuple(GPUS) == choices.GPUS
    assert choices.GROUPINGS == BY
    assert set(choices.UNITS) == set(UNITS)
