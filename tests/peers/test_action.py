"""action.yml, run step by step as a job of GitHub runs it."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.inspect.models import flip, place
from tests.peers.actions import Runner

ROOT = Path(__file__).parents[2]
TP8 = ROOT / "fixtures/llama_tp8"

PYTHON = r"""#!/usr/bin/env bash
if [ "$2" != venv ]; then exec {python} "$@"; fi
mkdir -p "$3/bin"
cat >"$3/bin/ckpttool" <<'END'
#!/usr/bin/env bash
PYTHONPATH={root} exec {python} -m ckpttool "$@"
END
cat >"$3/bin/python" <<'END'
#!/usr/bin/env bash
if [ "$1 $2" = "-m pip" ]; then echo "$@" >>"$RUNNER_TEMP/pip"; exit; fi
exec {python} "$@"
END
chmod +x "$3/bin/"*
"""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A checkout with a checkpoint. Its Python makes an environment that has ckpttool already: nothing is fetched."""
    workspace, temp = tmp_path / "workspace", tmp_path / "temp"
    workspace.mkdir()
    temp.mkdir()
    shutil.copytree(TP8, workspace / "model")
    python = tmp_path / "python"
    python.write_text(PYTHON.format(root=ROOT, python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return Runner(ROOT / "action.yml", workspace, temp)


def inputs(runner: Runner, **more: str) -> dict[str, str]:
    return {"source": "model", "python": str(runner.workspace.parent / "python"), **more}


def test_a_sound_checkpoint_is_converted_once(runner: Runner) -> None:
    asked = inputs(runner, reshard="--tp-out 2 --verify --remove-keys 'lm_head.*'", output="out/tp2")
    first = runner.run(asked)
    assert first.failed == "", first.log
    assert first.outputs["findings"] == "0"
    assert "verified: every element" in first.log
    assert "0 errors" in first.summary
    made = {p.name: p.read_bytes() for p in (runner.workspace / "out/tp2").iterdir()}
    listed = ckpttool("inspect", runner.workspace / "out/tp2", "--list").out
    assert "lm_head" not in listed

    shutil.rmtree(runner.workspace / "out/tp2")
    second = runner.run(asked)
    assert second.outputs["cached"] == "true"
    assert "Convert" not in second.ran
    assert {p.name: p.read_bytes() for p in (runner.workspace / "out/tp2").iterdir()} == made

    shutil.rmtree(runner.workspace / "out/tp2")
    other = runner.run(asked | {"reshard": "--tp-out 4"})
    assert "Convert" in other.ran
    assert (runner.temp / "pip").read_text().splitlines()[0].endswith(f"--disable-pip-version-check {ROOT}")


def test_findings_are_annotated_and_fail_the_job(runner: Runner) -> None:
    with (runner.workspace / "model/model_tp3.safetensors").open("r+b") as f:
        f.truncate(9000)
    job = runner.run(inputs(runner, sarif="out.sarif", junit="out.xml", reshard="--tp-out 2"))
    assert job.failed == "Check the checkpoint"
    assert "::error file=model/model_tp3.safetensors,title=ckpttool truncated::" in job.log
    assert "truncated" in job.summary
    assert (runner.workspace / "out.sarif").exists()
    assert (runner.workspace / "out.xml").exists()
    assert not (runner.workspace / "converted").exists()


@pytest.mark.parametrize(
    ("change", "headers_only", "equal"),
    [("", "false", "true"), ("value", "false", "false"), ("value", "true", ""), ("tensor", "true", "false")],
)
def test_two_checkpoints_are_compared(runner: Runner, change: str, headers_only: str, equal: str) -> None:
    """Equal is what was read; models whose headers agree are neither equal nor different."""
    other = runner.workspace / "other"
    removed = ["--remove-keys", "lm_head.*"] if change == "tensor" else []
    assert ckpttool("reshard", TP8, other, "--tp-out", 2, *removed).code == 0
    if change == "value":
        file = min(other.glob("*.safetensors"))
        flip(file, place(file, "model.layers.0.self_attn.q_proj.weight")[0])
    job = runner.run({**inputs(runner, diff="other", check="false"), "headers-only": headers_only})
    assert equal == "false" or job.outputs["equal"] == equal, job.log
    assert job.failed == ("Compare with the other checkpoint" if equal == "false" else ""), job.log
    assert ("::error title=ckpttool diff::" in job.log) is (equal == "false")


def test_texts_of_a_pull_request_are_no_commands(runner: Runner) -> None:
    """They reach the tool as one word each."""
    evil = "model; touch evil $(touch evil) `touch evil`"
    job = runner.run(inputs(runner, source=evil))
    assert job.failed == "Check the checkpoint"
    assert "touch evil" in job.log
    job = runner.run(inputs(runner, check="false", reshard="--tp-out 2 '$(touch evil)' ; touch evil"))
    assert job.failed == "Convert"
    assert not (runner.workspace / "evil").exists()
