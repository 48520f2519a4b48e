"""Every checkpoint with an optimizer through every format that holds one, and back: model, masters, moments and steps.

Sources are whatever trainers wrote into fixtures (and runs that are put down by hand). What comes back is read with
numpy from ``ranks``, in the words of whoever wrote it, and brought to torch's words here: by names, and by a loop that
multiplies betas. It is compared bit for bit with what SRC becomes when it goes to ``ranks`` at once.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.formats.ranks import RankFiles
from ckpttool.formats.registry import READERS, WRITERS
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.tensorfile import Raw, Tensors, assert_same, read_all
from tests.helpers.training_run import groups, names, save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ONE = ("--tp-out", 1, "--pp-out", 1, "--ep-out", 1)
Betas = tuple[float, float]
Target = tuple[object, ...]


class Source(NamedTuple):
    """A checkpoint of fixtures, or one that is put down by hand."""

    betas: Betas | None = None
    """Of the run, where its files do not say them."""
    family: bool = True
    """Whether its model is of a family that says how it is cut."""
    experts: bool = False
    adapter: bool = False
    wrapped: bool = False
    """Its names begin with DDP's ``module.``, which readers of torch's formats leave out."""
    float8: bool = False
    paddle: bool = False
    """Whose words its states have."""
    megatron: str = ""
    """Why it is refused in Megatron's formats."""
    tied: bool = False
    """Its head is the embedding, whose state has the head's name; Megatron knows the embedding only."""
    one_layer: bool = False


ADAM, LONG = (0.9, 0.999), (0.9, 0.95)
BY_HAND = {
    "by hand: steps": Source(megatron="counts the steps once for all parameters, and they differ: 7 of"),
    "by hand: betas": Source(),
    "by hand: float32": Source(LONG),
    "by hand: frozen": Source(megatron="and some of them have none"),
}
SOURCES = BY_HAND | {
    "bytecheckpoint/ddp2": Source(family=False, wrapped=True),
    "bytecheckpoint/fsdp2": Source(family=False, one_layer=True),
    "dcp/hsdp2x2_llama/checkpoint": Source(),
    "dcp/titan_llama3/checkpoint": Source(LONG),
    "megatron/dist/llama_tp2": Source(ADAM),
    "megatron/legacy/llama_pp2_vp2": Source(ADAM),
    "megatron/legacy/qwen2_pp2_tied": Source(ADAM),
    "megatron/legacy/qwen3_moe_tp2_ep2": Source(ADAM, experts=True),
    "megatron/legacy/qwen3_tp2_plain": Source(ADAM),
    "paddle_flex/tp2_dp2": Source(ADAM, family=False, paddle=True, float8=True),
    "paddle_flex/tp2_dp2_replicas": Source(ADAM, family=False, paddle=True, float8=True),
    "paddle_unified/nlp_llama_bf16_tp2_ignore_merge": Source(ADAM, paddle=True),
    "paddle_unified/nlp_llama_bf16_tp2_quantO1": Source(ADAM, paddle=True),
    "paddle_unified/nlp_llama_bf16_tp2_skip_save_model_weight": Source(ADAM, paddle=True),
    "paddle_unified/nlp_llama_lora_bf16_tp1": Source(ADAM, paddle=True, adapter=True),
    "paddle_unified/nlp_llamafused_bf16_tp2": Source(ADAM, paddle=True),
    "paddle_unified/nlp_qwen2moe_bf16_tp2": Source(ADAM, paddle=True, experts=True),
    "paddle_unified/pf041_qwen2_bf16_tp2": Source(ADAM, paddle=True),
    "paddle_unified/pf12_llama_bf16_sharding2_nonmerge_optimshard2": Source(ADAM, paddle=True),
    "paddle_unified/pf12_llama_bf16_sharding2_split_param": Source(ADAM, paddle=True),
    "paddle_unified/pf12_qwen2tied_bf16_tp1": Source(ADAM, paddle=True, tied=True),
    "paddle_zcc/ep2_tp2_sharding2_ema": Source(ADAM, paddle=True, experts=True, megatron="no layout rule names"),
    "paddle_zcc/nlp_tp2": Source(ADAM, paddle=True),
    "paddle_zcc/sharding2_v1": Source(ADAM, paddle=True),
    "torch/deepspeed/ams": Source(family=False),
    "torch/deepspeed/bf16": Source(family=False),
    "torch/deepspeed/rr": Source(family=False),
    "torch/deepspeed/universal_z1": Source(family=False),
    "torch/deepspeed/universal_z3": Source(family=False),
    "torch/deepspeed/z0": Source(family=False),
    "torch/deepspeed/z1": Source(family=False),
    "torch/deepspeed/z2": Source(ADAM, family=False),
    "torch/deepspeed/z3": Source(family=False),
    "torch/deepspeed/z3sgd": Source(family=False),
    "torch/train": Source(family=False),
    "torch_fsdp/fsdp1": Source(family=False, one_layer=True),
    "torch_fsdp/tp_fsdp": Source(family=False, one_layer=True),
    "torch_fsdp/uneven": Source(family=False, one_layer=True),
}
TARGETS: Sequence[Target] = [
    ("ranks", *ONE),
    ("ranks", "--tp-out", 2, "--pp-out", 2),
    ("unified", *ONE),
    ("hybrid", *ONE),
    ("hybrid", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 2),
    ("hybrid", "--tp-out", 1, "--pp-out", 2, "--sharding-out", "2:v1"),
    ("zcc", *ONE, "--sharding-out", 2),
    ("flex", *ONE),
    ("flex", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 2),
    ("dcp", "--sharding-out", 3),
    ("universal",),
    ("megatron", *ONE),
    ("megatron", "--tp-out", 2, "--pp-out", 2),
    ("megatron-dist", *ONE),
    ("megatron-dist", "--tp-out", 2, "--pp-out", 2, "--target", "local"),
]
MAKES_MASTERS = ("hybrid", "zcc", "unified", "universal", "megatron", "megatron-dist")
"""Formats that store a weight once make masters of the weights that have none."""
NLP = "paddle_unified/nlp_"
"""Saves of PaddleNLP, which formats that it writes stay; flex is PaddleFormers' own."""


