"""What the options say, in the types that ops take. An invalid value is a UsageError naming its option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import UsageError
from ckpttool.ops.values import one_of, parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.checkpoint import OpenOptions
    from ckpttool.execute import RunOptions
    from ckpttool.targeting.recode import Recoding
    from ckpttool.targeting.target import Target


def numbers(text: str, option: str, *, runs: bool = False) -> tuple[int, ...]:
    """``10,11,11``; with ``runs`` also ``0-3,7``."""
    from ckpttool.mesh import MAX_WORLD

    out: list[int] = []
    try:
        for item in text.split(","):
            first, dash, last = item.partition("-") if runs else (item, "", "")
            run = range(int(first), int(last) + 1) if dash else [int(first)]
            if not run or run[-1] > MAX_WORLD:
                raise ValueError  # 3-0, or a run that would not fit in memory
            out += run
    except ValueError:
        raise UsageError(
            f"{option} `{text}` is not a list of numbers", hint=f"for example {'0-3,7' if runs else '10,11,11'}"
        ) from None
    return tuple(out)


def sides(text: str, option: str) -> tuple[int, int] | None:
    """``128x128``."""
    if not text:
        return None
    rows, cross, columns = text.lower().partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise UsageError(f"{option} `{text}` is not MxN", hint="for example 128x128")
    return int(rows), int(columns)


def precision(dtype: str, option: str) -> str:
    """A dtype for dequantised weights, as the table has it."""
    from ckpttool.targeting.recode import high

    return high(dtype, option) if dtype else ""


def open_options(
    *,
    fmt: str,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    etp: int | None,
    rank_pattern: str,
    family: str,
    replicate: list[str] | None,
    split: list[str] | None,
    sharding: int | None = None,
    also: list[Path] | None = None,
) -> OpenOptions:
    """How SRC is to be read."""
    from ckpttool.formats.base import OpenOptions, ReadOptions

    mesh = ReadOptions(tp, pp, ep, etp, (), rank_pattern, sharding, tuple(also or ()))
    return OpenOptions(fmt, mesh, family, tuple(replicate or ()), tuple(split or ()))


def target_of(
    *,
    to: str,
    tp_out: int | None,
    pp_out: int | None,
    ep_out: int | None,
    etp_out: int | None,
    pp_layout: str,
    ranks_out: str,
    max_shard_size: str,
    dtype: str,
    fuse: bool,
    unfuse: bool,
    vocab_multiple: int,
    sharding_out: int | None = None,
    sharding_version: str = "",
    version: str = "",
    only: list[str] | None = None,
    ema: bool = False,
    native_names: bool = False,
    aoa: Path | None = None,
) -> Target:
    """How DST is to be written."""
    from ckpttool.targeting.components import COMPONENTS
    from ckpttool.targeting.target import Target

    return Target(
        format=to,
        tp=tp_out,
        pp=pp_out,
        ep=ep_out,
        etp=etp_out,
        pp_layout=numbers(pp_layout, "--pp-layout") if pp_layout else (),
        ranks=numbers(ranks_out, "--ranks-out", runs=True) if ranks_out else None,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None,
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=vocab_multiple,
        sharding=sharding_out,
        sharding_version=one_of(sharding_version, "--sharding-version", "v1", "v2"),
        version=version,
        components=tuple(one_of(c, "--only", *COMPONENTS) for c in only or ()),
        ema=ema,
        native_names=native_names,
        aoa=aoa,
    )


def recoding(dequant: str, requant: str) -> Recoding | None:
    """What becomes of quantised weights, None where they stay."""
    from ckpttool.quant.scheme import scheme
    from ckpttool.targeting.recode import Recoding

    if dequant and requant:
        raise UsageError("--dequant and --requant exclude each other")
    if requant:
        recipe, colon, block = requant.partition(":")
        if colon and not block:
            raise UsageError(f"--requant `{requant}` has no block behind its colon", hint="--requant block:64x128")
        return Recoding(scheme(recipe, block=sides(block, "--requant")), like_source=True)
    return Recoding(None, precision(dequant, "--dequant")) if dequant else None


def run_options(*, memory: str, workers: int | None, force: bool, resume: bool, manifest: bool) -> RunOptions:
    """How the plan is to be carried out."""
    from ckpttool.execute import RunOptions
    from ckpttool.execute.options import default_processes, default_workers

    size = parse_size(memory, "--memory")
    if size < 4 << 20:
        raise UsageError(f"--memory {memory} is too small", hint="4MiB is the least, 64MiB the default")
    return RunOptions(
        memory=size,
        workers=workers or default_workers(),
        processes=workers or default_processes(),
        force=force,
        resume=resume,
        manifest=manifest,
    )
