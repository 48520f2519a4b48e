"""The format and the mesh of the output, and which of its ranks are written."""

from __future__ import annotations

from ckpttool.core.mesh import Mesh, default_etp
from ckpttool.errors import UsageError
from ckpttool.formats import registry
from ckpttool.formats.base import StoredCheckpoint, Writer
from ckpttool.targeting.target import Target


def target_mesh(source: StoredCheckpoint, target: Target, notes: list[str]) -> tuple[Writer, Mesh, Mesh]:
    """Who writes DST, its mesh, and the mesh that the flags ask for. What is not said stays as it is in SRC."""
    said = target.from_flags()
    src = source.mesh
    tp = said.get("tp", src.tp)
    pp = said.get("pp", src.pp)
    ep = said.get("ep")
    if ep is None:
        folded = src.ep > 1 and src.ep == src.tp and src.etp == 1
        ep = tp if folded else src.ep
        if folded and ep != src.ep:
            notes.append(f"ep {ep}: the source has ep = tp; change it with --ep-out")
    etp = said.get("etp", default_etp(src, tp, ep, ep_asked="ep" in said))
    layout = target.pp_layout or (src.layout if pp == src.pp else ())
    if target.pp_layout and "pp" not in said:
        pp = len(target.pp_layout)
    asked = Mesh(tp, pp, ep, etp, layout)
    name = target.format
    if not name:
        was = registry.reader(source.format).capabilities
        if was.default_target:
            name = source.format
        elif asked.world == 1:
            name = "hf"
        else:
            name = source.format if src.world > 1 or was.sharded else "ranks"
        notes.append(f"written as {name}" + ("" if name == source.format else " (--to chooses another format)"))
    writer = registry.writer(name)
    mesh = writer.target_mesh(asked, said)
    return writer, mesh, asked


def chosen_ranks(target: Target, mesh: Mesh) -> tuple[int, ...]:
    """The ranks of the output that are written, ascending. Raises UsageError for one that there is not."""
    if target.ranks is None:
        return tuple(range(mesh.world))
    wrong = [r for r in target.ranks if r >= mesh.world]
    if wrong:
        there = f"ranks 0 to {mesh.world - 1}" if mesh.world > 1 else "rank 0 only"
        raise UsageError(
            f"--ranks-out names rank {wrong[0]}, the output has {there}",
            hint="--ranks-out chooses which ranks are written; --tp-out, --pp-out and --ep-out set how many there are",
        )
    return tuple(sorted(set(target.ranks)))
