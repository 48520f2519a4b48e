"""The last line says how to use what was written, in the words of the software that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import Raw, save_hf
from tests.reshard.test_file_names import save

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIFIED = FIXTURES / "paddle_unified/nlp_llama_bf16_tp2_ignore_merge"

NEXT = {
    "hf": (["--to", "hf"], 'AutoModelForCausalLM.from_pretrained("{dst}")'),
    "vllm": (["--to", "vllm", "--tp-out", "2"], "vllm serve '{dst}' --load-format sharded_state -tp 2"),
    "trtllm": (["--to", "trtllm", "--tp-out", "2"], "trtllm-build --checkpoint_dir '{dst}' --output_dir ENGINE"),
    "ranks": (["--tp-out", "2"], None),
    "some ranks": (["--to", "vllm", "--tp-out", "2", "--ranks-out", "0"], None),
    "not all tensors": (["--to", "hf", "--remove-keys", "lm_head.*"], None),
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    tensors = {n: Raw(t.dtype, t.bits & 0x3FFF) for n, t in MODELS["llama"].tensors().items()}
    return save_hf(tmp_path / "src", tensors, MODELS["llama"].config)


@pytest.mark.parametrize("case", NEXT)
def test_what_next(src: Path, tmp_path: Path, case: str) -> None:
    options, line = NEXT[case]
    dst = tmp_path / "two words"
    wanted = line.format(dst=dst) if line else None
    done = ckpttool("reshard", src, dst, *options)
    assert done.code == 0, done.err
    assert [x for x in done.err.splitlines() if x.startswith("next: ")] == ([f"next: {wanted}"] if wanted else [])
    if wanted:
        assert done.err.endswith(f"{wanted}\n")
    if case == "hf":
        assert "next: " not in ckpttool("reshard", src, dst, *options, "-f", "-q").err
    shown = ckpttool("reshard", src, dst, *options, "-f", "--json")
    assert (json.loads(shown.out)["next_step"], shown.err) == (wanted, "")


def test_without_a_config_nothing_is_said(src: Path, tmp_path: Path) -> None:
    (src / "config.json").unlink()
    assert "next: " not in ckpttool("reshard", src, tmp_path / "dst", "--to", "hf").err


def test_a_model_with_a_head_is_not_loaded_without_it(src: Path, tmp_path: Path) -> None:
    """GPT-2's class has a name of its own."""
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf")
    assert done.err.endswith(f'next: AutoModelForCausalLM.from_pretrained("{tmp_path / "dst"}")\n')
    del config["architectures"]  # as a trainer saves the config of a model that it made itself
    (src / "config.json").write_text(json.dumps(config))
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf", "-f")
    assert done.err.endswith(f'next: AutoModelForCausalLM.from_pretrained("{tmp_path / "dst"}")\n')


@pytest.mark.parametrize("to", ["hf", "torch-bin"])
def test_a_model_with_an_adapter_inside_is_loaded_by_nobody(to: str, tmp_path: Path) -> None:
    """from_pretrained would find none of its parameters, and give them random values."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    weight = Raw("F32", np.zeros((4, 4), np.uint32))
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.{n}.weight" for n in ("base_layer", "lora_A.default")]
    (tmp_path / "src").mkdir()
    src = save_hf(tmp_path / "src", dict.fromkeys(names, weight), config)
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", to)
    assert done.code == 0, done.err
    assert "next: " not in done.err


@pytest.mark.parametrize(
    "command", [["merge", "{src}", "-o", "{dst}"], ["quantize", "{src}", "{dst}", "--block", "16x16"]]
)
def test_other_commands(src: Path, tmp_path: Path, command: list[str]) -> None:
    done = ckpttool(*[w.format(src=src, dst=tmp_path / "dst") for w in command])
    assert done.err.endswith(f'next: AutoModelForCausalLM.from_pretrained("{tmp_path / "dst"}")\n')


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["--to", "unified", "--target", "paddlenlp-3.0"], "--unified_checkpoint true"),
        (["--to", "unified", "--target", "paddleformers-1.2"], "--load_checkpoint_format unified_checkpoint"),
        (["--to", "flex"], "--load_checkpoint_format flex_checkpoint"),
        (["--to", "hybrid", "--target", "paddlenlp-3.0"], "--load_sharded_model true"),
    ],
)
def test_trainers_resume(tmp_path: Path, options: list[str], flag: str) -> None:
    dst = tmp_path / "checkpoint-7"
    done = ckpttool("reshard", UNIFIED, dst, *options)
    assert done.code == 0, done.err
    assert done.err.endswith(f"next: resume with --resume_from_checkpoint {dst} {flag}\n")
    done = ckpttool("reshard", UNIFIED, dst, *options, "--only", "model", "-f")
    assert "next: " not in done.err


@pytest.mark.parametrize("to", ["unified", "flex"])
def test_optimizer_state_alone_is_no_checkpoint_to_resume_from(tmp_path: Path, to: str) -> None:
    done = ckpttool("reshard", UNIFIED, tmp_path / "dst", "--to", to, "--only", "optimizer")
    assert done.code == 0, done.err
    assert "next: " not in done.err


def test_diffusers(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model.fp16", shards=1)
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf")
    line = f'next: diffusers.UNet2DConditionModel.from_pretrained("{tmp_path / "dst"}", variant="fp16")\n'
    assert done.err.endswith(line)


@pytest.mark.parametrize(
    ("model", "option", "loads"),
    [
        ("llama", "--unfuse", True),
        ("llama", "--fuse", False),
        ("phi3", "--fuse", True),
        ("phi3", "--unfuse", False),
        ("gpt_neox", "--unfuse", False),
        ("gpt2", "--unfuse", False),
    ],
)
def test_names_that_transformers_does_not_know_are_not_loaded(
    tmp_path: Path, model: str, option: str, loads: bool
) -> None:
    (tmp_path / "src").mkdir()
    src = save_hf(tmp_path / "src", MODELS[model].tensors(), MODELS[model].config)
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf", option)
    assert done.code == 0, done.err
    assert ("next: " in done.err) == loads
    again = ckpttool("reshard", tmp_path / "dst", tmp_path / "again", "--to", "hf")  # names stay
    assert ("next: " in again.err) == loads