OTHERS = (
    "megatron/dist/qwen2_buckets/",  # flat buffers, which nothing in it explains
    "megatron/legacy/qwen3_moe_",  # other forms of the same, see test_megatron_legacy.py
    "megatron/nemo/",  # the chunks of megatron/dist/llama_tp2 in other directories
    "paddle_pickles/",  # single files, which say nothing of components
    "paddle_unified/pf12_llama_bf16_tp2/",  # arguments of a trainer whose save failed
    "torch/deepspeed/moe/",  # its optimizer is refused: no file says whose state of the experts it is
    "torch/written/step.bin",  # its optimizer is refused: state of another shape
)
STATES = (b"exp_avg", b"moment1_0", b"momentum_buffer", b"velocity_0", b"square_avg")


def test_every_optimizer_of_fixtures_is_here() -> None:
    """A new one has to be added to SOURCES."""
    known = (*(f"{name}/" for name in SOURCES), *OTHERS)
    truth = (".json", ".npz", ".md", ".pdmodel", ".safetensors")
    for path in FIXTURES.rglob("*"):
        name = str(path.relative_to(FIXTURES))
        if name.startswith(known) or not path.is_file():
            continue
        if path.suffix in truth and not (path.parent / "config.json").exists():
            continue
        assert not any(word in path.read_bytes() for word in STATES), name


