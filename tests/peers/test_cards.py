"""The model card of a merge, as huggingface_hub reads it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from tests.merge.models import finetuned, llama, llama_config, merge, save


def test_the_card_of_a_merge(tmp_path: Path) -> None:
    base = llama()
    names = ("a", "b", "base")
    for i, name in enumerate(names):
        save(tmp_path / name, finetuned(base, i), llama_config())
        front = f"---\nlicense: apache-2.0\nlanguage: no\ntags: [x]\nmodel-index:\n- name: {name}\n  results: []\n---\n"
        (tmp_path / name / "README.md").write_text(f"{front}# {name}\n")
    models = [tmp_path / n for n in names[:2]]
    options = ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.5", "--base", tmp_path / "base")
    merge(*models, *options, "-o", tmp_path / "dst", "--card", "--report", tmp_path / "r.html")
    found = ModelCard.load(tmp_path / "dst/README.md", ignore_metadata_errors=False)
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "language": "no",
        "tags": ["merge", "ties", "ckpttool", "x"],
    }
    assert found.data.eval_results is None
    assert found.text.count("\n# dst\n") == 1
    assert "## How far it is from its sources" in found.text
