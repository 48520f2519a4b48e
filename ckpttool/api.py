"""The Python API: open a checkpoint, look at its catalog, read a box as numpy or torch, make a plan, run it.

    >>> import ckpttool
    >>> source = ckpttool.open("llama_tp8")                                       # doctest: +SKIP
    >>> source.read("model.layers.0.self_attn.q_proj.weight", (slice(0, 4),))      # doctest: +SKIP
    >>> source.reshard(tp=2).run("llama_tp2", verify=True)                         # doctest: +SKIP

Every error is a subclass of ``ckpttool.errors.CkptError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.catalog import Catalog, Key, LogicalTensor
from ckpttool.checkpoint import Checkpoint as _Checkpoint
from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.errors import UsageError
from ckpttool.execute import NoProgress, Progress, RunOptions
from ckpttool.execute.compare import read_tensor
from ckpttool.execute.options import default_workers
from ckpttool.formats.base import ReadOptions
from ckpttool.geometry import Box
from ckpttool.mesh import Mesh
from ckpttool.ops.recode import Recoding, high
from ckpttool.ops.reshard import Prepared, ReshardResult, Selection, Target, execute, plan_recoded, plan_target
from ckpttool.plan import Plan
from ckpttool.quant.keep import Keep
from ckpttool.quant.scheme import scheme

if TYPE_CHECKING:
    import torch

Slices = Sequence[slice | int] | slice | int
"""What ``read`` takes to say which part: like a numpy index, step 1; axes that are not named are whole."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its catalog, and its tensors by name. Headers are read; data only by ``read``."""

    opened: _Checkpoint

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
    def config(self) -> dict[str, Any]:
        """config.json, or {}."""
        return self.opened.config

    @property
    def notes(self) -> list[str]:
        """What was inferred while opening, in sentences."""
        return self.opened.notes

    def __iter__(self) -> Iterator[str]:
        """Names of the logical tensors."""
        return (str(k) for k in self.catalog.tensors)

    def __len__(self) -> int:
        """How many logical tensors there are."""
        return len(self.catalog)

    def __contains__(self, name: str) -> bool:
        """Whether there is a logical tensor of this name."""
        return self._key(name) in self.catalog.tensors

    def _key(self, name: str) -> Key:
        """The key of a name as iteration gives it: ``NAME`` of a model weight, else ``COMPONENT/NAME[/STATE]``."""
        if (plain := Key(name)) in self.catalog.tensors:
            return plain
        component, _, rest = name.partition("/")
        for key in (Key(rest, component), Key(*_split(rest, component))):
            if key in self.catalog.tensors:
                return key
        return plain

    def __getitem__(self, name: str) -> LogicalTensor:
        """A logical tensor. Raises UsageError with the nearest name when there is none."""
        try:
            return self.catalog[self._key(name)]
        except KeyError:
            from ckpttool.select import nearest_hint

            raise UsageError(f"there is no tensor `{name}`", hint=nearest_hint(name, list(self))) from None

    def read(self, name: str, part: Slices = ()) -> np.ndarray[Any, np.dtype[Any]]:
        """A logical tensor, or a box of it, as a numpy array (bf16 and fp8 as ml_dtypes types).

        Only the bytes of the box are read, from however many files. ``part`` has slices of step 1 or integers (which
        keep their axis, with one element). Raises UsageError for an index outside the tensor.
        """
        tensor = self[name]
        return read_tensor(self.catalog, tensor, _box(name, tensor.shape, part))

    def torch(self, name: str, part: Slices = ()) -> torch.Tensor:
        """The same as ``read``, as a torch tensor with torch's own bf16 and fp8 dtypes."""
        import torch

        data = self.read(name, part)
        plain = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
        kind = getattr(torch, data.dtype.name.removesuffix("_"), None)
        if kind is None:
            raise UsageError(f"torch has no dtype for `{name}` ({data.dtype.name})")
        if hasattr(np, data.dtype.name):
            return torch.from_numpy(data)
        return torch.from_numpy(data.view(plain[data.dtype.itemsize])).view(kind)

    def reshard(
        self,
        *,
        tp: int | None = None,
        pp: int | None = None,
        ep: int | None = None,
        etp: int | None = None,
        pp_layout: Sequence[int] = (),
        ranks: Sequence[int] | None = None,
        to: str = "",
        dtype: str = "",
        dequant: str = "",
        fuse: bool = False,
        unfuse: bool = False,
        max_shard_size: int | None = None,
        vocab_multiple: int = 1,
        sharding: int | None = None,
        sharding_version: str = "",
        target: str = "",
        only: Sequence[str] = (),
        ema: bool = False,
        native_names: bool = False,
        aoa: str | Path | None = None,
        remove: Sequence[str] = (),
        keep: Sequence[str] = (),
        rename: Sequence[str] = (),
    ) -> Resharding:
        """Plan what ``ckpttool reshard`` with the same options does; nothing is written. Raises a CkptError."""
        wanted = Target(
            to,
            tp,
            pp,
            ep,
            etp,
            tuple(pp_layout),
            None if ranks is None else tuple(ranks),
            max_shard_size,
            dtype,
            fuse,
            unfuse,
            vocab_multiple,
            sharding,
            sharding_version,
            target,
            tuple(only),
            ema,
            native_names,
            None if aoa is None else Path(aoa),
        )
        selection = Selection(remove, keep, rename)
        if dequant:
            recoding = Recoding(None, high(dequant, "dequant"))
            return Resharding(plan_recoded(self.opened, recoding, wanted, selection))
        return Resharding(plan_target(self.opened, wanted, selection))

    def fp8_cast(
        self,
        recipe: str = "block",
        *,
        to: str = "",
        block: tuple[int, int] | None = None,
        scale_dtype: str = "",
        method: str = "",
        keep: Sequence[str] = (),
        include: Sequence[str] = (),
        preset: str = "hf-default",
        max_shard_size: int | None = None,
    ) -> Resharding:
        """Plan what ``ckpttool fp8-cast`` with the same options does; ``to`` dequantises. Raises a CkptError."""
        if to:
            recoding = Recoding(None, high(to, "to"))
        else:
            wanted = scheme(recipe, method=method, block=block, scale_dtype=scale_dtype)
            recoding = Recoding(wanted, keep=Keep(preset, keep, include))
        target = Target("hf", 1, 1, 1, 1, max_shard_size=max_shard_size)
        return Resharding(plan_recoded(self.opened, recoding, target, Selection()))


