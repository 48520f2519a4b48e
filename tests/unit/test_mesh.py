"""Ranks and coordinates: against the formulas of the software that uses them, and each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.mesh import Mesh, default_etp, share
from ckpttool.errors import CkptError, LayoutError, UsageError

SMALL = st.integers(1, 6)
MESHES = st.builds(Mesh, tp=SMALL, pp=SMALL, ep=SMALL, etp=SMALL, experts=st.sampled_from(("etp-ep", "ep-etp")))


@given(MESHES)
def test_coordinates_cover_the_mesh(mesh: Mesh) -> None:
    seen = list(mesh.all_coords())
    assert [c.rank for c in seen] == list(range(mesh.world))
    assert {c.pp for c in seen} == set(range(mesh.pp))
    for stage in range(mesh.pp):
        here = [c for c in seen if c.pp == stage]
        assert {c.tp for c in here} == set(range(mesh.tp))
        grid = [(c.ep, c.etp) for c in here]
        # Every expert cell is there, and as often as every other: the smaller grid repeats.
        assert {grid.count(cell) for cell in grid} == {mesh.width // (mesh.ep * mesh.etp)}
        assert len(set(grid)) == mesh.ep * mesh.etp
        tps = [c.tp for c in here]
        assert {tps.count(t) for t in tps} == {mesh.width // mesh.tp}


@given(MESHES)
def test_first_rank_of_coordinates(mesh: Mesh) -> None:
    for c in mesh.all_coords():
        found = mesh.coords(mesh.rank_of(pp=c.pp, tp=c.tp, ep=c.ep, etp=c.etp))
        assert found[1:] == c[1:]
        assert found.rank <= c.rank


def test_rank_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no rank has"):
        Mesh(tp=2).rank_of(tp=2)


def test_megatron_order() -> None:
    """Tp 2, ep 4, etp 2: etp is the fastest, then ep."""
    mesh = Mesh(tp=2, ep=4, etp=2)
    assert [(c.tp, c.etp, c.ep) for c in mesh.all_coords()] == [(i % 2, i % 2, i // 2) for i in range(8)]


def test_deepseek_order() -> None:
    assert [(c.tp, c.ep) for c in Mesh(tp=4, ep=4).all_coords()] == [(i, i) for i in range(4)]


def test_tensorrt_order() -> None:
    """mapping.py: moe_ep_rank = tp_rank % moe_ep_size, moe_tp_rank = tp_rank // moe_ep_size."""
    mesh = Mesh(tp=8, ep=4, etp=2, experts="ep-etp")
    assert [(c.ep, c.etp) for c in mesh.all_coords()] == [(i % 4, i // 4) for i in range(8)]


def test_even_stages() -> None:
    assert Mesh(pp=3).stage_layers(6) == [[0, 1], [2, 3], [4, 5]]


def test_uneven_stages() -> None:
    with pytest.raises(LayoutError) as caught:
        Mesh(pp=3).stage_layers(8)
    assert "--pp-layout 3,3,2" in caught.value.render()
    assert Mesh(pp=3, layout=(3, 3, 2)).stage_layers(8) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_virtual_stages() -> None:
    """Two chunks for each of two stages."""
    assert Mesh(pp=2, layout=(1, 2, 1, 1)).stage_layers(5) == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 0}, "--tp is 0"),
        ({"pp": 2, "layout": (1, 2, 3)}, "not a multiple of pp 2"),
        ({"pp": 2, "layout": (-1, 2)}, "negative"),
    ],
)
def test_impossible_meshes(fields: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Mesh(**fields)  # type: ignore[arg-type]  # the layout is a tuple


def test_layout_that_does_not_add_up() -> None:
    with pytest.raises(LayoutError, match="places 3 layers, the model has 4"):
        Mesh(pp=2, layout=(1, 2)).stage_layers(4)


@given(MESHES, st.lists(st.integers(0, 9), max_size=3))
def test_json(mesh: Mesh, layout: list[int]) -> None:
    mesh = mesh.with_layout([n for n in layout for _ in range(mesh.pp)])
    assert Mesh.from_json(mesh.to_json()) == mesh


@pytest.mark.parametrize(
    "data", [{"tp": "2"}, {"tp": 2.5}, {"tp": None}, {"tp": True}, {"x": 1}, {"layout": ["1"]}, {"tp": 0}]
)
def test_json_that_is_no_mesh(data: dict[str, object]) -> None:
    with pytest.raises((TypeError, CkptError)):
        Mesh.from_json(data)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares(total: int, ways: int) -> None:
    parts = [share(total, ways, i) for i in range(ways)]
    assert [n for a, b in parts for n in range(a, b)] == list(range(total))
    lengths = [b - a for a, b in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_text() -> None:
    assert str(Mesh(tp=8, etp=8)) == "tp 8"
    assert str(Mesh(tp=2, pp=2, ep=4, layout=(1, 2))) == "tp 2, pp 2, ep 4, etp 1, layers 1,2"


@pytest.mark.parametrize(
    ("source", "tp", "ep", "asked", "etp"),
    [
        (Mesh(), 8, 8, True, 1),  # 8 devices are 8 ranks
        (Mesh(tp=8, etp=8), 4, 2, True, 1),
        (Mesh(), 4, 1, True, 4),  # no expert parallelism: cut like the dense layers
        (Mesh(tp=8, etp=8), 2, 1, False, 2),
        (Mesh(tp=4), 2, 1, False, 1),  # experts that are whole stay whole
        (Mesh(ep=4), 2, 4, False, 1),  # tp 1 and etp 1 do not make etp follow tp
        (Mesh(tp=2, ep=4, etp=2), 4, 4, False, 2),
        (Mesh(tp=2, ep=4, etp=1), 2, 1, True, 2),
    ],
)
def test_experts_are_whole_where_ep_is_asked_for(source: Mesh, tp: int, ep: int, asked: bool, etp: int) -> None:
    assert default_etp(source, tp, ep, ep_asked=asked) == etp
