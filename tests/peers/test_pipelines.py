"""What pipelines make of it: SARIF against its schema, pre-commit itself, GitLab's jobs in gitlab-ci-local."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ckpttool.answers.findings import CHECKPOINT, CheckResult, Finding
from ckpttool.report.findings import sarif
from tests.helpers.command import ckpttool

ROOT = Path(__file__).parents[2]
GITLAB = os.environ.get("CKPTTOOL_GITLAB_CI_LOCAL", "")
PYTHON = r"""#!/usr/bin/env bash
mkdir -p "$3/bin"
cat >"$3/bin/ckpttool" <<'END'
#!/usr/bin/env bash
PYTHONPATH={root} exec {python} -m ckpttool "$@"
END
printf '#!/usr/bin/env bash\n' >"$3/bin/python"
chmod +x "$3/bin/"*
"""


def test_sarif_is_what_its_schema_asks_for() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = [Finding(id_, f"{id_} \u202e <x>", f"a b/{id_}.safetensors [bytes 0..8)", "mend it") for id_ in CHECKPOINT]
    document = json.loads(sarif(CheckResult(Path("m"), "hf", found, {"file": 1})))
    schema = json.loads((ROOT / "fixtures/ci/sarif-2.1.0.json").read_text())
    jsonschema.Draft4Validator(schema).validate(document)
    assert len(document["runs"][0]["results"]) == len(CHECKPOINT)
    document["runs"][0]["results"][0]["level"] = "fatal"
    assert not jsonschema.Draft4Validator(schema).is_valid(document)


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def test_pre_commit_stops_a_commit(tmp_path: Path) -> None:
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit"]
    manifest = ROOT / ".pre-commit-hooks.yaml"
    subprocess.run([*command, "validate-manifest", manifest], check=True)
    (hook,) = yaml.safe_load(manifest.read_text())
    code = "import sys; from ckpttool.cli.pre_commit import main; sys.exit(main())"
    # Installed by pre-commit itself it would take a minute and a package index: everything but that is as it says.
    hook |= {"language": "system", "entry": f"{sys.executable} -c '{code}'"}
    config = {"repos": [{"repo": "local", "hooks": [hook]}]}
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(ROOT / "fixtures/hf_tiny_source", tmp_path / "model")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")

    def run() -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PRE_COMMIT_HOME": str(tmp_path / ".git/cache"), "PYTHONPATH": str(ROOT)}
        return subprocess.run([*command, "run"], cwd=tmp_path, env=env, check=False, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check checkpoints" in done.stdout
    file = tmp_path / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    git(tmp_path, "add", "-A")
    done = run()
    assert done.returncode == 1
    assert "[truncated]" in done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that includes the template. Its python3 makes an environment that has ckpttool: nothing is fetched."""
    if not Path(GITLAB).exists() or shutil.which("rsync") is None:
        pytest.skip("gitlab-ci-local and rsync are not installed")
    shutil.copytree(ROOT / "fixtures/llama_tp8", tmp_path / "model")
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci/gitlab.yml", tmp_path / "ci")
    python = tmp_path / ".bin/python3"
    python.parent.mkdir()
    python.write_text(PYTHON.format(root=ROOT, python=sys.executable))
    python.chmod(0o755)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "remote", "add", "origin", "https://gitlab.example/group/models.git")
    (tmp_path / ".git/info/exclude").write_text(".bin\n.gitlab-ci-local\n")
    return tmp_path


def pipeline(project: Path, **inputs: object) -> subprocess.CompletedProcess[str]:
    include = [{"local": "ci/gitlab.yml", "inputs": {"source": "model", **inputs}}]
    (project / ".gitlab-ci.yml").write_text(yaml.safe_dump({"include": include}))
    git(project, "add", "-A")
    git(project, "commit", "-q", "--allow-empty", "-m", "x")
    env = os.environ | {"PATH": f"{project}/.bin:{os.environ['PATH']}", "HOME": str(project / ".bin")}
    words = [GITLAB, "--force-shell-executor", "--shell-isolation", "--no-color"]
    return subprocess.run(words, cwd=project, env=env, check=False, capture_output=True, text=True)


def test_gitlab_checks_and_converts_once(project: Path) -> None:
    asked = {"reshard": "--tp-out 2 --remove-keys 'lm_head.*'", "values": True, "output": "out/tp2"}
    done = pipeline(project, **asked)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = project / ".gitlab-ci-local/cache/ckpttool-ckpttool/out/tp2"
    assert "lm_head" not in ckpttool("inspect", kept, "--list").out
    assert "out/tp2 is up to date" not in done.stdout
    assert "out/tp2 is up to date" in pipeline(project, **asked).stdout
    assert "out/tp2 is up to date" not in pipeline(project, **asked | {"reshard": "--tp-out 4"}).stdout


def test_gitlab_reports_and_fails(project: Path) -> None:
    with (project / "model/model_tp3.safetensors").open("r+b") as f:
        f.truncate(9000)
    done = pipeline(project, reshard="--tp-out 2")
    assert done.returncode != 0
    reports = project / ".gitlab-ci-local/artifacts/ckpttool"
    entries = json.loads((reports / "gl-code-quality-report.json").read_text())
    assert {e["check_name"] for e in entries} >= {"ckpttool/truncated"}
    assert entries[0]["location"]["path"] == "model/model_tp3.safetensors"
    assert "<failure" in (reports / "ckpttool-junit.xml").read_text()
