"""``ckpttool size``: a recipe, ranks, keys and values, training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.options import bytes_of, flag, number, value
from ckpttool.cli.process import reader_may_leave
from ckpttool.cli.values import powers_of_two, sides
from ckpttool.core.words import either, one_of, parse_count

if TYPE_CHECKING:
    from ckpttool.ops.size.devices import Device


@dataclass
class SizeOptions(options.QuantOptions):
    """Which precision, and what is counted."""

    recipe: Annotated[
        str,
        value(
            "--recipe",
            "RECIPE",
            f"{', '.join(choices.SIZED)}; default: as-is.",
            choices.SIZED,
        ),
    ] = ""
    static_act: Annotated[bool, flag("--static-act", "Also a scale for the inputs of each weight.")] = False
    no_mtp: Annotated[bool, flag("--no-mtp", "Omit multi-token-prediction layers.")] = False


def _device(text: str) -> Device | None:
    """A GPU by name, or the memory of any other."""
    from ckpttool.ops.size.devices import device

    return device(text) if text else None


@dataclass
class Counted:
    """What is counted, and how; under the names that Question has for it."""

    config: Annotated[str | None, value("--config", "FILE", "config.json, if SRC has none.")] = None
    vocab_pad: Annotated[int | None, number("--vocab-pad", "Pad the vocabulary to a multiple of N; default: 64.")] = (
        None
    )
    kv: Annotated[str, value("--kv", "DTYPE", f"KV cache: {either(choices.CACHES)}.", choices.CACHES)] = ""
    batch: Annotated[int | None, number("--batch", "Concurrent sequences; default: 1.")] = None
    train: Annotated[bool, flag("--train", "Memory of training instead of serving.")] = False
    zero: Annotated[int | None, value("--zero", "N", "ZeRO stage; default: 1.", min=0, max=3)] = None
    dp: Annotated[int | None, number("--dp", "Data-parallel ranks; default: 1.")] = None
    grad: Annotated[str, value("--grad", "DTYPE", "Gradients: fp32 or bf16; default: fp32.", ("fp32", "bf16"))] = ""
    master: Annotated[str, value("--master", "DTYPE", "Master weights: fp32 or none.", ("fp32", "none"))] = ""
    moment: Annotated[str, value("--moment", "DTYPE", "The two moments: fp32 or bf16.", ("fp32", "bf16"))] = ""
    fp8_transposed: Annotated[bool, flag("--fp8-transposed", "Hold codes twice, for the backward pass.")] = False
    utilization: Annotated[
        float | None, value("--utilization", "SHARE", "Share of the GPU's memory to use; default: 0.9.")
    ] = None
    check_total_size: Annotated[bool, flag("--check-total-size", "Compare index and headers; exit 3 if different.")] = (
        False
    )


_OF_OTHERS = ("pp", "ep", "etp", "select", "rank_pattern", "split", "sharding", "also", "part")
"""Options of a source that no estimate needs: a config.json is enough for one."""


@options.grouped
def size(
    *,
    src: options.Src,
    how: SizeOptions,
    out: options.MeshOptions,
    counted: Counted,
    tokens: Annotated[str, value("--tokens", "N", "Tokens per sequence: 32768 or 32k.")] = "",
    max_model_len: Annotated[
        str, value("--max-model-len", "N", "Tokens that the engine reserves in every layer.")
    ] = "",
    gpu: Annotated[
        str,
        value(
            "--gpu",
            "NAME|SIZE",
            "Does it fit? h100, a100-40gb, mi300x, ..., or 80GB.",
            choices.GPUS,
        ),
    ] = "",
    by: Annotated[str, value("--by", "class|dtype|module|tensor", "Rows of the table.", choices.GROUPINGS)] = "class",
    unit: Annotated[str, value("--unit", "GB|GiB|B", "Unit of sizes; default: kB, MB or GB.", choices.UNITS)] = "",
    source: Annotated[
        options.SourceOptions,
        options.without(*_OF_OTHERS),
    ],
    shown: options.OutputFlags,
) -> None:
    """Estimate disk and GPU memory from a checkpoint or a config.json; with --gpu, does it fit?"""
    from ckpttool.ops.size import Question, answer
    from ckpttool.ops.size.answer import BY
    from ckpttool.ops.size.stored import WantedRecipe
    from ckpttool.report import size as report
    from ckpttool.report.render import show

    opened = source.open_options()
    by, unit = one_of(by, "--by", *BY), one_of(unit, "--unit", *report.UNITS)
    question = Question(
        WantedRecipe(
            how.recipe,
            sides(how.block, "--block"),
            powers_of_two(how.scale_dtype)[0],  # which makes no difference in bytes
            how.quant_method,
            how.static_act,
            tuple(how.keep or ()),
            tuple(how.include or ()),
            how.keep_preset,
            how.edge,
        ),
        mtp=not how.no_mtp,
        max_shard_size=bytes_of(out.max_shard_size),
        tp=out.tp_out,
        pp=out.pp_out,
        ep=out.ep_out,
        etp=out.etp_out,
        pp_layout=out.layers(),
        tokens=parse_count(tokens, "--tokens") if tokens else None,
        max_model_len=parse_count(max_model_len, "--max-model-len") if max_model_len else None,
        device=_device(gpu),
        **vars(counted),
    )
    found = answer(src, opened, question)
    with reader_may_leave():
        show(report.document(found, by=by or "class", unit=unit), as_json=shown.json, quiet=shown.quiet)
    if not found.ok:
        raise typer.Exit(3)
