"""``ckpttool fp8-size``: a recipe, ranks, keys and values, training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.values import numbers, open_options, sides
from ckpttool.errors import UsageError
from ckpttool.ops.values import one_of, parse_count, parse_size
from ckpttool.words import either

if TYPE_CHECKING:
    from ckpttool.ops.fp8_size.devices import Device

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", readable=False, help="config.json of a SRC that has none.", show_default=False
    ),
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help=f"Precision: {either(choices.SIZED)}; default: block, as-is when quantised.",
        show_default=False,
        autocompletion=choices.completes(*choices.SIZED),
    ),
]
StaticAct = Annotated[bool, typer.Option("--static-act", help="Also one scale for the inputs of each weight.")]
KeepPreset = Annotated[
    str,
    typer.Option(
        "--keep-preset",
        metavar="NAME",
        help=f"Which layers stay in high precision: {either(choices.PRESETS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.PRESETS),
    ),
]
NoMtp = Annotated[bool, typer.Option("--no-mtp", help="Without the multi-token-prediction layers.")]
VocabPad = Annotated[
    int | None,
    typer.Option(
        "--vocab-pad", min=1, metavar="N", help="Ranks pad the vocabulary to this; default: 64.", show_default=False
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv",
        metavar="DTYPE",
        help=f"Add the KV cache: {either(choices.CACHES)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.CACHES),
    ),
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="N", help="Tokens of a sequence: 32768 or 32k.", show_default=False)
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Sequences; default: 1.", show_default=False)
]
MaxModelLen = Annotated[
    str,
    typer.Option(
        "--max-model-len",
        metavar="N",
        help="Tokens that an engine reserves in every layer, whatever its window.",
        show_default=False,
    ),
]
Train = Annotated[bool, typer.Option("--train", help="What training holds instead of serving.")]
Zero = Annotated[
    int | None,
    typer.Option("--zero", metavar="N", min=0, max=3, help="Stage of ZeRO; default: 1.", show_default=False),
]
DataParallel = Annotated[
    int | None, typer.Option("--dp", min=1, metavar="N", help="Data-parallel ranks; default: 1.", show_default=False)
]
Grad = Annotated[
    str,
    typer.Option(
        "--grad",
        metavar="DTYPE",
        help="Gradients: fp32 (default) or bf16.",
        show_default=False,
        autocompletion=choices.completes("fp32", "bf16"),
    ),
]
Master = Annotated[
    str,
    typer.Option(
        "--master",
        metavar="DTYPE",
        help="Master weights: fp32 or none.",
        show_default=False,
        autocompletion=choices.completes("fp32", "none"),
    ),
]
Moment = Annotated[
    str,
    typer.Option(
        "--moment",
        metavar="DTYPE",
        help="The two moments: fp32 or bf16.",
        show_default=False,
        autocompletion=choices.completes("fp32", "bf16"),
    ),
]
Fp8Transposed = Annotated[
    bool, typer.Option("--fp8-transposed", help="Codes are held a second time, for the backward pass.")
]
DeviceMem = Annotated[
    str,
    typer.Option(
        "--device-mem",
        metavar="SIZE",
        help="Memory of a device, such as 80GB; exit 3 if it is not enough.",
        show_default=False,
    ),
]
Gpu = Annotated[
    str,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="The same for a GPU by name: h100, a100-40gb, mi300x, ...",
        show_default=False,
        autocompletion=choices.completes(*choices.GPUS),
    ),
]
By = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="class|dtype|module|tensor",
        help="Rows of the table.",
        autocompletion=choices.completes(*choices.GROUPINGS),
    ),
]
Unit = Annotated[
    str,
    typer.Option(
        "--unit",
        metavar="GB|GiB|B",
        help="Unit of sizes; default: GB and GiB.",
        show_default=False,
        autocompletion=choices.completes(*choices.UNITS),
    ),
]
CheckTotalSize = Annotated[
    bool, typer.Option("--check-total-size", help="Compare the index with the headers; exit 3 if they differ.")
]


def _device(memory: str, name: str) -> Device | None:
    """--device-mem or --gpu; a number of gigabytes without a unit is an error and not a number of bytes."""
    from ckpttool.ops.fp8_size.devices import Device, gpu

    if memory and name:
        raise UsageError("--gpu and --device-mem exclude each other", hint="--gpu says how much memory it has")
    if name:
        return gpu(name)
    if not memory:
        return None
    size = parse_size(memory, "--device-mem")
    if size < 1000:
        raise UsageError(f"--device-mem {memory} is {size} bytes", hint=f"with a unit: {memory}GB or {memory}GiB")
    return Device("", size)


def fp8_size(
    src: options.Src,
    config: ConfigFile = None,
    recipe: Recipe = "",
    block: options.BlockSides = "",
    scale_dtype: options.ScaleDtype = "",
    quant_method: options.QuantMethod = "",
    static_act: StaticAct = False,
    edge: options.Edge = "",
    keep: options.KeepHigh = None,
    include: options.Include = None,
    keep_preset: KeepPreset = "",
    no_mtp: NoMtp = False,
    max_shard_size: options.MaxShard = "",
    tp_out: options.TpOut = None,
    pp_out: options.PpOut = None,
    ep_out: options.EpOut = None,
    etp_out: options.EtpOut = None,
    pp_layout: options.PpLayout = "",
    vocab_pad: VocabPad = None,
    kv: KvDtype = "",
    tokens: Tokens = "",
    batch: Batch = None,
    max_model_len: MaxModelLen = "",
    train: Train = False,
    zero: Zero = None,
    dp: DataParallel = None,
    grad: Grad = "",
    master: Master = "",
    moment: Moment = "",
    fp8_transposed: Fp8Transposed = False,
    device_mem: DeviceMem = "",
    gpu: Gpu = "",
    check_total_size: CheckTotalSize = False,
    by: By = "class",
    unit: Unit = "",
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    from_: options.From = "",
    rank_pattern: options.RankPattern = "",
    family: options.FamilyName = "",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Estimate the disk and GPU memory of SRC (a checkpoint or a config.json) in FP8, with its KV cache."""
    from ckpttool import report
    from ckpttool.ops.fp8_size import Question, answer
    from ckpttool.ops.fp8_size.answer import BY
    from ckpttool.ops.fp8_size.stored import Wanted

    opened = open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=None,
        split=None,
    )
    by, unit = one_of(by, "--by", *BY), one_of(unit, "--unit", *report.UNITS)
    question = Question(
        Wanted(
            recipe,
            sides(block, "--block"),
            scale_dtype,
            quant_method,
            static_act,
            tuple(keep or ()),
            tuple(include or ()),
            keep_preset,
            edge,
        ),
        config=config,
        mtp=not no_mtp,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None,
        tp=tp_out,
        pp=pp_out,
        ep=ep_out,
        etp=etp_out,
        pp_layout=numbers(pp_layout, "--pp-layout") if pp_layout else (),
        vocab_pad=vocab_pad,
        kv=kv,
        tokens=parse_count(tokens, "--tokens") if tokens else None,
        batch=batch,
        max_model_len=parse_count(max_model_len, "--max-model-len") if max_model_len else None,
        train=train,
        zero=zero,
        dp=dp,
        grad=grad,
        master=master,
        moment=moment,
        fp8_transposed=fp8_transposed,
        device=_device(device_mem, gpu),
        check_total_size=check_total_size,
    )
    found = answer(src, opened, question)
    report.show_fp8_size(found, by=by or "class", unit=unit, as_json=json, quiet=quiet)
    if not found.ok:
        raise typer.Exit(3)
