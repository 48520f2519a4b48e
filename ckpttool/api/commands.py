"""The commands that need no open checkpoint, as functions with the same meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, cast

from ckpttool.answers.findings import CheckResult
from ckpttool.api.arguments import counts, layers, nbytes, pair_of_betas, several, sides, whole
from ckpttool.api.border import public
from ckpttool.api.checkpoint import Checkpoint, open_, report_on
from ckpttool.api.plans import Conversion, Dropping, Merging, watching
from ckpttool.api.results import Report, Size
from ckpttool.core.files import AnyPlace
from ckpttool.core.words import one_of, parse_count
from ckpttool.errors import UsageError
from ckpttool.execute import Progress
from ckpttool.execute.machines.each import machines
from ckpttool.formats.base import OpenOptions, ReadOptions
from ckpttool.ops.convert_json.convert import from_safetensors, to_safetensors
from ckpttool.ops.inspect.check import check as look
from ckpttool.ops.inspect.diff import DiffResult
from ckpttool.ops.merge import MergeOptions, prepare, prepare_one
from ckpttool.ops.size.answer import Question, answer
from ckpttool.ops.size.devices import Device
from ckpttool.ops.size.devices import gpu as named_gpu
from ckpttool.ops.size.stored import WantedRecipe
from ckpttool.recipe.flags import asked
from ckpttool.storage.place import parse_place
from ckpttool.targeting.recode import Recoding, high
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target

Source = AnyPlace | Checkpoint
"""Where a checkpoint lies (``hf://org/model`` is a place, too), what ``run`` has written, or one that is open."""


@public
def merge(
    sources: Source | Sequence[Source],
    *,
    method: str = "",
    weights: Sequence[float] | str | None = None,
    base: Source | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    rng: Literal["counter", "mergekit"] = "counter",
    missing: Literal["", "base", "skip"] = "",
    vocab: Literal["", "min", "max", "base"] = "",
    allow_nonfinite: bool = False,
    card: bool = False,
    report: str | PathLike[str] | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    pp_layout: Sequence[int] | str = (),
    to: str = "",
    dtype: str = "",
    dequant: str = "",
    fuse: bool = False,
    unfuse: bool = False,
    max_shard_size: int | str | None = None,
    vocab_multiple: int | None = None,
    target: str = "",
    betas: Sequence[float] | str | None = None,
    remove: Sequence[str] = (),
    keep: Sequence[str] = (),
    rename: Sequence[str] = (),
    format: str = "",  # noqa: A002 - the word of ``open``
    rank_pattern: str = "",
    family: str = "",
    part: Sequence[str] = (),
) -> Merging:
    """Plan what ``ckpttool merge`` does; nothing is written.

    Args:
        sources: checkpoints, each ``PATH``, ``PATH+ADAPTER`` or an open one; one recipe of mergekit (YAML) or Paddle
            (JSON); or one checkpoint whose shards become whole tensors.
        method: linear if there are weights, else average; ``ckpttool merge --list-methods`` names them all.
        weights: a number for each source (for each adapter, where one source has several): [0.6, 0.4] or ``"0.6,0.4"``.
        base: the model that the others were made from.
        params: of the method: one value for all sources, or a sequence with one for each.
        seed: of random methods.
        rng: whose random numbers: ours, or those of mergekit and torch.
        missing: what happens to tensors that some sources lack.
        vocab: how vocabularies of different sizes are cut or extended.
        allow_nonfinite: write NaN and infinities instead of refusing them.
        card: write a model card, README.md.
        report: a file of this machine for an HTML page about what came from where, and how far the output is from each
            source; ``run`` reads both once more for it. Its numbers are ``Written.distances``.
        tp: tensor-parallel ranks of the output; pp, ep, etp, pp_layout, to, dtype, dequant, fuse, unfuse,
            max_shard_size, vocab_multiple, target, betas, remove, keep and rename are those of ``Checkpoint.reshard``.
        format: of the sources; rank_pattern, family and part are those of ``open``.

    Raises:
        UsageError: a method, parameter or option that does not go together with the others.
        ConflictError: models that do not fit together.
    """
    opened = OpenOptions(format, ReadOptions(rank_pattern=rank_pattern, parts=several(part, "part")), family)
    given = list(sources) if isinstance(sources, list | tuple) else [cast("Source", sources)]
    if not given:
        raise UsageError("sources is empty", hint="pass one or more checkpoints: merge([a, b])")
    names = [_named(s, opened) for s in given]
    wanted = Target(
        format=to,
        **counts(tp=tp, pp=pp, ep=ep, etp=etp),
        pp_layout=layers(pp_layout),
        max_shard_size=nbytes(max_shard_size, "max_shard_size"),
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=whole(vocab_multiple, "vocab_multiple"),
        version=target,
        betas=pair_of_betas(betas),
    )
    selection = Selection(several(remove, "remove"), several(keep, "keep"), several(rename, "rename"))
    precision = high(dequant, "dequant") if dequant else ""
    choices = MergeOptions(
        one_of(missing, "missing", "base", "skip"),
        one_of(vocab, "vocab", "min", "max", "base"),
        allow_nonfinite,
        whole(seed, "seed", 0),
        one_of(rng, "rng", "counter", "mergekit"),
        card,
        precision,
    )
    if params is not None and not isinstance(params, Mapping):
        raise UsageError(f"params is {params!r}", hint="pass names and values: {'density': 0.5}")
    recipe = asked(
        names,
        method=method,
        weights=_numbers(weights),
        base="" if base is None else _named(base, opened),
        params=[f"{name}={_words(value)}" for name, value in (params or {}).items()],
    )
    page = None if report is None else Path(report)
    if recipe is None:
        recoding = Recoding(None, precision) if precision else None
        return Merging(prepare_one(names[0], opened, wanted, selection, choices, recoding), page)
    return Merging(prepare(recipe, opened, wanted, selection, choices), page)


def _named(source: Source, opened: OpenOptions) -> str:
    """The path of a source. Raises UsageError when it has been opened otherwise than the merge will open it."""
    if not isinstance(source, Checkpoint):
        return fspath(source) if isinstance(source, PathLike) else str(source)
    if source.options not in (OpenOptions(), opened):
        raise UsageError(
            "this source was opened with its own options, and merge opens sources itself",
            where=str(source.path),
            hint="give format, rank_pattern and family to merge; or reshard it first",
        )
    return str(source.path)


def _numbers(weights: Any) -> str:
    """Weights as the command line has them. Raises UsageError for what is not a number."""
    if weights is None:
        return ""
    found: list[float] = []
    with suppress(TypeError, ValueError):
        found = [float(w) for w in (weights.split(",") if isinstance(weights, str) else weights)]
    if not found:
        raise UsageError(f"weights are {weights!r}", hint="pass a number for each source: [0.6, 0.4]")
    return ",".join(map(repr, found))


def _words(value: Any) -> str:
    """A parameter as the command line has it."""
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_words, value))
    return str(value)


