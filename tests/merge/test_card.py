"""``merge --card``: a model card whose front matter says of the merge only what is true of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpttool.ops.merge.card import ModelCard, Parents, Subject, card, hub_names
from ckpttool.ops.merge.origins import TensorOrigin, short_names
from ckpttool.ops.merge.provenance import Origin, Provenance
from ckpttool.recipe.model import ModelRef
from tests.helpers.command import ckpttool
from tests.merge.models import finetuned, llama, llama_config, merge, save

LICENSED = "license: apache-2.0\nlanguage:\n- en\n- no\npipeline_tag: text-generation\n"
OWN = "base_model: org/other\nmodel-index:\n- name: x\n  results: []\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("models")
    base = llama()
    for i, name in enumerate(("a", "b")):
        save(room / name, finetuned(base, i), llama_config())
    return room


@pytest.fixture
def room(models: Path, tmp_path: Path) -> Path:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return tmp_path


def parts(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and the rest."""
    empty, matter, prose = text.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(matter), prose


def merged(room: Path, *options: object, dst: str = "dst", sources: tuple[str, str] = ("a", "b")) -> str:
    merge(*(room / s for s in sources), "-o", room / dst, "--card", *options)
    return (room / dst / "README.md").read_text()


def test_what_all_parents_say_is_taken_over(room: Path) -> None:
    (room / "a/README.md").write_text(f"---\n{LICENSED}{OWN}tags:\n- chat\n- mine\n---\n# A\n\nProse of A.\n")
    (room / "b/README.md").write_text(f"---\n{LICENSED}tags: [chat]\n---\n# B\n")
    matter, prose = parts(merged(room, "--weights", "0.75,0.25"))
    assert matter == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "tags": ["merge", "linear", "ckpttool", "chat"],
    }
    assert prose.count("\n# dst\n") == 1
    assert prose.index("## Recipe") < prose.index("## About") < prose.index("Prose of A.")
    assert "model-index" not in prose
    assert "weight 0.75" in prose
    assert "xxh3_128:" in prose
    assert "| apache-2.0 |" in prose


@pytest.mark.parametrize("other", ["---\nlicense: mit\nlanguage: de\n---\n", "", "---\nlicense: [apache\n---\n"])
def test_what_they_do_not_agree_on_is_not(room: Path, other: str) -> None:
    (room / "a/README.md").write_text(f"---\nlicense_name: x\n{LICENSED}---\n")
    (room / "b/README.md").write_text(other)
    matter, _ = parts(merged(room))
    assert matter == {"library_name": "transformers", "tags": ["merge", "average", "ckpttool"]}


