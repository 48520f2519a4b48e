"""What is damaged: small checkpoints of every format, and the other files that a command reads."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool import layout
from tests.fuzz.harness import Answers, FindingError, Subject, opened
from tests.fuzz.naive import Placement, flex, library, pickled, program, whole
from tests.fuzz.naive_torch import (
    bytecheckpoint,
    dcp,
    deepspeed,
    fsdp,
    megatron_dist,
    meta,
    one_file,
    sharded_safetensors,
    trained,
    universal,
)
from tests.fuzz.naive_torch import megatron as naive_megatron
from tests.helpers import megatron
from tests.helpers.command import Done, ckpttool, reshard
from tests.helpers.torch_save import torch_save

FIXTURES = Path(__file__).parents[2] / "fixtures"


def copied(source: str, *but: str) -> Callable[[Path], None]:
    """The files of a fixture, without those named."""

    def make(folder: Path) -> None:
        for path in sorted((FIXTURES / source).iterdir()):
            if path.name not in but:
                shutil.copy(path, folder / path.name)

    return make


def made(source: str, *options: object) -> Callable[[Path], None]:
    """What ``reshard`` makes of a fixture."""

    def make(folder: Path) -> None:
        folder.rmdir()
        reshard(FIXTURES / source, folder, "-q", "--workers", 1, *options)

    return make


def placed(**options: object) -> Callable[[Path], Answers]:
    """A reader that puts files together as the first ones that it sees are."""
    known: list[Placement] = []

    def naive(folder: Path) -> Answers:
        if not known:  # undamaged files come first
            known.append(Placement(opened(folder, options)))
        return known[0](folder)

    return naive


def with_all_heads(naive: Callable[[Path], Answers]) -> Callable[[Path], Answers]:
    """``naive`` for ranks of a Llama whose config.json may lose its key-value heads: then there are as many as heads,
    and no rank has a copy of another's."""

    def read_ranks(folder: Path) -> Answers:
        out = naive(folder)
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except ValueError:
            return out
        if isinstance(config, dict) and config.get("num_key_value_heads") is None:
            ranks = [library(p.read_bytes()) for p in sorted(folder.glob("*.safetensors"))]
            for name in (n for n in out if n.endswith(("k_proj.weight", "v_proj.weight"))):
                rows = sum(r[name].shape[0] for r in ranks)
                out[name] = (rows, *ranks[0][name].shape[1:]), b"".join(r[name].data for r in ranks)
        return out

    return read_ranks


def beside(folder: Path, source: str, name: str) -> None:
    """A copy of a fixture in a folder of its own inside."""
    shutil.copytree(FIXTURES / source, folder / name)


def one(source: str) -> Callable[[Path], None]:
    """One file of the fixtures."""

    def make(folder: Path) -> None:
        shutil.copy(FIXTURES / source, folder)

    return make


CHECK = ("inspect", "{src}", "--check")
DRY = ("reshard", "{src}", "{out}", "--to", "ranks", "--tp-out", "2", "-n", "--json")
WRITE = ("reshard", "{src}", "{out}", "--to", "hf", "--workers", "1", "-q")

NUMBERED = "model-0000{}-of-0000{}.safetensors"