@dataclass(frozen=True, slots=True)
class Resharding:
    """A plan that can be looked at and run."""

    prepared: Prepared

    @property
    def plan(self) -> Plan:
        """Every file and every step."""
        return self.prepared.plan

    @property
    def mesh(self) -> Mesh:
        """Parallel sizes of the output."""
        return self.prepared.mesh

    def run(
        self,
        dst: str | Path,
        *,
        force: bool = False,
        resume: bool = False,
        verify: bool = False,
        manifest: bool = False,
        memory: int = 64 << 20,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> ReshardResult:
        """Write ``dst``, whole or not at all. ``memory`` is bytes for all buffers. Raises a CkptError."""
        options = RunOptions(
            memory=memory, workers=workers or default_workers(), force=force, resume=resume, manifest=manifest
        )
        return execute(self.prepared, dst, options, progress or NoProgress(), verify=verify)


def open_(
    path: str | Path,
    *,
    format: str = "",  # noqa: A002 - the word of --from's help and of the docs
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    sharding: int | None = None,
    also: Sequence[str | Path] = (),
    rank_pattern: str = "",
    family: str = "",
    replicate: Sequence[str] = (),
    split: Sequence[str] = (),
) -> Checkpoint:
    """Open a checkpoint; the options are those of the command line. Raises a CkptError."""
    said = ReadOptions(tp, pp, ep, etp, (), rank_pattern, sharding, tuple(Path(p) for p in also))
    return Checkpoint(open_checkpoint(path, OpenOptions(format, said, family, tuple(replicate), tuple(split))))


def _split(rest: str, component: str) -> tuple[str, str, str]:
    """``NAME/STATE`` as the parts of a key."""
    name, _, state = rest.rpartition("/")
    return name, component, state


def _box(name: str, shape: tuple[int, ...], part: Slices) -> Box:
    parts = [part] if isinstance(part, slice | int) else list(part)
    if len(parts) > len(shape):
        raise UsageError(f"`{name}` has {len(shape)} axes, the index has {len(parts)}")
    start, stop = [], []
    for n, p in zip(shape, [*parts, *[slice(None)] * (len(shape) - len(parts))], strict=True):
        if isinstance(p, int):
            at = p + n if p < 0 else p
            if not 0 <= at < n:
                raise UsageError(f"index {p} is outside an axis of {n} of `{name}`")
            a, b = at, at + 1
        else:
            a, b, step = p.indices(n)
            if step != 1:
                raise UsageError(f"the index of `{name}` has a step; only boxes can be read")
        start.append(a)
        stop.append(max(a, b))
    return Box(tuple(start), tuple(stop))
