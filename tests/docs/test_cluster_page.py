"""docs/cluster.md and all in docs/cluster/: nothing of them can run here, so what they say is held to the code."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ckpttool.cli.app import app
from ckpttool.execute.parts.launchers import LAUNCHERS, is_membership, membership
from scripts import simulate_cluster as simulation
from tests.docs.runner import ROOT, blocks

PAGE = ROOT / "docs" / "cluster.md"
PARTS = ROOT / "docs" / "cluster" / "parts.md"
FILES = ROOT / "docs" / "cluster"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
CALL = re.compile(rf"ckpttool (?P<name>{'|'.join(COMMANDS)}) (?P<rest>.*?)(?= {{2,}}| [#&]|['|)]|$)")


def calls(text: str) -> list[list[str]]:
    """Command lines of ckpttool, as words."""
    return [[m["name"], *shlex.split(m["rest"])] for line in text.splitlines() for m in CALL.finditer(line)]


def shown() -> list[list[str]]:
    """Those that the page and its files show."""
    page = "\n".join("\n".join(b.lines) for b in blocks(PAGE.read_text(encoding="utf-8")))
    job = containers(loaded("indexed-job.yaml")["spec"])[0]["command"]
    texts = (page, loaded("rayjob.yaml")["spec"]["entrypoint"], (FILES / "reshard.sbatch").read_text(encoding="utf-8"))
    return [*(call for text in texts for call in calls(text)), job[1:]]


def loaded(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text(encoding="utf-8"))


def containers(owner: Any) -> list[Any]:
    found: list[Any] = owner["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("words", shown(), ids=" ".join)
def test_every_command_line_is_one(words: list[str]) -> None:
    name, *arguments = words
    parsed = COMMANDS[name].make_context(name, list(arguments)).params
    for said in parsed["shares"] or ():
        assert "$" in said or is_membership(said), said
        if said[0].isdigit():
            assert membership(said, {}).member.of == int(said.split("/")[1])
    assert parsed["on"] or parsed["shares"]


def test_the_page_shows_something() -> None:
    assert len(shown()) >= 12
    files = {p.name for p in FILES.iterdir()}
    assert {Path(link).name for link in re.findall(r"\]\((cluster/[^)#]+)", PAGE.read_text())} == files


def test_every_launcher_is_in_the_table() -> None:
    text = PARTS.read_text(encoding="utf-8")
    for row in LAUNCHERS:
        for variable in (row.rank, row.size, *row.beside):
            short = variable.replace("SLURM_ARRAY_TASK", "")
            known = f"`{variable}`" in text or (row.first and f"`{short}`" in text) or "STEP" in variable
            assert known or variable in ("", "PMIX_NAMESPACE"), variable


def test_the_indexed_job_is_whole() -> None:
    spec = loaded("indexed-job.yaml")["spec"]
    (job,) = containers(spec)
    (part,) = [word.partition("=")[2] for word in job["command"] if word.startswith("--part")]
    assert spec["completionMode"] == "Indexed"
    found = [membership(part, {"JOB_COMPLETION_INDEX": str(i)}).member.number for i in range(spec["completions"])]
    assert found == list(range(1, spec["completions"] + 1))
    assert 1 <= spec["parallelism"] <= spec["completions"]
    assert f"--workers={job['resources']['limits']['cpu']}" in job["command"]


def test_the_ray_job_is_whole() -> None:
    spec = loaded("rayjob.yaml")["spec"]
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert cluster["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-py312" in (FILES / "Dockerfile").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    (worker,), (head,) = containers(workers), containers(cluster["headGroupSpec"])
    assert f"--workers {worker['resources']['limits']['cpu']} ".strip() in spec["entrypoint"]
    # All see the same files under the same path, as the same user.
    assert worker["image"] == head["image"]
    assert worker["volumeMounts"] == head["volumeMounts"]
    of_head, of_worker = (owner["template"]["spec"] for owner in (cluster["headGroupSpec"], workers))
    assert of_head["volumes"] == of_worker["volumes"]
    assert of_head["securityContext"] == of_worker["securityContext"]


def test_the_tables_are_what_the_model_says() -> None:
    page = simulation.PAGE.read_text(encoding="utf-8")
    assert simulation.text() in page
    assert page == simulation.with_tables(page), "run: python -m scripts.simulate_cluster --write"


def test_the_model_agrees_with_arithmetic() -> None:
    """Where nothing but bytes counts, time is bytes by speed."""
    free = replace(simulation.COSTS, share=0, answer=0, edges=0, tls=0)
    link = simulation.Machine("a link", 1e9)
    assert simulation.work(64e9, link, 8, costs=free) == pytest.approx(8)
    assert simulation.work(1e6, link, 8, costs=free) == pytest.approx(1e6 / 8 / 1e9)
    # The slow one does half as much as the others; the last two shares may be its, and they are small.
    slow = simulation.work(64e9, link, 8, simulation.Trouble(slow=0.5), free)
    assert 64 / 7.5 <= slow <= 64 / 7.5 + 1
    # The other seven do what was left, and wait for it to be missed.
    lost = simulation.work(64e9, link, 8, simulation.Trouble(lost_at=4.0, noticed=3.0), free)
    assert (64 - 4) / 7 <= lost <= 4 + 3 + 5


def test_the_model_has_the_design_in_it() -> None:
    """Eight nodes: what the network alone allows, from 700 GB and 2 TB."""
    for model, seconds in ((simulation.V3, (80, 31, 8)), (simulation.KIMI, (227, 89, 23))):
        for machine, least in zip(simulation.MACHINES, seconds, strict=False):
            assert least - 1 <= simulation.work(model.nbytes, machine, 8) <= 1.2 * least + 1