@public
def drop_keys(src: Source, *patterns: str, keep: Sequence[str] = (), link: bool = False) -> Dropping:
    """Plan ``src`` without some of its tensors: what ``ckpttool drop-keys`` does.

    Args:
        src: the checkpoint.
        patterns: globs or ``re:`` patterns of names that go.
        keep: patterns of the only tensors to keep.
        link: files that stay as they are share their bytes with ``src``.

    Raises:
        UsageError: a pattern that matches nothing, or nothing would be left.
    """
    source = src if isinstance(src, Checkpoint) else open_(src)
    return source.drop_keys(*patterns, keep=keep, link=link)


@public
def make_report(
    src: AnyPlace,
    file: str | PathLike[str] | None = None,
    *,
    stats: bool = False,
    check: bool = False,
    diff: AnyPlace | None = None,
    values: bool | None = None,
    patterns: Sequence[str] = (),
    progress: Progress | bool | None = None,
    on: str = "",
) -> Report:
    """Make a report of a run or a checkpoint, as ``inspect --html`` does.

    Args:
        src: a run, a directory of checkpoints: with ``stats``, its norms and changes over steps; or one checkpoint, for
            which everything is as for ``Checkpoint.report``.
        file: where to write the page, too.
        stats: read all elements; check, diff, values, patterns, progress and on are those of ``Checkpoint.report``.

    Raises:
        UsageError: ``check`` or ``diff`` of a run.
        OutputError: the file exists and is not a report, or cannot be written.
    """
    parts = {"stats": stats, "check": check, "diff": diff, "values": values}
    return report_on(parse_place(src), OpenOptions(), file, patterns=patterns, progress=progress, on=on, **parts)


