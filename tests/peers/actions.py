"""A runner for composite actions of GitHub: as much of it as action.yml uses, and an error for anything else.

What it does with a step is what GitHub documents: expressions are replaced in ``if``, ``env``, ``with`` and ``run``,
the script runs under bash with the variables of a job, and what it appends to $GITHUB_OUTPUT are its outputs.
``actions/cache/restore`` and ``save`` keep directories by their keys.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@dataclass
class Job:
    """One run of the action."""

    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""
    summary: str = ""
    failed: str = ""
    """Name of the step that failed."""
    ran: list[str] = field(default_factory=list)
    """Names of the steps that were not skipped."""


@dataclass
class Runner:
    """A repository's checkout, and the caches of its earlier jobs."""

    action: Path
    workspace: Path
    temp: Path
    caches: dict[str, Path] = field(default_factory=dict)

    def run(self, inputs: dict[str, str]) -> Job:
        """Run all steps, or those up to the one that fails."""
        spec = yaml.safe_load(self.action.read_text(encoding="utf-8"))
        unknown = set(inputs) - set(spec["inputs"])
        assert not unknown, f"no such input: {unknown}"
        given = {name: str(inputs.get(name, said.get("default", ""))) for name, said in spec["inputs"].items()}
        known = {f"inputs.{name}": value for name, value in given.items()}
        job = Job()
        for step in spec["runs"]["steps"]:
            if "if" in step and not _holds(step["if"], known):
                continue
            job.ran.append(step["name"])
            done = self._script(step, known, job) if "run" in step else self._cache(step, known)
            if done is None:
                job.failed = step["name"]
                break
            known |= {f"steps.{step['id']}.outputs.{name}": value for name, value in done.items() if "id" in step}
        job.outputs = {name: _filled(said["value"], known) for name, said in spec.get("outputs", {}).items()}
        return job

    def _script(self, step: dict[str, Any], known: dict[str, str], job: Job) -> dict[str, str] | None:
        assert step["shell"] == "bash"
        assert not _EXPRESSION.search(step["run"]), "inputs in the text of a script are executed by it"
        output, summary = self.temp / "output", self.temp / "summary"
        output.write_text("")
        summary.write_text("")
        variables = {
            **os.environ,
            "GITHUB_ACTION_PATH": str(self.action.parent),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(self.temp),
            **{name: _filled(text, known) for name, text in step.get("env", {}).items()},
        }
        run = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(run, cwd=self.workspace, env=variables, check=False, capture_output=True, text=True)
        job.log += done.stdout + done.stderr
        job.summary += summary.read_text()
        lines = [line.partition("=") for line in output.read_text().splitlines()]
        found = {name: value for name, _, value in lines}
        if done.returncode:
            job.outputs |= found
            return None
        return found

    def _cache(self, step: dict[str, Any], known: dict[str, str]) -> dict[str, str]:
        given = {name: _filled(text, known) for name, text in step["with"].items()}
        place = self.workspace / given["path"]
        kind = re.fullmatch(r"actions/cache/(restore|save)@v\d+", step["uses"])
        assert kind, f"the runner does not know {step['uses']}"
        assert given["key"], "an empty key"
        if kind[1] == "save":
            kept = self.temp / "caches" / given["key"]
            shutil.copytree(place, kept)
            self.caches[given["key"]] = kept
            return {}
        if given["key"] not in self.caches:
            return {"cache-hit": ""}
        shutil.copytree(self.caches[given["key"]], place)
        return {"cache-hit": "true"}


def _filled(text: str, known: dict[str, str]) -> str:
    """With the value of each expression; one that is not known is empty, as at GitHub."""
    assert all(m in known or m.startswith("steps.") for m in _EXPRESSION.findall(text)), text
    return _EXPRESSION.sub(lambda m: known.get(m[1], ""), text)


def _holds(text: str, known: dict[str, str]) -> bool:
    """A condition: comparisons with texts, joined by &&."""
    inside = _EXPRESSION.fullmatch(text.strip())
    assert inside, text
    for part in inside[1].split("&&"):
        m = re.fullmatch(r"\s*(\S+)\s*(==|!=)\s*'([^']*)'\s*", part)
        assert m, part
        if (known.get(m[1], "") == m[3]) != (m[2] == "=="):
            return False
    return True