def checkpoints() -> list[Subject]:
    """One or more of each format."""
    deepseek = copied("deepseek_v3_mp2")
    vllm = copied("vllm_sharded_tp2")
    foreign = copied("llama_tp8", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    ranks = made("llama_tp8", "--to", "ranks", "--tp-out", 2)
    trtllm = made("merge/inputs/ft2", "--to", "trtllm", "--tp-out", 2)
    out = [
        Subject(
            "hf",
            copied("merge/inputs/tokA"),
            {"model.safetensors": "safetensors", "config.json": "json"},
            naive=whole,
            commands=(CHECK, DRY, ("size", "{src}", "--tp-out", "2")),
        ),
        Subject(
            "hf sharded",
            copied("merge/inputs/base"),
            {"model.safetensors.index.json": "json", NUMBERED.format(2, 3): "safetensors"},
            naive=whole,
            commands=(CHECK, ("inspect", "{src}", "--write-index", "-n")),
        ),
        Subject(
            "ranks",
            ranks,
            {"rank-00001-of-00002.safetensors": "record", "rank-00000-of-00002.safetensors": "safetensors"},
            naive=placed(),
        ),
        Subject(
            "ranks of others",
            foreign,
            {"model_tp3.safetensors": "safetensors", "config.json": "json"},
            {"tp": 8},
            with_all_heads(placed(tp=8)),
            (("inspect", "{src}", "--check", "--tp", "8"),),
            (("reshard", "{src}", "{out}", "--tp", "8", "--to", "hf", "--workers", "1", "-q"),),
        ),
        Subject("deepseek", deepseek, {"model1-mp2.safetensors": "safetensors"}, naive=placed()),
        Subject(
            "vllm",
            vllm,
            {"model-rank-1-part-1.safetensors": "safetensors", "config.json": "json"},
            naive=placed(),
        ),
        Subject("trtllm", trtllm, {"config.json": "json", "rank1.safetensors": "safetensors"}, naive=placed()),
    ]
    for name, files in (
        (
            "nlp_llama_bf16_tp2_ignore_merge",
            {
                "model.safetensors.index.json": "json",
                "optimizer.safetensors.index.json": "json",
                "config.json": "json",
                "optimizer.tp01.safetensors": "safetensors",
                "master_weights.tp00.safetensors": "safetensors",
                NUMBERED.format(2, 2): "safetensors",
            },
        ),
        (
            "pf12_llama_bf16_sharding2_split_param",
            {
                "master_weights.safetensors.index.json": "json",
                "optimizer-00002-of-00002.safetensors": "safetensors",
                "config.json": "json",
            },
        ),
        (
            "nlp_llama_lora_bf16_tp1",
            {"peft_model.safetensors.index.json": "json", "peft_model-00001-of-00001.safetensors": "safetensors"}
            | {"lora_config.json": "json"},
        ),
        ("nlp_llama_bf16_tp2_quantO1", {"optimizer-00001-of-00002.safetensors": "safetensors"}),
    ):
        make = copied(f"paddle_unified/{name}")
        # Quantized state is decoded by ckpttool alone.
        out.append(Subject(f"unified {name}", make, files, naive=None if "quant" in name else placed()))
    out += [
        Subject(
            "hybrid",
            copied("paddle_zcc/sharding2_v1"),
            {
                "model_meta.json": "json",
                "config.json": "json",
                "model_state.shard00.pdparams": "pickle",
                "optimizer.shard01.pdopt": "pickle",
                "scheduler.pdparams": "pickle",
            },
        ),
        Subject(
            "hybrid of paddlenlp",
            copied("paddle_zcc/nlp_tp2"),
            {"model_state.tp01.pdparams": "pickle", "optimizer.tp00.pdopt": "pickle", "config.json": "json"},
        ),
        Subject(
            "zcc",
            copied("paddle_zcc/ep2_tp2_sharding2_ema"),
            {
                "model_meta.json": "json",
                "ema.tp00_shard01.pdopt": "pickle",
                "optimizer.tp01_shard00.pdopt": "pickle",
                "model_state.tp01_shard01.pdparams": "pickle",
            },
        ),
        Subject(
            "flex",
            copied("paddle_flex/tp2_dp2"),
            {"0.metadata": "pickle", "1_0.distcp": "pickle"},
            {"raw": True},
            flex,
        ),
        Subject(
            "flex of tensors",
            copied("paddle_flex/dist_tensor"),
            {"0.metadata": "pickle", "0_0.distcp": "pickle"},
            {"raw": True},
            flex,
        ),
        *(
            Subject(f"pdparams {name}", one(f"paddle_pickles/{name}"), {name: "pickle"}, naive=pickled)
            for name in ("model.pdparams", "model_proto2.pdparams", "all_dtypes.pdparams")
        ),
        Subject(
            "program in JSON",
            copied("paddle_programs/pir"),
            {"model.json": "json", "model.pdiparams": "pdiparams"},
            naive=program,
            commands=(
                CHECK,
                ("convert-json", "{src}/model.json", "--check"),
                ("convert-json", "{src}/model.json", "{out}"),
            ),
        ),
        Subject(
            "program in protobuf",
            copied("paddle_programs/legacy"),
            {"model.pdmodel": "pdmodel", "model.pdiparams": "pdiparams", "model.pdiparams.info": "pickle"},
            naive=program,
            commands=(
                CHECK,
                ("convert-json", "{src}/model.pdmodel", "--check"),
                ("convert-json", "{src}/model.pdmodel", "{out}"),
            ),
        ),
    ]
    for name, files in (
        ("ct_fp8_block", {"config.json": "json"}),
        ("deepseek_fp8", {"config.json": "json", "model-00002-of-00002.safetensors": "safetensors"}),
        ("ct_mxfp8", {"config.json": "json"}),
        ("per_tensor_static", {"config.json": "json", "hf_quant_config.json": "json"}),
    ):
        out.append(
            Subject(
                f"fp8 {name}",
                copied(f"fp8/formats/{name}"),
                files,
                naive=whole,
                commands=(
                    CHECK,
                    ("size", "{src}"),
                    ("quantize", "{src}", "{out}", "--to", "bf16", "-n"),
                    ("quantize", "{src}", "{out}", "--to", "bf16", "--workers", "1", "-q"),
                ),
                readable=(),
            )
        )
    return out


def _recipe(name: str) -> Callable[[Path], None]:
    text = (FIXTURES / "merge" / "configs" / name).read_text().replace("./inputs/", f"{FIXTURES}/merge/inputs/")

    def make(folder: Path) -> None:
        (folder / "recipe.yml").write_text(text)

    return make


def _paddle_recipe(folder: Path) -> None:
    text = (FIXTURES / "merge_paddle/merged/pf_f32_pd_ties_sum/merge_config.json").read_text()
    (folder / "merge_config.json").write_text(text.replace("models/", f"{FIXTURES}/merge_paddle/models/"))


def _aoa(folder: Path) -> None:
    beside(folder, "hf_tiny_source", "model")
    lines = [
        "model.embed_tokens.weight -> embed",
        "model.layers.$LAYER_ID.self_attn.q_proj.weight^T -> l.$LAYER_ID.q",
        "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight -> l.0.gu, axis=0",
        "lm_head.weight -> _",
    ]
    (folder / "rules.txt").write_text("\n".join(lines) + "\n")


def _aoa_json(folder: Path) -> None:
    _aoa(folder)
    lines = (folder / "rules.txt").read_text().splitlines()
    (folder / "rules.txt").write_text(json.dumps({"aoa_statements": lines, "aoa_config_reverse": False}))


def _family(folder: Path) -> None:
    beside(folder, "hf_tiny_source", "model")
    shutil.copy(Path(layout.__file__).parent / "families" / "llama.yaml", folder / "own.yaml")


def _manifest(folder: Path) -> None:
    folder.rmdir()
    reshard(FIXTURES / "merge/inputs/tokA", folder, "-q", "--workers", 1, "--manifest")


def _adapter(folder: Path) -> None:
    shutil.copytree(FIXTURES / "merge/inputs/lora1", folder, dirs_exist_ok=True)


def _tokenizers(folder: Path) -> None:
    for name in ("tokA", "tokB"):
        beside(folder, f"merge/inputs/{name}", name)
    text = (FIXTURES / "merge/configs/tok_union.yml").read_text()
    (folder / "recipe.yml").write_text(text.replace("./inputs/", f"{folder}/"))


def _sizes(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((FIXTURES / "deepseek_v3/config.json").read_text())))