@public
def check(src: Source, *, values: bool = False, progress: Progress | bool | None = None, on: str = "") -> CheckResult:
    """Check a checkpoint, also one that cannot be opened, as ``ckpttool check`` does.

    Args:
        src: the checkpoint.
        values: also read the elements: copies that must agree, padding, scales, NaN.
        progress: that of ``Plan.run``.
        on: let a cluster read them: ``"ray"``, or ``"ray=HOST:PORT"``.
    """
    if isinstance(src, Checkpoint):
        return src.check(values=values, progress=progress, on=on)
    with watching(progress) as watch, machines(on) as fleet:
        return look(parse_place(src), OpenOptions(), watch, values=values, fleet=fleet)


@public
def diff(
    left: Source,
    right: Source,
    *,
    values: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    patterns: Sequence[str] = (),
    progress: Progress | bool | None = None,
    on: str = "",
) -> DiffResult:
    """How two checkpoints differ, whatever their formats, ranks and names. Does what ``inspect --diff`` does.

    Args:
        left: one of them.
        right: the other, opened in its own way; if a path, it is opened by what it says itself.
        values: compare every element, not only names, dtypes and shapes. Without, ``equal`` of the result is None
            unless a difference was found.
        atol: elements are equal when ``|left - right| <= atol + rtol * |right|``; bit for bit without the two.
        rtol: see ``atol``.
        patterns: compare only tensors that match one of them.
        progress: that of ``Plan.run``.
        on: let a cluster read the elements: ``"ray"``, or ``"ray=HOST:PORT"``.
    """
    source = left if isinstance(left, Checkpoint) else open_(left)
    return source.diff(right, values=values, atol=atol, rtol=rtol, patterns=patterns, progress=progress, on=on)


@public
def convert(
    src: AnyPlace,
    dst: AnyPlace,
    *,
    params: AnyPlace | None = None,
    program: AnyPlace | None = None,
    names: AnyPlace | None = None,
    max_shard_size: int | str | None = None,
) -> Conversion:
    """Plan what ``ckpttool convert-json`` does with a Paddle program; ``run`` it with the same ``dst``.

    Args:
        src: a program (``model.json`` or ``model.pdmodel``), or safetensors together with ``program``.
        dst: where it will go: its name says whether one file or a directory is written.
        params: the program's parameters, where they do not lie beside it.
        program: the program that the parameters in ``src`` belong to: the way back.
        names: a file that says which parameter is which structured name.
        max_shard_size: bytes of the largest file of a directory, or ``"5GB"``.

    Raises:
        CorruptError, UnsupportedError: of the program or its parameters.
    """
    other, source, target = None if names is None else parse_place(names), parse_place(src), parse_place(dst)
    if program is not None:
        return Conversion(from_safetensors(source, target, parse_place(program), names=other), target)
    held, limit = None if params is None else parse_place(params), nbytes(max_shard_size, "max_shard_size")
    plan = to_safetensors(source, target, params=held, names=other, max_shard_size=limit)
    return Conversion(plan, target)


