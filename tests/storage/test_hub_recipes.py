"""Recipes that name models on the Hub give the bytes that paths give, and ask for each file once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpttool.errors import CkptError, UsageError
from ckpttool.execute import workforce
from ckpttool.recipe.model import ModelRef, reference
from tests.helpers.command import ckpttool
from tests.helpers.hub_cache import fill
from tests.helpers.hub_server import Hub, hub_server

MERGEKIT = Path(__file__).parents[2] / "fixtures" / "merge"
RECORD = "ckpttool.merge.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The models of the recipes as org/base, org/ft1, ... What computes is this process: each asks for itself."""
    monkeypatch.chdir(MERGEKIT)
    monkeypatch.setattr(workforce, "spawn", lambda *_: None)
    models = [(f"org/{d.name}", d) for d in (MERGEKIT / "inputs").iterdir()]
    with hub_server(models) as server, server.clients(tmp_path / "home"):
        yield server


def merged(recipe: Path, out: Path) -> dict[str, Any]:
    """The files of a merge; of the record, what does not say where the models are."""
    done = ckpttool("merge", recipe, "-o", out)
    assert done.code == 0, done.err
    files: dict[str, Any] = {p.name: p.read_bytes() for p in out.iterdir()}
    record = json.loads(files.pop(RECORD))
    return files | {RECORD: [(s["hash"], s["files"], [a["hash"] for a in s["adapters"]]) for s in record["sources"]]}


def named(recipe: str, tmp_path: Path, prefix: str = "org/") -> Path:
    """The recipe with other names."""
    text = (MERGEKIT / "configs" / f"{recipe}.yml").read_text(encoding="utf-8")
    path = tmp_path / "recipe.yml"
    path.write_text(text.replace("./inputs/", prefix), encoding="utf-8")
    return path


def check_requests(hub: Hub) -> None:
    """Each repository and each file is asked for once."""
    asked = Counter(a.path for a in hub.asked if a.server == "hub")
    assert set(asked.values()) == {1}
    assert any("/resolve/" in path for path in asked)


@pytest.mark.thorough  # test_bytes_are_those_of_paths counts the same in one process
def test_processes_that_compute_know_what_was_asked(hub: Hub, tmp_path: Path) -> None:
    recipe = named("slerp__f32out_bf16", tmp_path)
    words = ["-m", "ckpttool", "merge", recipe, "-o", tmp_path / "out", "--workers", "2"]
    subprocess.run([sys.executable, *map(str, words)], check=True)
    check_requests(hub)


@pytest.mark.sample("lora_ta__f32out_bf16", "slerp__f32out_bf16", "passthrough_franken__bf16", "tok_union")
@pytest.mark.parametrize("name", sorted(p.stem for p in (MERGEKIT / "configs").iterdir()))
def test_bytes_are_those_of_paths(name: str, hub: Hub, tmp_path: Path) -> None:
    recipe = named(name, tmp_path)
    found = merged(recipe, tmp_path / "there")
    assert found == merged(MERGEKIT / "configs" / f"{name}.yml", tmp_path / "here")
    check_requests(hub)
    assert not list((tmp_path / "home").rglob("*.incomplete"))


def test_one_merge_from_everywhere(hub: Hub, tmp_path: Path) -> None:
    """Here, by a revision, by a commit, and an adapter on the Hub on a model here."""
    text = (MERGEKIT / "configs" / "lora_ta__f32out_bf16.yml").read_text(encoding="utf-8")
    commit = hub.repos["org/ft2"].refs["refs/heads/main"]
    hub.add("org/ft2", {"config.json": b"{}"})
    text = text.replace("./inputs/base+./inputs/lora1", "./inputs/base+org/lora1@main")
    text = text.replace("./inputs/ft2", f"org/ft2@{commit}")
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(text, encoding="utf-8")
    assert merged(recipe, tmp_path / "there") == merged(
        MERGEKIT / "configs" / "lora_ta__f32out_bf16.yml", tmp_path / "here"
    )
    record = json.loads((tmp_path / "there" / RECORD).read_bytes())
    assert f"hf://org/ft2@{commit}" in [s["path"] for s in record["sources"]]
    assert not any("/org/base" in a.path for a in hub.asked)


def test_the_cache_is_enough(hub: Hub, tmp_path: Path) -> None:
    recipe = named("slerp__f32out_bf16", tmp_path)
    for name in ("base", "ft1", "ft2"):
        fill(hub, tmp_path / "home", f"org/{name}")
    with hub.clients(tmp_path / "home", HF_HUB_OFFLINE="1"):
        found = merged(recipe, tmp_path / "there")
    assert not hub.asked
    assert found == merged(MERGEKIT / "configs" / "slerp__f32out_bf16.yml", tmp_path / "here")


def test_a_path_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "base").symlink_to(MERGEKIT / "inputs" / "base")
    monkeypatch.chdir(tmp_path)
    assert reference("org/base") == ModelRef("org/base")
    with pytest.raises(CkptError, match="folders have none"):
        reference("org/base@main")
    with pytest.raises(UsageError, match="there is no `org/ft1` here") as error:
        reference("org/ft1", hub=False)
    assert "hf://org/ft1" in (error.value.hint or "")
    assert not hub.asked
    commit = hub.repos["org/lora1"].refs["refs/heads/main"]
    assert reference("org/base+org/lora1") == ModelRef("org/base", (f"hf://org/lora1@{commit}",))
    assert reference("hf://org/lora1+org/base") == ModelRef(f"hf://org/lora1@{commit}", ("org/base",))


def test_names_that_are_nowhere(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/private", {"config.json": b"{}"}, private=True)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "merge_method: linear\nparameters: {weight: 1}\nmodels:\n"
        "- model: org/base@v7\n- model: org/private\n- model: org/nowhere+org/lora1\n- model: hf://org/ft1/sub\n",
        encoding="utf-8",
    )
    done = ckpttool("merge", recipe, "-o", tmp_path / "out")
    assert done.code in (1, 2)
    for line, what in [
        (4, "there is no `org/base@v7` here, and org/base has no revision 'v7'"),
        (5, "there is no `org/private` here, and the Hub has no model org/private, or it is private"),
        (6, "there is no `org/nowhere` here, and the Hub has no model org/nowhere"),
        (7, "there is no `hf://org/ft1/sub`"),
    ]:
        assert f"recipe.yml:{line}:" in done.err
        assert what in done.err.replace("\n      ", " "), done.err


@pytest.mark.usefixtures("hub")
def test_the_card_names_models_of_the_hub(tmp_path: Path) -> None:
    """And the report reads them where they are."""
    recipe = named("slerp__f32out_bf16", tmp_path)
    words = ("--card", "--report", tmp_path / "r.html", "--json")
    done = ckpttool("merge", recipe, "-o", tmp_path / "out", *words)
    assert done.code == 0, done.err
    text = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    matter = yaml.safe_load(text.split("---\n")[1])
    assert sorted(matter["base_model"]) == ["org/ft1", "org/ft2"]
    assert matter["base_model_relation"] == "merge"
    assert "(https://huggingface.co/org/ft1)" in text
    near = named("slerp__f32out_bf16", tmp_path, "inputs/")
    again = ckpttool("merge", near, "-o", tmp_path / "near", "--report", tmp_path / "n.html", "--json")
    there, here = ([{**p, "source": ""} for p in json.loads(d.out)["report"]["parents"]] for d in (done, again))
    assert there == here
