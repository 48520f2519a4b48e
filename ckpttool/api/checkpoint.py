"""An opened checkpoint: its catalog, its tensors as arrays, and the plans that begin with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, cast, overload

import numpy as np

from ckpttool.answers.findings import CheckResult
from ckpttool.api import show
from ckpttool.api.arguments import counts, layers, nbytes, pair_of_betas, several, sides, some_ranks, whole
from ckpttool.api.border import notes_in_arguments, public
from ckpttool.api.plans import Dropping, Resharding, watching
from ckpttool.api.results import Report
from ckpttool.checkpoint import Checkpoint as _Checkpoint
from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.core.catalog import Catalog, Key, LogicalTensor
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.geometry import Box
from ckpttool.core.mesh import Mesh
from ckpttool.core.patterns import matching, nearest_hint
from ckpttool.core.words import one_of, short
from ckpttool.errors import CkptError, UsageError, not_installed
from ckpttool.execute import Progress
from ckpttool.execute.compare import read_tensor
from ckpttool.execute.machines.each import machines
from ckpttool.formats.base import ReadOptions
from ckpttool.ops import drop_keys
from ckpttool.ops.inspect.check import check as _check
from ckpttool.ops.inspect.diff import DiffResult, Tolerance
from ckpttool.ops.inspect.diff import diff as _diff
from ckpttool.ops.inspect.identity import Identity, identify
from ckpttool.ops.inspect.listing import TensorChoice, list_tensors
from ckpttool.quant.keep import Keep
from ckpttool.quant.scheme import scheme
from ckpttool.storage.place import parse_place
from ckpttool.targeting.parts import plan_parts
from ckpttool.targeting.recode import Recoding, high
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target

if TYPE_CHECKING:
    from torch import Tensor

Slices = tuple[slice | SupportsIndex | EllipsisType, ...] | list[slice] | slice | SupportsIndex | EllipsisType | Box
"""What ``read`` takes to say which part: like a numpy index, step 1, or a box; axes that are not named are whole."""


class UnknownNameError(UsageError, KeyError):
    """No tensor has this name. Also a KeyError, as of any mapping."""


class CheckpointTensor(LogicalTensor):
    """A logical tensor that knows its checkpoint: in a notebook it shows its files and first elements."""

    __slots__ = ("source",)

    def __init__(self, tensor: LogicalTensor, source: Checkpoint) -> None:
        t = tensor
        super().__init__(t.key, t.dtype, t.shape, t.pieces, t.replicas, t.pads)
        self.source = source

    def __eq__(self, other: object) -> bool:
        """Equal to the tensor of the catalog."""
        if not isinstance(other, LogicalTensor):
            return NotImplemented
        fields = ("key", "dtype", "shape", "pieces", "replicas", "pads")
        return all(getattr(self, f) == getattr(other, f) for f in fields)

    __hash__ = None  # type: ignore[assignment]  # it can change, as the catalog's can

    def _repr_html_(self) -> str:
        """For notebooks: dtype, shape and files; with the first elements where they lie on this machine."""
        catalog, first = self.source.catalog, None
        if isinstance(self.source.path, Path) and self.pieces:
            corner = Box((0,) * len(self.shape), tuple(min(n, 4) for n in self.shape))
            with suppress(CkptError, OSError):
                found = read_tensor(catalog, self, corner)
                first = found if found.dtype.kind in "biuf" else found.astype(np.float32)
        return show.tensor(catalog, self, first)


class Checkpoint(Mapping[str, LogicalTensor]):
    """An opened checkpoint: a mapping from names to logical tensors. Headers are read; data only when asked for.

    A model weight has its own name. Other components stand in front of it, and a state of the optimizer behind:
    ``optimizer/NAME/moment1_0``. A tied name (``lm_head.weight``) that is not stored finds its owner.
    """

    __slots__ = ("_closed", "opened", "options")

    def __init__(self, opened: _Checkpoint, options: OpenOptions) -> None:
        self.opened = opened
        self.options = options
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint. Reading from it afterwards raises UsageError."""
        self._closed = True

    @property
    def path(self) -> Place:
        """Directory, file or URL of the checkpoint."""
        return self.opened.path

    def _reading(self) -> _Checkpoint:
        if self._closed:
            raise UsageError("the checkpoint is closed", where=str(self.path))
        return self.opened

    @property
    def catalog(self) -> Catalog:
        """Logical tensors with their pieces."""
        return self.opened.catalog

    @property
    def mesh(self) -> Mesh:
        """Parallel sizes of the files."""
        return self.opened.mesh

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.opened.format

    @property
    def family(self) -> str:
        """Name of the model family; "none" where none is known."""
        return self.opened.family.name

    @property
    def config(self) -> dict[str, Any]:
        """config.json, or {}."""
        return self.opened.config

    @property
    def notes(self) -> list[str]:
        """What was inferred while opening, in sentences."""
        return notes_in_arguments(self.opened.notes, "open")

    @property
    def components(self) -> tuple[str, ...]:
        """Stored components: model, optimizer, master_weights, ..."""
        return self.opened.components

    @property
    def identity(self) -> Identity:
        """Family, layers, experts, parameters and precision. Reads the headers again."""
        return identify(list_tensors(self.path, self.options))

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return self.catalog.nbytes

    @property
    def tied(self) -> dict[str, str]:
        """Tied names that are not stored, each with the name of the tensor whose elements it shares."""
        return {str(k): str(v) for k, v in self.catalog.aliases.items()}

    def __repr__(self) -> str:
        """``<Checkpoint llama_tp8: ranks, llama, tp 8, 39 tensors, 419.71 kB>``."""
        return (
            f"<Checkpoint {self.path}: {self.format}, {self.family}, {self.mesh}, {len(self):,} tensors,"
            f" {short(self.nbytes)}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: a tree of all tensors that folds."""
        return show.table(repr(self)[1:-1], [], self.notes, more=show.tree(self.catalog))

    def __iter__(self) -> Iterator[str]:
        """Names of the stored logical tensors."""
        return (str(k) for k in self.catalog.tensors)

    def __eq__(self, other: object) -> bool:
        """A checkpoint is only equal to itself: ``diff`` compares."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        """Number of stored logical tensors."""
        return len(self.catalog)

    def __contains__(self, name: object) -> bool:
        """Whether there is a logical tensor of this name, stored or tied."""
        return isinstance(name, str) and self._key(name) in self.catalog.tensors

    def _key(self, name: str) -> Key:
        """The key of a name as iteration gives it: ``NAME`` of a model weight, else ``COMPONENT/NAME[/STATE]``."""
        plain = Key(name)
        plain = self.catalog.aliases.get(plain, plain)
        if plain in self.catalog.tensors:
            return plain
        component, _, rest = name.partition("/")
        parameter, _, state = rest.rpartition("/")
        for key in (Key(rest, component), Key(parameter, component, state)):
            if key in self.catalog.tensors:
                return key
        return plain

    @public
    def __getitem__(self, name: str) -> LogicalTensor:
        """A logical tensor. Raises UsageError, which is a KeyError, too, with the nearest name when there is none."""
        if not isinstance(name, str):
            raise UsageError(f"{name!r} is not a tensor name", hint=f"for example `{next(iter(self), '')}`")
        try:
            return CheckpointTensor(self.catalog[self._key(name)], self)
        except KeyError:
            raise UnknownNameError(f"no tensor `{name}`", hint=nearest_hint(name, list(self))) from None

    @public
    def read(self, name: str, part: Slices = ()) -> np.ndarray[Any, np.dtype[Any]]:
        """The logical tensor ``name``, or a box of it, as a numpy array (bf16 and fp8 as ml_dtypes types).

        Only the bytes of the box are read, from however many files. ``part`` has slices of step 1, integers (which
        keep their axis, with one element) and ``...``, or is the box of a piece. Raises UsageError for an index
        outside the tensor.
        """
        catalog, tensor = self._reading().catalog, self[name]
        return read_tensor(catalog, tensor, _box(name, tensor.shape, part))

    @public
    def torch(self, name: str, part: Slices = ()) -> Tensor:
        """``read`` of the same ``name`` and ``part``, as a torch tensor with torch's own bf16 and fp8 dtypes.

        Raises UsageError where torch is not installed, and what ``read`` raises.
        """
        _torch()  # before anything is read
        return _as_torch(name, self.read(name, part))

    @overload
    def tensors(
        self, *patterns: str, framework: Literal["np"] = "np"
    ) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[Any]]]]: ...
    @overload
    def tensors(self, *patterns: str, framework: Literal["pt"]) -> Iterator[tuple[str, Tensor]]: ...
    @public
    def tensors(self, *patterns: str, framework: str = "np") -> Iterator[tuple[str, Any]]:
        """(name, whole tensor) one after the other, in the order in which they lie in the files.

        Args:
            patterns: globs or ``re:`` patterns of names; none are all.
            framework: ``np`` for numpy, ``pt`` for torch.

        Raises:
            UsageError: a pattern matches nothing, or the framework is not known or not installed.
        """
        if framework not in ("np", "pt"):
            raise UsageError(f"framework `{framework}` is not known", hint="np or pt")
        if framework == "pt":
            _torch()
        patterns = several(patterns, "patterns")
        wanted = matching(patterns, list(self), option="pattern") if patterns else None
        names = sorted((n for n in self if wanted is None or n in wanted), key=self._place)
        return ((n, self.torch(n) if framework == "pt" else self.read(n)) for n in names)

    def _place(self, name: str) -> tuple[int, int]:
        """Where its first byte lies."""
        pieces = self[name].pieces
        return (pieces[0].stored.file, pieces[0].stored.offset) if pieces else (-1, 0)

    @public
    def check(self, *, values: bool = False, progress: Progress | bool | None = None, on: str = "") -> CheckResult:
        """Check the files, and with ``values`` the elements, as ``ckpttool check`` does.

        ``progress`` and ``on`` are those of ``Plan.run``.
        """
        with watching(progress) as watch, machines(on) as fleet:
            return _check(self.path, self.options, watch, values=values, fleet=fleet)

    @public
    def diff(
        self,
        other: AnyPlace | Checkpoint,
        *,
        values: bool = True,
        atol: float | None = None,
        rtol: float | None = None,
        patterns: Sequence[str] = (),
        progress: Progress | bool | None = None,
        on: str = "",
    ) -> DiffResult:
        """How another checkpoint differs, whatever the formats, ranks and names. Does what ``inspect --diff`` does.

        Args:
            other: the other one, opened in its own way; if a path, it is opened by what it says itself.
            values: compare every element, not only names, dtypes and shapes. Without, ``equal`` of the result is None
                unless a difference was found.
            atol: elements are equal when ``|a - b| <= atol + rtol * |b|``; bit for bit without the two.
            rtol: see ``atol``.
            patterns: compare only tensors that match one of them.
            progress: that of ``Plan.run``.
            on: let a cluster read the elements; as for ``Plan.run``.

        Raises:
            UsageError: a pattern matches nothing, or a tolerance is below 0.
        """
        path, theirs = (other.path, other.options) if isinstance(other, Checkpoint) else (parse_place(other), None)
        for name, allowed in (("atol", atol), ("rtol", rtol)):
            if allowed is not None and not allowed >= 0:
                raise UsageError(f"{name} is {allowed}", hint="minimum: 0")
        tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
        wanted = several(patterns, "patterns")
        with watching(progress) as watch, machines(on) as fleet:
            return _diff(
                self.path,
                path,
                self.options,
                watch,
                patterns=wanted,
                values=values,
                tolerance=tolerance,
                other_options=theirs,
                fleet=fleet,
            )

    @public
    def report(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        stats: bool = False,
        check: bool = False,
        diff: AnyPlace | None = None,
        values: bool | None = None,
        patterns: Sequence[str] = (),
        progress: Progress | bool | None = None,
        on: str = "",
    ) -> Report:
        """Make a report: one HTML page, which a notebook shows. Does what ``inspect --html`` does.

        Args:
            file: where to write the page, too; a report that is there is replaced.
            stats: statistics by layer and a histogram of each tensor: reads all elements.
            check: also verify the checksums of a manifest; headers are always checked.
            diff: compare with this checkpoint.
            values: True lets ``check`` read values, too; False lets ``diff`` compare headers only.
            patterns: show only tensors that match one of them.
            progress: that of ``Plan.run``.
            on: let a cluster read the elements; as for ``Plan.run``.

        Raises:
            OutputError: the file exists and is not a report, or cannot be written.
            CkptError: a part of the report could not be made; the file has the others.
        """
        parts = {"stats": stats, "check": check, "diff": diff, "values": values}
        return report_on(self.path, self.options, file, patterns=patterns, progress=progress, on=on, **parts)

    @public
    def reshard(
        self,
        *,
        tp: int | None = None,
        pp: int | None = None,
        ep: int | None = None,
        etp: int | None = None,
        pp_layout: Sequence[int] | str = (),
        ranks: Sequence[int] | str | None = None,
        to: str = "",
        dtype: str = "",
        dequant: str = "",
        fuse: bool = False,
        unfuse: bool = False,
        max_shard_size: int | str | None = None,
        vocab_multiple: int | None = None,
        sharding: int | None = None,
        sharding_version: str = "",
        target: str = "",
        only: Sequence[str] = (),
        ema: bool = False,
        masters: bool = False,
        native_names: bool = False,
        aoa: AnyPlace | None = None,
        betas: Sequence[float] | str | None = None,
        remove: Sequence[str] = (),
        keep: Sequence[str] = (),
        rename: Sequence[str] = (),
    ) -> Resharding:
        """Plan what ``ckpttool reshard`` does; nothing is written.

        Args:
            tp: tensor-parallel ranks of the output; as in the source by default, like all sizes.
            pp: pipeline stages.
            ep: expert-parallel ranks; experts are whole on them unless ``etp`` is given.
            etp: ranks that cut each expert.
            pp_layout: layers of each stage: (10, 11, 11) or ``"10,11,11"``.
            ranks: write only these: [0, 1, 2, 3, 7] or ``"0-3,7"``.
            to: format of the output: hf, ranks, vllm, deepseek, trtllm, unified, hybrid, zcc, flex, program.
            dtype: cast weights: bf16, f16, f32 or f64.
            dequant: write quantized weights in this precision.
            fuse: join what the family knows as fused (q, k, v; gate, up).
            unfuse: the reverse.
            max_shard_size: bytes of the largest file, or ``"5GB"``.
            vocab_multiple: pad the vocabulary to a multiple of this and of ``tp``; for Megatron of this for each of
                the ``tp`` ranks. None is what the format needs.
            sharding: ranks that share the optimizer's state.
            sharding_version: ``v1`` or ``v2``.
            target: version of the software that will load the output.
            only: components to write.
            ema: write the averaged weights as the model.
            masters: write the float32 master weights as the model.
            native_names: names as the models of ``target`` have them.
            aoa: a file of AOA statements.
            betas: those of Adam, where the checkpoint does not say them: (0.9, 0.999) or ``"0.9,0.999"``.
            remove: patterns of tensors to leave out.
            keep: patterns of the only tensors to keep.
            rename: ``OLD=NEW`` with globs or ``re:`` patterns.

        Raises:
            UsageError: options that contradict each other or the format.
            LayoutError: the model cannot be cut that way.
            UnsupportedError: the format cannot hold the model.
        """
        wanted = Target(
            format=to,
            **counts(tp=tp, pp=pp, ep=ep, etp=etp),
            pp_layout=layers(pp_layout),
            ranks=some_ranks(ranks),
            max_shard_size=nbytes(max_shard_size, "max_shard_size"),
            dtype=dtype,
            fuse=fuse,
            unfuse=unfuse,
            vocab_multiple=whole(vocab_multiple, "vocab_multiple"),
            sharding=whole(sharding, "sharding"),
            sharding_version=one_of(sharding_version, "sharding_version", "v1", "v2"),
            version=target,
            components=several(only, "only"),
            ema=ema,
            masters=masters,
            native_names=native_names,
            aoa=None if aoa is None else parse_place(aoa),
            betas=pair_of_betas(betas),
        )
        selection = Selection(several(remove, "remove"), several(keep, "keep"), several(rename, "rename"))
        recoding = Recoding(None, high(dequant, "dequant")) if dequant else None
        return Resharding(plan_parts(self._reading(), wanted, selection, recoding))

    @public
    def quantize(
        self,
        recipe: str = "block",
        *,
        to: str = "",
        block: tuple[int, int] | str | None = None,
        scale_dtype: str = "",
        method: str = "",
        keep: Sequence[str] = (),
        include: Sequence[str] = (),
        preset: str = "hf-default",
        max_shard_size: int | str | None = None,
    ) -> Resharding:
        """Plan what ``ckpttool quantize`` does: a Hugging Face checkpoint in another precision.

        Args:
            recipe: tensor, channel, block, mxfp8, nvfp4 or mxfp4.
            to: dequantize to bf16, f16 or f32 instead.
            block: sides of a block: (128, 128) or ``"128x128"``.
            scale_dtype: f32, bf16 or e8m0.
            method: convention to write: fp8, compressed-tensors, modelopt, ...
            keep: patterns of weights to keep in high precision.
            include: patterns of weights to quantize although the preset keeps them.
            preset: which layers stay: hf-default, deepseek, experts-only or none.
            max_shard_size: bytes of the largest file, or ``"5GB"``.

        Raises:
            UsageError: options that do not go together.
            UnsupportedError: weights that are quantized in a way that is not known.
        """
        if to:
            recoding = Recoding(None, high(to, "to"))
        else:
            wanted = scheme(recipe, method=method, block=sides(block), scale_dtype=scale_dtype)
            recoding = Recoding(wanted, keep=Keep(preset, several(keep, "keep"), several(include, "include")))
        target = Target(format="hf", tp=1, pp=1, ep=1, etp=1, max_shard_size=nbytes(max_shard_size, "max_shard_size"))
        return Resharding(plan_parts(self._reading(), target, Selection(), recoding))

    @public
    def drop_keys(self, *patterns: str, keep: Sequence[str] = (), link: bool = False) -> Dropping:
        """Plan what ``ckpttool drop-keys`` does: the checkpoint without the tensors that match ``patterns``.

        Args:
            patterns: globs or ``re:`` patterns of names.
            keep: patterns of the only tensors to keep.
            link: files that stay as they are share their bytes with the source.

        Raises:
            UsageError: a pattern that matches nothing, or nothing would be left.
        """
        selection = Selection(several(patterns, "patterns"), several(keep, "keep"))
        return Dropping(drop_keys.prepare(self._reading().path, self.options, selection, link=link))


def report_on(
    src: Place,
    options: OpenOptions,
    file: str | os.PathLike[str] | None,
    *,
    patterns: Sequence[str],
    progress: Progress | bool | None,
    on: str,
    **parts: Any,
) -> Report:
    """The report of a checkpoint or a run, for ``Checkpoint.report`` and ``make_report``."""
    from ckpttool.ops.inspect.views.page import ReportContents, RunContents
    from ckpttool.ops.inspect.views.registry import chosen, look
    from ckpttool.report.page import render  # with the page, which few need
    from ckpttool.report.run_page import document as document_of_run
    from ckpttool.report.survey import check_page, document, save_page

    page, values = Path(file or "report.html"), parts.pop("values")
    parts |= {"values": bool(values), "headers_only": parts["diff"] is not None and values is False}
    view = chosen(TensorChoice(several(patterns, "patterns")), on=on, html=page, **parts)
    if file is not None:
        check_page(view)
    with watching(progress) as watch:
        found = look(view, src, options, watch, on)
    assert isinstance(found, ReportContents | RunContents)  # noqa: S101 - the answers of a view with a page
    html = render(document(found) if isinstance(found, ReportContents) else document_of_run(found))
    if file is not None:
        save_page(view, html)
    if isinstance(found, ReportContents) and found.failures:
        raise found.failures[0]
    return Report(html, None if file is None else page)


@public
def open_(
    path: AnyPlace,
    *,
    format: str = "",  # noqa: A002 - the word of --from's help and of the docs
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    sharding: int | None = None,
    also: AnyPlace | Sequence[AnyPlace] = (),
    select: str = "",
    rank_pattern: str = "",
    family: str = "",
    replicate: Sequence[str] = (),
    split: Sequence[str] = (),
    part: Sequence[str] = (),
) -> Checkpoint:
    """Open a checkpoint of any format. Headers and small JSON files are read, no tensor data.

    Args:
        path: a directory, an index or a single file; or where it is on other machines: ``hf://org/model``, an object
            store, a web server.
        format: its format; recognised by its files by default.
        tp: tensor-parallel ranks, where the files do not say.
        pp: pipeline stages, likewise.
        ep: expert-parallel ranks, likewise.
        etp: ranks that cut each expert, likewise.
        sharding: ranks that share the optimizer's state, likewise.
        also: further directories of the same save, such as those that other nodes wrote.
        select: dotted path of the dict of tensors in a file of torch.save, where it holds several.
        rank_pattern: file names of other software's ranks, such as ``model_tp{tp}.safetensors``.
        family: name of a family or a YAML file; by config.json by default.
        replicate: patterns of tensors that every rank has whole.
        split: ``PATTERN=AXIS`` of tensors that are cut.
        part: open only these models of a directory of several: ``["transformer"]``.

    Raises:
        UsageError: no such path or option.
        IncompleteError: a file is missing.
        CorruptError: a header is wrong.
        ConflictError: options, config and files contradict each other.
        LayoutError: a tensor has no rule.
        UnsupportedError: a dtype, family or format that is not known.
    """
    if not isinstance(select, str):
        raise UsageError(f"select is {select!r}", hint="give the dotted path of a dict, such as 'model.ema'")
    beside = also if isinstance(also, list | tuple) else [cast("AnyPlace", also)]
    sizes = counts(tp=tp, pp=pp, ep=ep, etp=etp, sharding=sharding)
    places = tuple([parse_place(p) for p in beside])
    said = ReadOptions(**sizes, rank_pattern=rank_pattern, more=places, select=select, parts=several(part, "part"))
    options = OpenOptions(format, said, family, several(replicate, "replicate"), several(split, "split"))
    return Checkpoint(open_checkpoint(parse_place(path), options), options)


open_.__name__ = open_.__qualname__ = "open"  # what ``help(ckpttool.open)`` shows


def _torch() -> Any:
    """The module. Raises UsageError where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as e:
        raise not_installed("a torch tensor", e.name, "torch") from None
    return torch


def _as_torch(name: str, data: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    torch = _torch()
    plain = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    kind = getattr(torch, data.dtype.name.removesuffix("_"), None)
    if kind is None:
        raise UsageError(f"torch has no dtype for `{name}` ({data.dtype.name})")
    if hasattr(np, data.dtype.name):
        return cast("Tensor", torch.from_numpy(data))
    return cast("Tensor", torch.from_numpy(data.view(plain[data.dtype.itemsize])).view(kind))


def _box(name: str, shape: tuple[int, ...], part: Slices) -> Box:
    if isinstance(part, Box):
        if len(part.stop) != len(shape) or any(b > n for b, n in zip(part.stop, shape, strict=True)):
            raise UsageError(f"{part} is outside `{name}` {list(shape)}")
        parts: list[object] = [slice(a, b) for a, b in zip(part.start, part.stop, strict=True)]
    else:
        parts = list(part) if isinstance(part, tuple | list) else [part]
    if isinstance(part, list) and not all(isinstance(p, slice) for p in part):
        raise UsageError(
            f"`{name}` cannot be read by a list of rows", hint="give a tuple: one slice or integer an axis"
        )
    dots = [i for i, p in enumerate(parts) if p is ...]
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + len(dots))
    if len(parts) != len(shape):
        raise UsageError(f"`{name}` has {len(shape)} axes, the index has {len(parts)}")
    start, stop = (
        zip(*(_range(name, n, p) for n, p in zip(shape, parts, strict=True)), strict=True) if shape else ((), ())
    )
    return Box(start, stop)


def _range(name: str, n: int, part: object) -> tuple[int, int]:
    """The elements of an axis of ``n``."""
    if isinstance(part, slice):
        a, b, step = part.indices(n)
        if step != 1:
            raise UsageError(f"the index of `{name}` has a step; only boxes can be read")
        return a, max(a, b)
    try:
        at = index(part)  # type: ignore[arg-type]
    except TypeError:
        at = None
    if at is None or isinstance(part, bool):
        raise UsageError(
            f"{part!r} is not an index of `{name}`", hint="give slices, integers or ...: (slice(0, 4), ..., 7)"
        )
    if not -n <= at < n:
        raise UsageError(f"index {at} is outside an axis of {n} of `{name}`")
    return at % n, at % n + 1