def test_the_recipe_makes_it_again(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    options = ("--method", "dare_linear", "--base", "a", "--weights", "0.5", "--param", "density=0.5", "--seed", "7")
    done = ckpttool("merge", "b", "-o", "one", "--card", *options, "--dtype", "f32", "--remove-keys", "lm_head.*")
    assert done.code == 0, done.err
    text = (room / "one/README.md").read_text()
    (room / "merge.yml").write_text(text.split("```yaml\n")[1].split("```")[0])
    command = text.split("```bash\n")[1].split("\n")[0].split()
    assert command[:4] == ["ckpttool", "merge", "merge.yml", "-o"]
    again = ckpttool(*[w.strip("'").replace("one", "two") for w in command[1:]])
    assert again.code == 0, again.err
    assert (room / "one/model.safetensors").read_bytes() == (room / "two/model.safetensors").read_bytes()


def test_a_merge_of_a_merge_has_one_section(room: Path) -> None:
    (room / "a/README.md").write_text("# A\n\nProse of A.\n")
    merged(room)
    text = merged(room, dst="two", sources=("dst", "b"))
    assert text.count("## Recipe") == text.count("ckpttool merge: begin") == 1
    assert text.count("Prose of A.") == 1
    assert "# two\n" in text


def test_what_ckpttool_0_1_has_added_goes() -> None:
    added = "## Merge\n\nThis checkpoint was merged with ckpttool 0.1.0 by the method `ties` from\n\n* `x`\n"
    assert ModelCard.of(f"# A\n\nProse.\n\n{added}").prose == "# A\n\nProse."


@pytest.mark.parametrize(
    "text",
    [
        "---\n&a [*a]\n---\nx",
        "---\nlicense: " + "[" * 5000 + "\n---\nx",
        "---\nlicense: {a: b}\ntags: {c: d}\n---\nx",
        "---\n- 1\n---\nx",
        "---\nlicense: !!python/object:os.system {}\n---\nx",
        "\ufeff---\r\nlicense:\r\n---\r\nx",
    ],
)
def test_hostile_front_matter(text: str) -> None:
    found = ModelCard.of(text)
    assert found.fields == {} or set(found.fields) <= {"tags"}
    assert found.prose == "x"


def test_distances_stand_in_the_card(room: Path) -> None:
    text = merged(room, "--weights", "3,1", "--report", room / "r.html")
    section = text.split("## How far it is from its sources")[1].split("##")[0]
    rows = [line.split("|")[2].strip() for line in section.splitlines() if "`" in line]
    assert 0 < float(rows[0]) < float(rows[1])


HOSTILE = "x|`\n---\n<script>alert(1)</script> [a](javascript:b) # \udce9 *"


def test_hostile_names() -> None:
    """A name is a text in a cell, whatever it holds."""
    provenance = Provenance(
        {"merge_method": "linear", "models": [{"model": HOSTILE}]}, "", None, "",
        [Origin(HOSTILE, HOSTILE, "hf", [("model.safetensors", 10)], 1)],
    )  # fmt: skip
    group = TensorOrigin("linear", [(HOSTILE, [("weight", 1.0)])], "", (), False, [f"{HOSTILE}.weight"], [(5, 10)])
    parents = Parents({HOSTILE: ModelCard({"license": HOSTILE}, "")}, HOSTILE, [])
    text = card(Subject(HOSTILE, provenance, [group], parents, "", "ckpttool"), {}, None).decode()
    matter, prose = parts(text)
    assert matter["license"] == HOSTILE
    before_the_recipe = prose.split("## Recipe")[0]
    for line in before_the_recipe.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (8, 5), line
        assert not line.startswith("---")
    title = before_the_recipe.split("## Sources")[0]
    assert "<script>" not in title.replace("\\<", "")
    assert "](javascript" not in title.replace("\\]", "")


def test_models_of_the_hub() -> None:
    places = ("hf://org/a@0123/sub", "hf://org/b", "/local/a", "hf://org/a", "s3://bucket/x")
    assert hub_names(places) == ["org/a", "org/b"]
    provenance = Provenance({"merge_method": "linear"}, "a: b", None, "", [Origin("hf://org/b@01", "", "hf", (), 1)])
    parents = Parents({}, "", hub_names(places))
    text = card(Subject("m", provenance, [], parents, "transformers", "c"), {}, None).decode()
    matter, prose = parts(text)
    assert list(matter) == ["base_model", "base_model_relation", "library_name", "tags"]
    assert matter["base_model"] == ["org/a", "org/b"]
    assert matter["base_model_relation"] == "merge"
    assert "[`org/b@01`](https://huggingface.co/org/b)" in prose


def test_no_path_of_the_machine_is_published(room: Path) -> None:
    (room / "x").mkdir()
    (room / "b").rename(room / "x/a")
    recipe = room / "recipe.yml"
    models = "".join(f"- model: {room}/{m}\n  parameters: {{weight: 1}}\n" for m in ("x/a", "a"))
    recipe.write_text(f"merge_method: linear\nmodels:\n{models}")
    for sources in ((recipe,), (room / "x/a", room / "a")):
        done = ckpttool("merge", *sources, "-o", room / "dst", "-f", "--card", "--report", room / "r.html")
        assert done.code == 0, done.err
        text = (room / "dst/README.md").read_text()
        assert str(room) not in text
        assert "| `x/a` |" in text
        assert "model: x/a" in text


def test_short_names() -> None:
    refs = [ModelRef("/m/a/v1"), ModelRef("/m/b/v1", ("/l/v2",)), ModelRef("hf://org/v1"), ModelRef("s3://b/k/a/v1/")]
    assert list(short_names(refs).values()) == ["m/a/v1", "b/v1+v2", "hf://org/v1", "k/a/v1"]
    assert short_names([ModelRef("/m/a"), ModelRef("a")])["a"].endswith("/a")


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--card"], "--card has"), (["--seed", "3", "--vocab", "min"], "--vocab and --seed have")],
)
def test_flags_of_a_merge_need_several_sources(tmp_path: Path, options: list[str], named: str) -> None:
    done = ckpttool("merge", Path(__file__).parents[2] / "fixtures/llama_tp8", "-o", tmp_path / "dst", *options)
    assert done.code == 2
    assert f"{named} no effect with one source" in done.err
    assert not (tmp_path / "dst").exists()
