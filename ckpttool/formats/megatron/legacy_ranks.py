"""The ranks of a legacy save's directories, and their mesh.

    mp_rank_TT             no pipeline, no expert parallelism
    mp_rank_TT_PPP         pipeline
    mp_rank_TT_EEE         expert parallelism
    mp_rank_TT_PPP_EEE     both

TT, PPP and EEE are coordinates of the rank that wrote it. With fewer ranks that cut an expert (etp) than tp, not every
TT has every EEE: rank i of a stage is TT = i % tp, EEE = i / etp % ep. So tp 2, ep 2, etp 1 has mp_rank_00_PPP_000 and
mp_rank_01_PPP_001 only.

Source: ``get_checkpoint_name`` and ``save_checkpoint`` in megatron/training/checkpointing.py of Megatron-LM, and
megatron/core/parallel_state.py of Megatron Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import lcm
from typing import Any, NamedTuple

from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.mesh import MAX_WORLD
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError, UsageError

_NAME = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?(?:_(\d{3,9}))?")
_MOST_RANKS = 4096
"""Ranks that are looked for one by one, and 64 more for each directory; a larger size is a damaged number."""
ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Names of the parallel sizes in the arguments."""


class LegacyTensor(NamedTuple):
    """A tensor of a rank under the name that the file has, without wrappers."""

    chunk: int
    name: str
    stored: StoredTensor

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of several experts, or to some of them."""
        return ".mlp.experts." in self.name


class RankDirectory(NamedTuple):
    """A directory's name."""

    name: str
    numbers: tuple[int, ...]


