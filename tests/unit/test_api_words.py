"""Messages of the API name its arguments, never options of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpttool
from ckpttool.api.border import in_arguments
from ckpttool.errors import CkptError

LLAMA = "fixtures/llama_tp8"
MOE = "fixtures/moe_tp4_ep2"
TINY = "fixtures/hf_tiny_source"
ZCC = "fixtures/paddle_zcc/ep2_tp2_sharding2_ema"
V3 = "fixtures/deepseek_v3"
FT1, FT2 = "fixtures/merge/inputs/ft1", "fixtures/merge/inputs/ft2"
COMMAND = re.compile(r"`ckpttool [^`]*`|ckpttool [a-z.-]+(?: (?:[A-Z]+|--[a-z-]+))*")
"""A command to run stays one."""
OURS = re.compile(r"(?<![\w-])--(?!no-python|help)[a-z][a-z-]*")
"""An option; ``--no-python`` is torchrun's."""

Mistake = Callable[[Path], object]

MISTAKES: dict[str, Mistake] = {
    "tp that does not divide": lambda _: ckpttool.open(LLAMA).reshard(tp=3),
    "pp of two layers": lambda _: ckpttool.open(LLAMA).reshard(pp=7),
    "pp_layout that is too long": lambda _: ckpttool.open(LLAMA).reshard(pp_layout="9,9"),
    "pp_layout and pp": lambda _: ckpttool.open(LLAMA).reshard(pp=3, pp_layout=[1, 1]),
    "ep without experts": lambda _: ckpttool.open(LLAMA).reshard(ep=2),
    "etp without experts": lambda _: ckpttool.open(LLAMA).reshard(etp=2, to="vllm"),
    "tp of hf": lambda _: ckpttool.open(LLAMA).reshard(to="hf", tp=2),
    "an unknown format": lambda _: ckpttool.open(LLAMA).reshard(to="gguf"),
    "a format that is only read": lambda _: ckpttool.open(LLAMA).reshard(to="deepspeed"),
    "ranks of flex": lambda _: ckpttool.open(LLAMA).reshard(to="flex", ranks="0"),
    "ranks that are not there": lambda _: ckpttool.open(LLAMA).reshard(tp=2, ranks="7"),
    "sharding of a model": lambda _: ckpttool.open(LLAMA).reshard(sharding=2),
    "sharding of hf": lambda _: ckpttool.open(ZCC).reshard(to="hf", sharding=2),
    "optimizer of vllm": lambda _: ckpttool.open(ZCC).reshard(to="vllm", only="optimizer"),
    "a component that is not there": lambda _: ckpttool.open(LLAMA).reshard(only="optimizer"),
    "averages that are not there": lambda _: ckpttool.open(LLAMA).reshard(ema=True),
    "a dtype": lambda _: ckpttool.open(LLAMA).reshard(dtype="int8"),
    "dequant of plain weights": lambda _: ckpttool.open(LLAMA).reshard(dequant="bf16"),
    "cut blocks": lambda _: ckpttool.open(V3).reshard(tp=3, to="vllm"),
    "a version without a choice": lambda _: ckpttool.open(LLAMA).reshard(target="9.9"),
    "a version of a sharding": lambda _: ckpttool.open(LLAMA).reshard(sharding_version="v3"),
    "native names of hf": lambda _: ckpttool.open(LLAMA).reshard(native_names=True),
    "fuse and unfuse": lambda _: ckpttool.open(LLAMA).reshard(fuse=True, unfuse=True),
    "a pattern that matches nothing": lambda _: ckpttool.open(LLAMA).reshard(remove="nothing.*"),
    "a name twice": lambda _: ckpttool.open(LLAMA).reshard(rename="*.q_proj.*=x"),
    "a rule without =": lambda _: ckpttool.open(LLAMA).reshard(rename="lm_head"),
    "shards of ranks": lambda _: ckpttool.open(LLAMA).reshard(tp=2, max_shard_size="1MB"),
    "statements that are not there": lambda at: ckpttool.open(LLAMA).reshard(aoa=at / "none.aoa"),
    "tp of a whole model": lambda _: ckpttool.open(TINY, tp=2),
    "tp that the files contradict": lambda _: ckpttool.open(LLAMA, tp=4),
    "sharding that the files contradict": lambda _: ckpttool.open(ZCC, sharding=4),
    "also for hf": lambda _: ckpttool.open(TINY, also=FT1),
    "select for hf": lambda _: ckpttool.open(TINY, select="model"),
    "a part of one model": lambda _: ckpttool.open(TINY, part=["unet"]),
    "an unknown source format": lambda _: ckpttool.open(TINY, format="zip"),
    "another source format": lambda _: ckpttool.open(TINY, format="zcc"),
    "an unknown family": lambda _: ckpttool.open(TINY, family="nothing"),
    "a rank pattern": lambda _: ckpttool.open(LLAMA, rank_pattern="x.safetensors"),
    "a split": lambda _: ckpttool.open(LLAMA, split="lm_head"),
    "no such directory": lambda at: ckpttool.open(at / "none"),
    "an empty directory": ckpttool.open,
    "a destination that is there": lambda _: ckpttool.open(LLAMA).reshard(tp=2).run(TINY),
    "a pull request here": lambda at: ckpttool.open(LLAMA).reshard(tp=2).run(at / "x", create_pr=True),
    "an unknown engine": lambda at: ckpttool.open(LLAMA).reshard(tp=2).run(at / "x", on="dask"),
    "a part out of range": lambda at: ckpttool.open(LLAMA).reshard(tp=2).run(at / "x", part="9/8"),
    "part auto without a launcher": lambda at: ckpttool.open(LLAMA).reshard(tp=2).run(at / "x", part="auto"),
    "too little memory": lambda at: ckpttool.open(LLAMA).reshard(tp=2).run(at / "x", memory=1),
    "drop nothing": lambda _: ckpttool.drop_keys(TINY),
    "drop everything": lambda _: ckpttool.drop_keys(TINY, "*"),
    "an unknown method": lambda _: ckpttool.merge([FT1, FT2], method="mean"),
    "weights of one of two": lambda _: ckpttool.merge([FT1, FT2], weights=[1]),
    "weights of average": lambda _: ckpttool.merge([FT1, FT2], method="average", weights=[1, 2]),
    "ties without a base": lambda _: ckpttool.merge([FT1, FT2], method="ties"),
    "a parameter that is not known": lambda _: ckpttool.merge([FT1, FT2], params={"densty": 0.5}),
    "a card of one source": lambda _: ckpttool.merge([LLAMA], card=True),
    "report of one source": lambda at: ckpttool.merge([LLAMA], report=at / "r.html"),
    "vocab of what": lambda _: ckpttool.merge([FT1, FT2], vocab="most"),  # type: ignore[arg-type]
    "a recipe that is not known": lambda _: ckpttool.size(TINY, "fp7"),
    "tokens without kv": lambda _: ckpttool.size(TINY, tokens=100),
    "kv and train": lambda _: ckpttool.size(TINY, kv="bf16", train=True),
    "zero without train": lambda _: ckpttool.size(TINY, zero=3),
    "an unknown gpu": lambda _: ckpttool.size(TINY, gpu="h1000"),
    "block of tensor": lambda _: ckpttool.size(TINY, "tensor", block="128x128"),
    "edge of bf16": lambda _: ckpttool.size(TINY, "bf16", edge="pad"),
    "an unknown recipe": lambda _: ckpttool.open(TINY).quantize("fp7"),
    "an unknown preset": lambda _: ckpttool.open(TINY).quantize(preset="nothing"),
    "a scale dtype": lambda _: ckpttool.open(TINY).quantize("mxfp8", scale_dtype="f32"),
    "a report on a directory": lambda at: ckpttool.open(TINY).report(at),
    "diff of nothing": lambda at: ckpttool.diff(TINY, at / "none"),
    "a tensor that is not there": lambda _: ckpttool.open(TINY)["lm_heat.weight"],
    "convert what is no program": lambda at: ckpttool.convert(TINY, at / "x"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages_name_arguments(name: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as found:
        MISTAKES[name](tmp_path)
    said = COMMAND.sub("", str(found.value))
    assert not OURS.search(said), said


def test_arguments_have_their_names() -> None:
    source = ckpttool.open(LLAMA)
    for given, meant in {"tp_out": "tp", "remove_keys": "remove", "max_shardsize": "max_shard_size"}.items():
        with pytest.raises(TypeError, match=f"reshard.. has no argument {given}") as found:
            source.reshard(**{given: 2})  # type: ignore[arg-type]
        assert isinstance(found.value, CkptError)
        assert found.value.hint == f"did you mean {meant}=?"
    with pytest.raises(TypeError, match="did you mean format="):
        ckpttool.open(LLAMA, from_="hf")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="its arguments: path, format"):
        ckpttool.open(LLAMA, zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("function", "said", "meant"),
    [
        ("reshard", "choose another --tp-out", "choose another `tp`"),
        ("reshard", "use --tp-out 2 or --ep-out 4", "use tp=2 or ep=4"),
        ("reshard", "drop --tp", "drop `tp` in open()"),
        ("open", "drop --tp", "drop `tp`"),
        ("run", "use --force to replace it", "use force=True to replace it"),
        ("run", "omit the optimizer: --only model", 'omit the optimizer: only="model" in reshard()'),
        ("merge", "--vocab min cuts all", 'vocab="min" cuts all'),
        ("reshard", "--to hf or vllm", 'to="hf" or vllm'),
        ("reshard", "load it with --override-opt-param-scheduler", "load it with --override-opt-param-scheduler"),
        (
            "reshard",
            "`ckpttool reshard FILE DIR --select PATH` first",
            "`ckpttool reshard FILE DIR --select PATH` first",
        ),
        ("open", "--split PATTERN=AXIS", "split=PATTERN=AXIS"),
        ("size", "--quant-method has no effect", "`quant_method` has no effect"),
        ("quantize", "drop --quant-method", "drop `method`"),
        ("report", "--check --values reads them", "check=True `values` reads them"),
        ("size", "--no-mtp leaves them out", "mtp=False leaves them out"),
    ],
)
def test_options_become_arguments(function: str, said: str, meant: str) -> None:
    assert in_arguments(said, function) == meant
    assert in_arguments(meant, function) == meant


def test_notes_name_arguments() -> None:
    size = ckpttool.size(TINY, "bf16", tp=1, kv="bf16", tokens=10**9, gpu="h100")
    for text in (*size.notes, *size.would_fit, *ckpttool.open(LLAMA).reshard(to="hf").notes):
        assert not OURS.search(COMMAND.sub("", text)), text
