"""Who holds what, for any number of ranks: layouts as ``layout_of`` makes them, without a checkpoint."""

from __future__ import annotations

from ckpttool.core.geometry import Box
from ckpttool.ops.inspect.holdings import HeldBox, Holding, HoldingGroup, Layout, Ranks, Which


def cut(shape: tuple[int, ...], axis: int, owners: list[Ranks]) -> tuple[HeldBox, ...]:
    """The boxes of a tensor that is cut along an axis; the first ones take what is left over."""
    out, at = [], 0
    for i, ranks in enumerate(owners):
        size = shape[axis] // len(owners) + (i < shape[axis] % len(owners))
        start = tuple(at if a == axis else 0 for a in range(len(shape)))
        stop = tuple(at + size if a == axis else n for a, n in enumerate(shape))
        out.append(HeldBox(Box(start, stop), ranks))
        at += size
    return tuple(out)


def whole(shape: tuple[int, ...], ranks: Ranks) -> tuple[HeldBox, ...]:
    return (HeldBox(Box((0,) * len(shape), shape), ranks),)


def layout(tp: int, pp: int = 1, ep: int = 1, layers: int = 8, experts: int = 256) -> Layout:
    """A mixture of experts over ``max(tp, ep) * pp`` ranks, of which ep hold whole experts."""
    width = max(tp, ep)
    world = width * pp

    def kind(name: str, shape: tuple[int, ...], axis: int | None, *, padding: int = 0) -> Holding:
        groups = []
        for stage in range(pp):
            every = tuple(range(stage * width, (stage + 1) * width))
            owners = [every[i::tp] for i in range(tp)]
            held = whole(shape, every) if axis is None or tp == 1 else cut(shape, axis, owners)
            groups.append(HoldingGroup(_stage(stage, pp, layers), layers // pp, held))
        padded = groups[-1].held[-1].ranks if padding else ()
        return Holding(name, "BF16", shape, layers, tuple(groups), padding, padded)

    of_experts = [
        HoldingGroup((*_stage(s, pp, layers), *_share("experts", r, ep, experts)), layers // pp * (experts // ep),
              whole((64, 32), tuple(range(s * width + r, (s + 1) * width, ep))))
        for s in range(pp) for r in range(ep)
    ]  # fmt: skip
    holdings = (
        kind("model.embed_tokens.weight", (129_280, 7168), 0, padding=4096),
        kind(f"model.layers.{{0..{layers - 1}}}.self_attn.q_proj.weight", (8192, 4096), 0),
        kind(f"model.layers.{{0..{layers - 1}}}.self_attn.o_proj.weight", (4096, 8192), 1),
        Holding("model.layers.{0..7}.mlp.experts.{0..255}.up_proj.weight", "F8_E4M3", (64, 32), layers * experts,
                tuple(of_experts), 0),
        kind("a.very.long.name." * 9 + "weight", (64,), None),
        kind("имя.буквами<&>\"'.weight", (64,), None),
    )  # fmt: skip
    sizes = {r: 10_510_000_000 + 1000 * (r // width) for r in range(world)}
    stages = tuple((_stage(s, pp, layers), tuple(range(s * width, (s + 1) * width))) for s in range(pp))
    return Layout(f"tp {tp}, pp {pp}, ep {ep}, etp 1", world, holdings, sizes, stages if pp > 1 else ())


def _stage(stage: int, pp: int, layers: int) -> Which:
    return _share("layers", stage, pp, layers)


def _share(word: str, index: int, ways: int, of: int) -> Which:
    return ((word, tuple(range(index * of // ways, (index + 1) * of // ways))),) if ways > 1 else ()


def irregular(world: int) -> Layout:
    """Runs of elements that end anywhere, as ZeRO cuts them; two axes; and what is on ranks without a pattern."""
    shape, at, runs = (97, 31), 0, []
    for rank in range(world):
        stop = 97 * 31 * (rank + 1) // world
        while at < stop:
            row, column = divmod(at, 31)
            if column or stop - at < 31:
                end = min(stop, (row + 1) * 31)
                runs.append(HeldBox(Box((row, column), (row + 1, column + end - at)), (rank,)))
                at = end
            else:
                rows = (stop - at) // 31
                runs.append(HeldBox(Box((row, 0), (row + rows, 31)), (rank,)))
                at += rows * 31
    half = world // 2
    boxes = [(i, j, Box((i * 8, j * 4), (i * 8 + 8, j * 4 + 4))) for i in range(2) for j in range(half)]
    grid = tuple(HeldBox(box, (i * half + j,)) for i, j, box in boxes) or whole((16, 4), (0,))
    odd = tuple(r for r in range(world) if r * r % 7 in (1, 2)) or (0,)
    holdings = (
        Holding("optimizer/flat/moment1_0", "F32", shape, 1, (HoldingGroup((), 1, tuple(runs)),), 0),
        Holding("grid", "F32", (16, 4 * max(world // 2, 1)), 1, (HoldingGroup((), 1, grid),), 0),
        Holding("odd", "F32", (16,), 1, (HoldingGroup((), 1, whole((16,), odd)),), 0),
        Holding("number", "I64", (), 1, (HoldingGroup((), 1, whole((), tuple(range(world)))),), 0),
        Holding("none", "F32", (0, 4), 1, (HoldingGroup((), 1, ()),), 0),
    )
    return Layout("as its metadata says", world, holdings, {r: 1000 + r for r in range(world)})


LAYOUTS = {
    "tp1": layout(1), "tp2": layout(2), "tp8": layout(8), "tp64": layout(64), "tp512": layout(512),
    "tp8ep64": layout(8, ep=64), "tp8pp8": layout(8, pp=8), "tp4pp2ep8": layout(4, 2, 8),
    "tp8pp128": layout(8, pp=128, layers=128), "tp2pp4ep256": layout(2, 4, 256), "pp64": layout(1, 64, layers=64),
    "irregular1": irregular(1), "irregular2": irregular(2), "irregular8": irregular(8),
    "irregular64": irregular(64), "irregular512": irregular(512),
}  # fmt: skip