@public
def size(
    src: Source,
    recipe: str = "",
    *,
    block: tuple[int, int] | str | None = None,
    scale_dtype: str = "",
    quant_method: str = "",
    static_act: bool = False,
    edge: str = "",
    keep: Sequence[str] = (),
    include: Sequence[str] = (),
    preset: str = "",
    mtp: bool = True,
    max_shard_size: int | str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    pp_layout: Sequence[int] | str = (),
    vocab_pad: int | None = None,
    kv: str = "",
    tokens: int | str | None = None,
    batch: int | None = None,
    max_model_len: int | str | None = None,
    train: bool = False,
    zero: int | None = None,
    dp: int | None = None,
    grad: str = "",
    master: str = "",
    moment: str = "",
    fp8_transposed: bool = False,
    gpu: str = "",
    device_mem: float | str | None = None,
    utilization: float | None = None,
) -> Size:
    """Estimate disk and GPU memory from headers or a config.json alone, as ``ckpttool size`` does.

    Args:
        src: a checkpoint, or a config.json.
        recipe: as-is, bf16, tensor, channel, block, mxfp8, nvfp4 or mxfp4; as-is by default.
        block: sides of a block, (128, 128) or ``"128x128"``; scale_dtype, quant_method, static_act, edge, keep,
            include and preset change the recipe as the options of these names do.
        mtp: count the multi-token-prediction layers.
        max_shard_size: bytes of the largest file, or ``"5GB"``.
        tp: tensor-parallel ranks of the deployment; as in ``src`` by default, like pp, ep, etp and pp_layout.
        vocab_pad: the vocabulary is padded to a multiple of this.
        kv: dtype of keys and values, which are then counted: bf16, fp8 or fp8_ds_mla.
        tokens: of a sequence, 32768 or ``"32k"``; batch, how many sequences; max_model_len, what an engine reserves.
        train: what training holds instead, with zero, dp, grad, master, moment and fp8_transposed.
        gpu: does it fit on this device (``h100``); device_mem, on one with so many bytes (or ``"80GB"``).
        utilization: the share of the GPU's memory to use, 0.9 by default.

    Raises:
        UsageError: options that have no effect or exclude each other.
        UnsupportedError: a config that does not say enough.
    """
    if gpu and device_mem is not None:
        raise UsageError("gpu and device_mem exclude each other", hint="a GPU's name says how much memory it has")
    stage = whole(zero, "zero", 0)
    if stage is not None and stage > 3:
        raise UsageError(f"zero is {zero}", hint="0, 1, 2 or 3")
    memory = nbytes(device_mem, "device_mem")
    shape, kept, included = sides(block), several(keep, "keep"), several(include, "include")
    wanted = WantedRecipe(recipe, shape, scale_dtype, quant_method, static_act, kept, included, preset, edge)
    question = Question(
        wanted,
        mtp=mtp,
        max_shard_size=nbytes(max_shard_size, "max_shard_size"),
        **counts(tp=tp, pp=pp, ep=ep, etp=etp),
        pp_layout=layers(pp_layout),
        vocab_pad=whole(vocab_pad, "vocab_pad"),
        kv=kv,
        tokens=_tokens(tokens, "tokens"),
        batch=whole(batch, "batch"),
        max_model_len=_tokens(max_model_len, "max_model_len"),
        train=train,
        zero=stage,
        dp=whole(dp, "dp"),
        grad=grad,
        master=master,
        moment=moment,
        fp8_transposed=fp8_transposed,
        utilization=_share(utilization, "utilization"),
        device=named_gpu(gpu) if gpu else None if memory is None else Device("", memory),
    )
    path, options = (src.path, src.options) if isinstance(src, Checkpoint) else (parse_place(src), OpenOptions())
    return Size.of(answer(path, options, question))


def _share(said: float | None, name: str) -> float | None:
    """Raises UsageError for what is not a number; whether it is a share is asked with the question."""
    if said is not None and (isinstance(said, bool) or not isinstance(said, int | float)):
        raise UsageError(f"{name} is {said!r}", hint="pass a number: 0.9")
    return said


def _tokens(said: int | str | None, name: str) -> int | None:
    return whole(parse_count(said, name) if isinstance(said, str) else said, name)