def _header(folder: Path) -> None:
    shutil.copy(FIXTURES / "merge/inputs/tokA/model.safetensors", folder / "m.safetensors")
    done = ckpttool("inspect", folder / "m.safetensors", "--header")
    assert done.code == 0, done.err
    (folder / "m.safetensors.json").write_text(done.out)


def _same_tensors(out: Path, done: Done) -> None:
    """What was written has the bytes of an undamaged run, or nothing was."""
    if done.code == 0 and out.exists():
        want = library((FIXTURES / "merge/inputs/tokA/model.safetensors").read_bytes())
        got = library(next(out.glob("*.safetensors")).read_bytes())
        if got != want:
            raise FindingError("resumed, and the output is another")


def others() -> list[Subject]:
    """Files that are no checkpoint."""
    merged = ("merge", "{src}/recipe.yml", "-o", "{out}", "-n")
    out = [
        Subject(f"recipe {name}", _recipe(name), {"recipe.yml": "yaml"}, commands=(merged,), opened=False)
        for name in (
            "per_model_filter_gradient_ta__f32out_bf16.yml",
            "passthrough_franken__bf16.yml",
            "nuslerp_base__f32out_bf16.yml",
            "lora_ta__f32out_bf16.yml",
        )
    ]
    return [
        *out,
        Subject(
            "recipe of Paddle",
            _paddle_recipe,
            {"merge_config.json": "json"},
            commands=(("merge", "{src}/merge_config.json", "-o", "{out}", "-n"),),
            opened=False,
        ),
        Subject(
            "tokenizers",
            _tokenizers,
            {"tokB/tokenizer.json": "json", "tokA/tokenizer_config.json": "json", "recipe.yml": "yaml"},
            commands=(merged, ("merge", "{src}/recipe.yml", "-o", "{out}", "--workers", "1", "-q")),
            opened=False,
        ),
        Subject(
            "adapter",
            _adapter,
            {"adapter_config.json": "json", "adapter_model.safetensors": "safetensors"},
            commands=(
                ("merge", str(FIXTURES / "merge/inputs/base") + "+{src}", "-o", "{out}", "-n"),
                ("inspect", "{src}", "--check"),
            ),
            opened=False,
        ),
        *(
            Subject(
                f"aoa {kind}",
                make,
                {"rules.txt": kind},
                commands=(("reshard", "{src}/model", "{out}", "--aoa", "{src}/rules.txt", "-n"),),
                opened=False,
            )
            for kind, make in (("lines", _aoa), ("json", _aoa_json))
        ),
        Subject(
            "family",
            _family,
            {"own.yaml": "yaml"},
            commands=(
                (
                    *("reshard", "{src}/model", "{out}", "--family", "{src}/own.yaml"),
                    *("--to", "ranks", "--tp-out", "2", "--fuse", "-n"),
                ),
            ),
            opened=False,
        ),
        Subject("manifest", _manifest, {"ckpttool.manifest.json": "json"}, commands=(CHECK,), opened=False),
        Subject(
            "config alone",
            _sizes,
            {"config.json": "json"},
            commands=(("size", "{src}/config.json", "--tp-out", "2", "--kv", "fp8", "--tokens", "128"),),
            opened=False,
        ),
        Subject(
            "header",
            _header,
            {"m.safetensors.json": "json"},
            commands=(("inspect", "{src}/m.safetensors", "--set-header", "{src}/m.safetensors.json", "-o", "{out}"),),
            opened=False,
        ),
    ]