class RankGrid(NamedTuple):
    """The mesh, and where each directory stands in it."""

    tp: int
    pp: int
    ep: int
    etp: int
    ranks: dict[str, int]
    """Directory -> rank, by stages."""

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return lcm(self.tp, self.ep * self.etp)

    def sizes(self) -> dict[str, int]:
        """Parallel sizes by the names of flags."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}


def directories(folders: Collection[str]) -> list[RankDirectory]:
    """The directories of ranks among ``folders``."""
    return [
        RankDirectory(n, tuple([int(g) for g in m.groups() if g is not None]))
        for n in folders
        if (m := _NAME.fullmatch(n))
    ]


def parallel_sizes(args: Mapping[str, Any], flags: Mapping[str, int], where: Place) -> dict[str, int]:
    """The parallel sizes that the arguments of a save say, else flags; without etp for a model without experts.

    Raises ConflictError for values that are not sizes.
    """
    out = {}
    for flag, name in ARGS.items():
        size = args.get(name)
        if size is None:
            if args and flag == "ep":
                size = 1
            elif args and flag == "etp":
                size = args.get(ARGS["tp"])  # what Megatron does, and did before there was such an argument
            elif flag in flags:
                size = flags[flag]
        if size is None:
            continue
        if type(size) is not int or not 0 < size <= MAX_WORLD:
            raise ConflictError(f"the arguments of the save say {name} {size!s:.40}", where=str(where))
        out[flag] = size
    if args and not args.get("num_experts") and "tp" in out:
        out["etp"], out["ep"] = out["tp"], out.get("ep", 1)
    return out


def grid_of(
    named: Collection[RankDirectory], said: Mapping[str, int], where: Place, etps: Collection[int] = ()
) -> RankGrid:
    """The mesh of these directories. ``said`` are the sizes that are known; of others the names say them. ``etps`` are
    those that the experts' shapes allow, where ``said`` has none.

    Raises IncompleteError naming the directories that are missing, ConflictError for some that should not be there,
    UnsupportedError for a mesh whose ranks write over each other, UsageError where only a flag can say what is meant.
    """
    parts = {len(n.numbers) for n in named}
    if len(parts) > 1:
        raise ConflictError(
            "there are directories of ranks with and without a stage or an expert rank: two saves lie in one directory",
            where=str(where),
            hint="move those of the other save away",
        )
    (length,) = parts
    staged = length == 3 or (length == 2 and said.get("pp", 1) > 1)
    spread = length == 3 or (length == 2 and not staged)
    axes = ["tp", *(["pp"] if staged else []), *(["ep"] if spread else [])]
    found = {axis: 1 + max(n.numbers[i] for n in named) for i, axis in enumerate(axes)}
    tp, pp, ep = (said.get(axis, found.get(axis, 1)) for axis in ("tp", "pp", "ep"))
    if max(tp, ep) * pp > _MOST_RANKS + 64 * len(named):
        raise IncompleteError(
            f"nearly all directories of ranks are missing: {len(named):,} are here, of tp {tp:,}, pp {pp:,}, ep {ep:,}",
            where=str(where),
            hint="the sizes are wrong, or the directories of other nodes are missing",
            finding="rank-missing",
        )
    if (pp > 1) != staged or (ep > 1) != spread:
        raise ConflictError(
            f"the save is of tp {tp}, pp {pp}, ep {ep}, and its directories are called as {next(iter(named)).name}",
            where=str(where),
            hint="files of different saves were put together",
            finding="ranks-differ",
        )
    here = {(n.numbers[0], n.numbers[1] if staged else 0, n.numbers[-1] if spread else 0): n.name for n in named}
    etp = said.get("etp") or _etp({(t, e) for t, _, e in here}, tp, ep, etps, where)
    places = _places(tp, ep, etp, where)
    _complete(here, places, pp, max(tp, ep * etp), axes, where)
    width = lcm(tp, ep * etp)
    return RankGrid(tp, pp, ep, etp, {name: p * width + places[t, e] for (t, p, e), name in sorted(here.items())})


def _places(tp: int, ep: int, etp: int, where: Place) -> dict[tuple[int, int], int]:
    """(tp rank, ep rank) -> rank in its stage."""
    width = lcm(tp, ep * etp)
    if width > MAX_WORLD:
        raise ConflictError(f"{width:,} ranks of a stage are more than any machine has", where=str(where))
    out = {(i % tp, i // etp % ep): i for i in range(width)}
    if len(out) < width:
        raise UnsupportedError(
            f"with tp {tp}, ep {ep} and etp {etp} the ranks that hold parts of an expert write over each other's files",
            where=str(where),
            hint="a part of each expert is lost: save it with etp that divides tp, or with --ckpt-format torch_dist",
        )
    return out


def _complete(
    here: Mapping[tuple[int, int, int], str],
    places: Mapping[tuple[int, int], int],
    pp: int,
    needed: int,
    axes: Collection[str],
    where: Place,
) -> None:
    """Raises IncompleteError for directories that are missing, ConflictError for those of other saves."""
    extra = [name for (t, p, e), name in here.items() if p >= pp or (t, e) not in places]
    if extra:
        raise ConflictError(
            f"{count(len(extra), 'directory', 'directories')} cannot be of this save: {some(sorted(extra), 6)}",
            where=str(where),
            hint="a save of more ranks was overwritten by one of fewer, or the sizes given are wrong",
            finding="ranks-differ",
        )
    wanted = [(t, p, e) for p in range(pp) for (t, e), i in places.items() if i < needed]
    missing = [k for k in wanted if k not in here]
    if missing:
        shown = [_name(*k, axes, next(iter(here.values()))) for k in missing[:8]]
        raise IncompleteError(
            f"{count(len(missing), 'directory', 'directories')} {'is' if len(missing) == 1 else 'are'} missing:"
            f" {', '.join(shown)}{' ...' if len(missing) > 8 else ''}",
            where=str(where),
            hint="each node saves the files of its own ranks: bring them together in one directory",
            finding="rank-missing",
        )


def check_writers(grid: RankGrid, args: Mapping[str, Mapping[str, Any]], where: Place, *, trained: bool) -> None:
    """Raises ConflictError for a directory whose file another rank wrote. ``args`` are the arguments in the file of
    each directory, of which each rank has its own ``rank``.

    Converters write all files as one rank; so files that say one rank count only where a run was ``trained``.
    """
    writers = {name: a.get("rank") for name, a in args.items()}
    if len(set(writers.values())) < 2 and (len(writers) < 2 or not trained):
        return
    for name, rank in grid.ranks.items():
        writer, world = writers.get(name), args.get(name, {}).get("world_size")
        if type(writer) is not int:
            continue
        stage, t = rank // grid.width, rank % grid.tp
        found = [("tensor-parallel rank", t, writer % grid.tp)]
        if type(world) is int and world >= grid.tp * grid.pp and world % grid.pp == 0:
            inner = world // grid.pp
            if args[name].get("use_tp_pp_dp_mapping"):
                cp = args[name].get("context_parallel_size")
                inner = grid.tp * (cp if type(cp) is int and cp > 0 else 1)
            found.append(("pipeline stage", stage, writer // inner % grid.pp))
        if wrong := next((f for f in found if f[1] != f[2]), None):
            what, wanted, got = wrong
            raise ConflictError(
                f"the file of {what} {wanted} was saved by rank {writer} of the run, which is {what} {got}",
                where=str(where / name),
                hint="a directory was copied under another one's name: copy it again",
                finding="ranks-differ",
            )


def _name(t: int, p: int, e: int, axes: Collection[str], like: str) -> str:
    """The name of a directory, as another one is called."""
    if like.startswith("tp_rank_"):  # NeMo's
        return f"tp_rank_{t:02d}_pp_rank_{p:03d}"
    return f"mp_rank_{t:02d}" + (f"_{p:03d}" if "pp" in axes else "") + (f"_{e:03d}" if "ep" in axes else "")


def _etp(pairs: Collection[tuple[int, int]], tp: int, ep: int, etps: Collection[int], where: Place) -> int:
    """The number of ranks that cut an expert, which the names alone do not always say."""
    fitting = []
    for etp in [n for n in range(1, tp + 1) if tp % n == 0]:
        ranks = [(i % tp, i // etp % ep) for i in range(lcm(tp, ep * etp))]
        if set(ranks[: max(tp, ep * etp)]) <= set(pairs) <= set(ranks):
            fitting.append(etp)
    allowed = [n for n in fitting if n in etps] or fitting or [tp]
    if len(allowed) > 1 and etps:
        raise UsageError(
            f"the files do not say how many ranks cut an expert: {some([str(n) for n in allowed])} are possible",
            where=str(where),
            hint="give --etp; a save without arguments (--no-save-args) does not say it",
        )
    return allowed[-1]
