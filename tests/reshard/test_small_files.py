"""Small files beside a model, from Hugging Face's directory through every format that is written and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ckpttool.formats.registry import WRITERS
from tests.helpers.command import ckpttool, reshard
from tests.helpers.training_run import groups, names, save_run

FILES = [
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "tiktoken.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "config_sentence_transformers.json", "modeling_new.py", "configuration_new.py",
    "LICENSE", "LICENSE.md", "NOTICE", "README.md", "USE_POLICY.txt", "tokenizer/tokenizer.json",
    "additional_chat_templates/rag.jinja", "assets/figure.png",
]  # fmt: skip
OPTIONS: dict[str, tuple[object, ...]] = {"zcc": ("--sharding-out", 2)}
FIXTURES = Path(__file__).parents[2] / "fixtures"


def lay(root: Path) -> None:
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"what {name} says")


def lost(root: Path) -> list[str]:
    return [n for n in FILES if not (root / n).is_file() or (root / n).read_text() != f"what {n} says"]


@pytest.mark.parametrize("target", [n for n, w in WRITERS.items() if n not in ("deepseek", "program")])
def test_small_files_come_back(tmp_path: Path, target: str) -> None:
    src = save_run(tmp_path / "src", names(), groups=groups((0.9, 0.95)))
    lay(src)
    reshard(src, tmp_path / "out", "--to", target, *OPTIONS.get(target, ()))
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert not lost(tmp_path / "back")


OTHERS = ["training_args.bin", "scheduler.pt", "rng_state.pth", "spk_dict.pt", "tf_model.h5", "model.onnx"]
"""Files whose names are those of weights, and which no format reads."""
BETWEEN = [n for n in WRITERS if n not in ("deepseek", "program")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run with small files beside it, in a format."""
    root = tmp_path_factory.mktemp("formats")

    @cache
    def made(name: str) -> Path:
        if name == "ranks":
            src = save_run(root / name, names(), groups=groups((0.9, 0.95)))
            lay(src)
            return src
        reshard(made("ranks"), root / name, "--to", name, *OPTIONS.get(name, ()))
        for other in OTHERS:
            (root / name / other).write_text("of another kind")
        return root / name

    return made


@pytest.mark.product(one_in=12)
@pytest.mark.parametrize("target", BETWEEN)
@pytest.mark.parametrize("source", BETWEEN)
def test_between_all_formats(written: Callable[[str], Path], source: str, target: str, tmp_path: Path) -> None:
    """What is small is carried; what has a name of weights is not, and is named."""
    src = written(source)
    if target == "universal" and "optimizer" not in WRITERS[source].capabilities.components:
        return  # refused: it is the state of training
    betas = ["--betas", "0.9,0.95"] if _states(source) == "paddle" and _states(target) == "torch" else []
    done = reshard(src, tmp_path / "out", "--to", target, *OPTIONS.get(target, ()), *betas)
    assert not lost(tmp_path / "out")
    for name in OTHERS:
        if (src / name).exists() and not (tmp_path / "out" / name).exists():
            assert name in done.err


def _states(name: str) -> str:
    return WRITERS[name].capabilities.states


@pytest.mark.parametrize("target", ["hf", "vllm", "unified", "dcp", "megatron-dist"])
def test_merges_carry_small_files(written: Callable[[str], Path], target: str, tmp_path: Path) -> None:
    first = written("hf")
    shutil.copytree(first, tmp_path / "second")
    done = ckpttool("merge", first, tmp_path / "second", "-o", tmp_path / "out", "--to", target)
    assert done.code == 0, done.err
    changed = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"}
    assert {*lost(tmp_path / "out")} <= changed
    for name in OTHERS:
        assert name in done.err


def test_small_files_go_through_deepseeks_format(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "deepseek_v3", tmp_path / "src")
    lay(tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "out", "--to", "deepseek")
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert not lost(tmp_path / "back")


@pytest.mark.parametrize("target", ["megatron", "megatron-dist"])
def test_small_files_of_one_save_are_named(tmp_path: Path, target: str) -> None:
    """Megatron-LM can save a tokenizer with each iteration; files of the run go with the model."""
    src = save_run(tmp_path / "src", names(), groups=groups((0.9, 0.95)))
    reshard(src, tmp_path / "out", "--to", target)
    lay(tmp_path / "out")
    save = next(p for p in (tmp_path / "out").iterdir() if p.name.startswith(("iter_", "release")))
    (save / "tokenizer").mkdir()
    (save / "tokenizer" / "vocab.json").write_text("{}")
    (save / "notes.txt").write_text("of this save")
    done = reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert not lost(tmp_path / "back")
    assert f"belong to one save: {save.name}/notes.txt, {save.name}/tokenizer/" in done.err