def tree(source: str) -> Callable[[Path], None]:
    """A fixture with its directories."""

    def make(folder: Path) -> None:
        shutil.copytree(FIXTURES / source, folder, dirs_exist_ok=True)

    return make


def _trainer(folder: Path) -> None:
    """What transformers' Trainer leaves: a model, and an optimizer that names its parameters."""
    names, shapes = ("b.weight", "b.bias", "a.weight"), ((3, 4), (4,), (4, 3))
    arrays = [np.arange(math.prod(s), dtype="<f4").reshape(s) + i for i, s in enumerate(shapes)]
    torch_save(dict(zip(names, arrays, strict=True)), folder / "pytorch_model.bin")
    states = {i: {"step": np.array(3, "<f4"), "exp_avg": a + 10, "exp_avg_sq": a + 20} for i, a in enumerate(arrays)}
    groups = [
        {"lr": 0.1, "params": [0], "param_names": [names[0]]},
        {"lr": 0.1, "params": [1, 2], "param_names": [*names[1:]]},
    ]
    torch_save({"state": states, "param_groups": groups}, folder / "optimizer.pt")
    torch_save({"last_epoch": 3, "_step_count": 4}, folder / "scheduler.pt")


def small_dcp(folder: Path) -> None:
    """A save of three parameters and their states, in two files."""
    with tempfile.TemporaryDirectory() as scratch:
        _trainer(Path(scratch))
        folder.rmdir()
        reshard(scratch, folder, "-q", "--workers", 1, "--to", "dcp", "--sharding-out", 2)


def small_megatron(folder: Path) -> None:
    """A save of Megatron Core's: a Llama of three layers, cut for two ranks, and its optimizer."""
    folder.rmdir()
    save, model = megatron.Save(folder), megatron.model()
    save.sharded("", model, 2)
    for state, arrays in megatron.states(model).items():
        save.sharded(f"optimizer.state.{state}.", arrays, 2)
    groups = [{"lr": 0.1, "wd_mult": wd, "step": 4} for wd in (1.0, 0.0)]
    save.write({"optimizer": {"optimizer": {"param_groups": groups}}})


STATE = (("reshard", "{src}", "{out}", "--to", "ranks", "--tp-out", "1", "--workers", "1", "-q"),)
"""Writes the optimizer too."""
_STEP3, _UNIVERSAL = "global_step3/", "global_step3_universal/"
_MODEL, _OPTIM = "model_states.pt", "optim_states.pt"


