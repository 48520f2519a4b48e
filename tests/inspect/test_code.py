"""Files beside the weights that can run code are named, in the tree and by --check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import save_hf
from tests.inspect.models import CONFIG, llama, save_json


def findings(folder: Path) -> dict[str, str]:
    done = ckpttool("inspect", folder, "--check", "--json")
    return {f["id"]: f["text"] for f in json.loads(done.out)["findings"]}


AUTO = {"AutoModelForCausalLM": "modeling_x.X"}


@pytest.mark.parametrize(
    ("files", "configs", "expected"),
    [
        (["modeling_x.py"], {"config.json": {"auto_map": AUTO}}, "modeling_x.py can run when"),
        (["modeling_x.py", "other.py"], {"config.json": {"auto_map": AUTO}}, "modeling_x.py and 1 more file can run"),
        (["tok.py"], {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tok.T", None]}}}, "tok.py can run"),
        (["tok.py"], {"tokenizer_config.json": {"trust_remote_code": True}}, "tok.py can run"),
        (
            [],
            {"config.json": {"auto_map": {"AutoModel": "who/what--modeling_x.X"}}},
            "code of the repository `who/what`",
        ),
        (["p.py"], {"config.json": {"custom_pipelines": {"x": {"impl": "p.P"}}}}, "p.py can run"),
        (["custom_generate/generate.py"], {}, "custom_generate/generate.py can run"),
        (["modeling_x.py"], {}, ""),
        ([], {"config.json": {"auto_map": AUTO}}, ""),
        ([], {"tokenizer_config.json": {"chat_template": "{{ x }}"}, "config.json": {"auto_map": 5}}, ""),
    ],
)
def test_python(files: list[str], configs: dict[str, dict[str, Any]], expected: str, tmp_path: Path) -> None:
    save_hf(tmp_path, llama(), CONFIG)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit")
    for name, more in configs.items():
        save_json(tmp_path / name, {**(CONFIG if name == "config.json" else {}), **more})
    assert findings(tmp_path).get("remote-code", "").startswith(expected)
    assert bool(findings(tmp_path)) == bool(expected)
    note = ckpttool("inspect", tmp_path).err
    assert (f"note: this checkpoint can run code: {expected}" in note) if expected else not note


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pdtensor", "model.pd", "scheduler.pt"])
def test_pickles_of_a_source_that_is_not_read_are_looked_at(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00truetR.")
    done = ckpttool("inspect", tmp_path, "--check", "--json")
    assert done.code == 3
    assert findings(tmp_path)["pickle-code"] == f"{name} calls `posix.system` when it is loaded"


def test_pickles_of_paddle_spell_arrays_with_eval_and_are_sound() -> None:
    assert "pickle-code" not in findings(Path("fixtures/paddle_zcc/nlp_tp2"))