def place(name: str, folder: Path) -> Path:
    """Where the source lies; one that is put down by hand is written into ``folder``."""
    if name not in BY_HAND:
        return FIXTURES / name
    what = name.removeprefix("by hand: ")
    if what == "steps":
        return save_run(folder, names(step={"lm_head.weight": 3}), groups=groups(LONG))
    if what == "betas":
        return save_run(folder, names(), groups=groups(LONG, (0.8, 0.99)))
    if what == "float32":
        return save_run(folder, names(step=900, masters=False))
    # Frozen are all of the second stage, and what Paddle's models fuse with it.
    trained = {n: a for n, a in names().items() if "/" not in n or "layers.0." in n or "embed" in n}
    return save_run(folder, trained, groups=groups(LONG))


def held(src: Path, dst: Path, dialect: str, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """What ``src`` holds, with states as it calls them, and parameters as ``dialect`` does."""
    with monkeypatch.context() as patch:
        patch.setattr(RankFiles, "dialect", dialect)
        reshard(src, dst, "--to", "ranks", *ONE)
    return read_all(dst, "rank-*")


@cache
def steps_of(power: bytes, beta: float) -> int:
    """How many steps lead to a power of Paddle's, which multiplies in float32."""
    now = np.float32(beta)
    for steps in range(1_000):
        if now.tobytes() == power:
            return steps
        now *= np.float32(beta)
    message = f"{np.frombuffer(power, '<f4')} is no power of {beta}"
    raise AssertionError(message)


PADDLE = {
    "moment1_0": "exp_avg",
    "moment2_0": "exp_avg_sq",
    "moment2_max_0": "max_exp_avg_sq",
    "velocity_0": "momentum_buffer",
}


def in_torchs_words(tensors: Tensors, betas: Callable[[str], Betas | None]) -> Tensors:
    """States under torch's names, and steps in place of powers of beta, of which both must say the same.

    Powers of unknown betas stay.
    """
    out: Tensors = {}
    for name, raw in tensors.items():
        path, _, state = name.rpartition("/")
        if not name.startswith("optimizer/"):
            out[name] = raw
        elif state in ("beta1_pow_acc_0", "beta2_pow_acc_0") and (known := betas(path.removeprefix("optimizer/"))):
            assert raw.dtype == "F32"
            steps = steps_of(raw.bits.tobytes(), known[state.startswith("beta2")])
            step = Raw("F32", np.array(steps, "<f4").view("<u4"))
            assert out.setdefault(f"{path}/step", step).bits == step.bits
        else:
            out[f"{path}/{PADDLE.get(state, state)}"] = raw
    return out


def refusal(source: Source, target: Target) -> str:
    """Why a target is refused; "" where it is not."""
    capabilities = WRITERS[str(target[0])].capabilities
    if source.adapter and "adapter" not in capabilities.components:
        return "the source is an adapter"
    megatron = WRITERS[str(target[0])].dialect == "megatron"
    cut = any(o in ("--tp-out", "--pp-out") and n != 1 for o, n in pairwise(target))
    if source.one_layer and ("--pp-out", 2) in pairwise(target) and not megatron:
        return "1 layer cannot fill 2 pipeline stages"
    if cut and not source.family and not megatron:
        return "cut depends on the model"
    if source.float8 and target[0] == "hybrid":
        return "they do not record dtypes"
    if not source.family and source.paddle and capabilities.states == "torch":
        return "which weights Paddle stores transposed depends on the model"
    if megatron:
        return source.megatron if source.family else "the names of megatron depend on the model"
    return ""


@pytest.mark.sample(
    "by hand: steps-ranks --tp-out 2 --pp-out 2",
    "by hand: betas-unified --tp-out 1 --pp-out 1 --ep-out 1",
    "by hand: frozen-hybrid --tp-out 1 --pp-out 2 --sharding-out 2:v1",
    "by hand: float32-universal",
    "by hand: frozen-universal",
    "bytecheckpoint/fsdp2-dcp --sharding-out 3",
    "dcp/titan_llama3/checkpoint-flex --tp-out 2 --pp-out 1 --sharding-out 2",
    "bytecheckpoint/fsdp2-ranks --tp-out 2 --pp-out 2",
    "bytecheckpoint/ddp2-megatron --tp-out 1 --pp-out 1 --ep-out 1",
    "megatron/legacy/qwen3_moe_tp2_ep2-unified --tp-out 1 --pp-out 1 --ep-out 1",
    "megatron/legacy/qwen3_moe_tp2_ep2-hybrid --tp-out 2 --pp-out 1 --sharding-out 2",
    "paddle_flex/tp2_dp2-dcp --sharding-out 3",
    "paddle_unified/nlp_qwen2moe_bf16_tp2-flex --tp-out 1 --pp-out 1 --ep-out 1",
    "paddle_unified/pf12_qwen2tied_bf16_tp1-hybrid --tp-out 1 --pp-out 2 --sharding-out 2:v1",
    "torch/deepspeed/z1-flex --tp-out 2 --pp-out 1 --sharding-out 2",
    "paddle_unified/nlp_llama_lora_bf16_tp1-ranks --tp-out 1 --pp-out 1 --ep-out 1",
    "paddle_zcc/sharding2_v1-dcp --sharding-out 3",
    "torch/deepspeed/ams-zcc --tp-out 1 --pp-out 1 --ep-out 1 --sharding-out 2",
    "torch/deepspeed/z3sgd-hybrid --tp-out 1 --pp-out 1 --ep-out 1",
    "torch_fsdp/fsdp1-universal",
    "by hand: betas-megatron --tp-out 2 --pp-out 2",
    "by hand: frozen-megatron --tp-out 1 --pp-out 1 --ep-out 1",
    "megatron/legacy/llama_pp2_vp2-megatron --tp-out 2 --pp-out 2",
    "paddle_unified/pf12_qwen2tied_bf16_tp1-megatron --tp-out 2 --pp-out 2",
    "by hand: betas-megatron-dist --tp-out 2 --pp-out 2 --target local",
    "megatron/dist/llama_tp2-megatron-dist --tp-out 1 --pp-out 1 --ep-out 1",
    "paddle_unified/pf12_qwen2tied_bf16_tp1-megatron-dist --tp-out 2 --pp-out 2 --target local",
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: " ".join(map(str, t)))
@pytest.mark.parametrize("name", SOURCES)
def test_there_and_back(name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, src = SOURCES[name], place(name, tmp_path / "run")
    capabilities = WRITERS[str(target[0])].capabilities
    said = open_checkpoint(src).stored.training

    def betas(parameter: str) -> Betas | None:
        return (said.betas(parameter) if said is not None else None) or source.betas

    to = ["--to", *target, "--verify"]
    if source.betas and capabilities.states == ("torch" if source.paddle else "paddle"):
        to += ["--betas", "{},{}".format(*source.betas)]
    if source.experts and capabilities.meshes:
        to += ["--ep-out", 1]
    if why := refusal(source, target):
        assert why in refused(src, tmp_path / "there", *to, code=2 if source.adapter else 1)
        return
    done = ckpttool("reshard", src, tmp_path / "there", *to)
    if "--unfuse" in done.err:  # a frozen parameter that Paddle's models fuse with one that is not
        done = ckpttool("reshard", src, tmp_path / "there", *to, "--unfuse")
    assert done.code == 0, done.err
    dialect = "hf" if source.family or not source.paddle else ""
    want = in_torchs_words(held(src, tmp_path / "direct", dialect, monkeypatch), betas)
    assert any(n.startswith("optimizer/") for n in want)
    if source.tied and WRITERS[str(target[0])].dialect == "megatron":
        del want["lm_head.weight"]
        want = {n.replace("/lm_head.weight", "/model.embed_tokens.weight"): raw for n, raw in want.items()}
    if source.tied and capabilities.optimizer_shards and ("--pp-out", 2) in pairwise(target):  # of the last stage too
        want |= {n.replace("/lm_head.", "/model.embed_tokens."): raw for n, raw in want.items() if "/lm_head." in n}
    if source.experts and capabilities.states == "paddle" and (not name.startswith(NLP) or target[0] == "flex"):
        assert route_in_float32(want, twice=capabilities.fp32_masters == "added") == (
            "the model's weights, which the trainer keeps in float32" in done.err
        )
    got = in_torchs_words(held(tmp_path / "there", tmp_path / "back", dialect, monkeypatch), betas)
    for n in sorted(got.keys() - want.keys()):
        if n.startswith("master_weights/") and target[0] in MAKES_MASTERS:
            weight = want[n.removeprefix("master_weights/")]
            assert_same({n: got.pop(n)}, {n: as_float32(weight)})
            assert weight.dtype == "F32" or "float32 of the model weights (exact)" in done.err
    if capabilities.fp32_masters == "dropped":
        want = {n: raw for n, raw in want.items() if n in got or not is_weight_itself(n, want)}
    if "ema" not in capabilities.components:
        want = {n: raw for n, raw in want.items() if not n.startswith("ema/")}
    if source.wrapped and capabilities.states == "torch":
        want = {n.replace("module.", "", 1): raw for n, raw in want.items()}
    assert_same(got, want)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_routers_come_back_from_paddle_to_megatron(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaddleFormers has them in float32 without masters, Megatron in the dtype of all parameters with masters.

    Its ``TopKRouter`` is of ``params_dtype``: a float32 one would be in a buffer that no run has.
    """
    src, betas = FIXTURES / "megatron/legacy/qwen3_moe_tp2_ep2", ("--betas", "0.9,0.999")
    reshard(src, tmp_path / "flex", "--to", "flex", *ONE, *betas)
    done = reshard(tmp_path / "flex", tmp_path / "back", "--to", to, *ONE, *betas, "--verify")
    assert "2 float32 weights rounded to BF16, because this format has one dtype for all parameters" in done.err
    want = held(src, tmp_path / "direct", "hf", monkeypatch)
    assert want["model.layers.0.mlp.gate.weight"].dtype == "BF16"
    assert_same(held(tmp_path / "back", tmp_path / "of back", "hf", monkeypatch), want)


def route_in_float32(tensors: Tensors, *, twice: bool) -> bool:
    """Make routers what PaddleFormers has of them; whether their masters were kept apart before.

    Its ``Qwen3MoeSparseMoeBlock`` makes the router in float32 in a model of any dtype, and its optimizer makes masters
    of narrow parameters only. Unified checkpoints (``twice``) have masters of float32 weights too.
    """
    names = [n for n in tensors if n.endswith(".mlp.gate.weight") and f"master_weights/{n}" in tensors]
    for n in names:
        assert tensors[n].dtype == "BF16"
        tensors[n] = tensors[f"master_weights/{n}"] if twice else tensors.pop(f"master_weights/{n}")
        assert tensors[n].dtype == "F32"
    return bool(names)


def is_weight_itself(name: str, tensors: Tensors) -> bool:
    """Whether it is the master of a float32 weight."""
    weight = tensors.get(name.removeprefix("master_weights/")) if name.startswith("master_weights/") else None
    return weight is not None and weight.dtype == "F32"


def as_float32(raw: Raw) -> Raw:
    """The same numbers; bfloat16 is the upper half of a float32."""
    return raw if raw.dtype == "F32" else Raw("F32", raw.bits.astype("<u4") << 16)


def table_of_the_docs() -> dict[str, dict[str, str]]:
    """The table of docs/formats/contents.md: what each format holds beside weights, by format and column."""
    text = (FIXTURES.parent / "docs/formats/contents.md").read_text().partition("## Who holds what\n")[2]
    head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|"))
    found: dict[str, dict[str, str]] = {}
    for first, *cells in rows:
        if len(cells) != len(head) - 1:
            break  # the next table
        found |= {name: dict(zip(head[1:], cells, strict=True)) for name in re.findall(r"`([\w-]+)`", first)}
    return found


def test_the_table_of_the_docs_is_true() -> None:
    table = table_of_the_docs()
    assert table.keys() == READERS.keys()
    for name, row in table.items():
        capabilities = READERS[name].capabilities
        holds = {c for c in ("adapter", "master_weights", "optimizer", "ema") if c in capabilities.components}
        holds |= {"optimizer"} if capabilities.optimizer_beside else set()
        assert {c for c in row if not row[c].startswith("-")} & {"adapter", "ema"} == holds & {"adapter", "ema"}, name
        assert row["master weights"].startswith("yes") == ("master_weights" in holds), name
        assert (row["optimizer state"] != "-") == (row["step"] != "-") == ("optimizer" in holds), name
        assert row["optimizer state"].startswith("Paddle's") == (capabilities.states == "paddle"), name
        assert row["step"].startswith("powers") == (capabilities.states == "paddle"), name
        assert (row["`param_groups`"] != "-") == ("optimizer" in holds and capabilities.states != "paddle"), name
        assert ("not of float32" in row["master weights"]) == (capabilities.fp32_masters == "dropped"), name


@pytest.mark.parametrize("name", [n for n, w in WRITERS.items() if "optimizer" in w.capabilities.components])
def test_groups_and_schedules_go_where_the_docs_say(name: str, tmp_path: Path) -> None:
    """A schedule of torch is nothing to Paddle's trainers, and a note says that it is left out."""
    schedule = {"base_lrs": [0.001], "last_epoch": 7}
    src = save_run(tmp_path / "run", names(), groups=groups(LONG), plain={"lr_scheduler": schedule})
    more = ("--sharding-out", 2) if name == "zcc" else ()
    done = reshard(src, tmp_path / "out", "--to", name, *ONE[:2], *more)
    held = open_checkpoint(tmp_path / "out").stored.training
    assert (held is not None and [dict(g.values) for g in held.groups] == [g["values"] for g in groups(LONG)]) == (
        table_of_the_docs()[name]["`param_groups`"] == "yes"
    )
    if WRITERS[name].capabilities.states == "paddle":
        assert "param_groups, lr_scheduler left out: Paddle's trainers take them from their own arguments" in done.err
    elif "plain values" in table_of_the_docs()[name]["learning-rate schedule"]:
        assert held is not None
        assert held.plain["lr_scheduler"] == schedule
    else:
        assert "left out, because Megatron has no place for it: lr_scheduler" in done.err


@pytest.mark.parametrize("to", ["unified", "hybrid", "zcc", "flex"])
def test_a_schedule_of_paddle_comes_back(to: str, tmp_path: Path) -> None:
    """Formats of torch have no such file, and its content goes through them."""
    schedule = {"last_epoch": 2, "last_lr": 0.25}
    src = save_run(tmp_path / "run", names(), groups=groups(LONG), plain={"LR_Scheduler": schedule})
    more = ("--sharding-out", 2) if to == "zcc" else ()
    done = reshard(src, tmp_path / "out", "--to", to, *ONE[:2], *more)
    assert pickle.loads((tmp_path / "out/scheduler.pdparams").read_bytes()) == schedule  # noqa: S301 - ours
    assert "scheduler.pdparams" not in done.err
    assert "LR_Scheduler" not in done.err
    if to == "hybrid":
        optimizer = pickle.loads((tmp_path / "out/optimizer.pdopt").read_bytes())  # noqa: S301 - ours
        assert optimizer["LR_Scheduler"] == schedule
    reshard(src, tmp_path / "model", "--to", to, *ONE[:2], *more, "--only", "model")
    assert not (tmp_path / "model/scheduler.pdparams").exists()