def torch_world() -> list[Subject]:
    """One or more of each of torch's formats."""

    def of(name: str, make: Callable[[Path], None], files: dict[str, str], naive: Any) -> Subject:
        return Subject(name, make, files, naive=naive, readable=STATE)

    z3 = {f"{_STEP3}zero_pp_rank_{r}_mp_rank_00_{_MODEL}": "torch" for r in (0, 1)}
    out = [
        of("torch-bin", tree("torch/strided"), {"pytorch_model.bin": "torch"}, one_file),
        of(
            "torch-bin sharded",
            tree("torch/sharded"),
            {"pytorch_model.bin.index.json": "json", "pytorch_model-00002-of-00003.bin": "torch"},
            one_file,
        ),
        of("torch-bin before 1.6", one("torch/written/weights.old.bin"), {"weights.old.bin": "legacy"}, one_file),
        of(
            "optimizer",
            _trainer,
            {"optimizer.pt": "torch", "pytorch_model.bin": "torch", "scheduler.pt": "torch"},
            trained("pytorch_model.bin", "optimizer.pt"),
        ),
        of("dcp", tree("dcp/uneven/checkpoint"), {".metadata": "pickle", "__0_0.distcp": "slices"}, dcp("model.")),
        of(
            "dcp with an optimizer",
            made("torch/deepspeed/z2", "--to", "dcp", "--sharding-out", 2),
            {".metadata": "pickle", "__1_0.distcp": "slices"},
            dcp("model."),
        ),
        of(
            "megatron-dist",
            small_megatron,
            {".metadata": "pickle", "__0_0.distcp": "slices", "metadata.json": "json"},
            megatron_dist(13, 4),
        ),
        of(
            "megatron",
            made("megatron/dist/llama_tp2", "--to", "megatron", "--only", "model", "--target", "local"),
            {"release/mp_rank_00/model_optim_rng.pt": "torch", "latest_checkpointed_iteration.txt": "pointer"},
            naive_megatron(131),
        ),
        of(
            "dcp of safetensors",
            tree("dcp/hf_mixtral/checkpoint"),
            {
                "shard-00002-model-00001-of-00002.safetensors": "safetensors",
                "shard-00003-model-00002-of-00002.safetensors": "record",
            },
            sharded_safetensors,
        ),
    ]
    for case in ("tp_fsdp", "fsdp1"):
        world = 2 if case == "fsdp1" else 4
        files = {f"model_world_size_{world}_rank_1.pt": "torch", f"optim_world_size_{world}_rank_0.pt": "torch"}
        out.append(of(f"fsdp {case}", tree(f"torch_fsdp/{case}"), files, fsdp))
    for case, files in (
        ("z1", {f"{_STEP3}mp_rank_00_{_MODEL}": "torch", f"{_STEP3}bf16_zero_pp_rank_0_mp_rank_00_{_OPTIM}": "torch"}),
        ("z3", {**z3, f"{_STEP3}bf16_zero_pp_rank_1_mp_rank_00_{_OPTIM}": "torch", "latest": "pointer"}),
        ("z3sgd", {f"{_STEP3}zero_pp_rank_1_mp_rank_00_{_MODEL}": "torch"}),
        ("bf16", {f"{_STEP3}bf16_zero_pp_rank_1_mp_rank_00_{_OPTIM}": "torch"}),
    ):
        out.append(of(f"deepspeed {case}", tree(f"torch/deepspeed/{case}"), files, deepspeed))
    head = f"{_UNIVERSAL}zero/head.weight/"
    for case, files in (
        ("z1", {f"{_UNIVERSAL}mp_rank_00_{_MODEL}": "torch", f"{head}step.pt": "torch", f"{head}exp_avg.pt": "torch"}),
        ("z3", {f"{_UNIVERSAL}zero_pp_rank_0_mp_rank_00_{_MODEL}": "torch"}),
    ):
        more = {f"{_UNIVERSAL}zero/optimizer_state.pt": "torch", "latest_universal": "pointer"}
        out.append(of(f"universal {case}", tree(f"torch/deepspeed/universal_{case}"), files | more, universal))
    for case in ("ddp2", "fsdp2"):
        files = {"model/.metadata": "pickle", "optimizer/.metadata": "pickle", "optimizer/__0_0.distcp": "torch tail"}
        out.append(of(f"bytecheckpoint {case}", tree(f"bytecheckpoint/{case}"), files, bytecheckpoint))
    out.append(
        of(
            "meta",
            made("merge/inputs/base", "--to", "meta", "--tp-out", 2),
            {"params.json": "json", "consolidated.01.pth": "torch"},
            meta,
        )
    )
    return out


def subjects() -> list[Subject]:
    """All of them."""
    return [*checkpoints(), *torch_world(), *others()]
