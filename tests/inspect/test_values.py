"""Statistics, histograms, checksums and elements, with numpy and xxhash as the judges."""

from __future__ import annotations

import json
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.execute import compare
from ckpttool.kernels.stats import Binning, Distance, collector, differs, differs_in_bits
from ckpttool.ops.inspect import values as values_module
from ckpttool.ops.inspect.values import parse_index
from ckpttool.report.stats import norm_of
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, origin, save_hf, write
from tests.inspect.models import CONFIG, edit_header, llama

KINDS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
}
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}


def measured(folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    done = ckpttool("inspect", folder, "--json", *options)
    assert done.code == 0, done.err
    return {t["name"]: t for t in json.loads(done.out)["list"]}


def raw(dtype: str, data: Any) -> Raw:
    array = np.asarray(data, KINDS[dtype])
    return Raw(dtype, array.view(f"u{array.dtype.itemsize}"))


def random_bits(dtype: str, shape: tuple[int, ...]) -> Raw:
    """Every kind of element, NaN and infinity among them."""
    rng = np.random.default_rng(list(dtype.encode()))
    size = np.dtype(KINDS[dtype]).itemsize
    return Raw(dtype, rng.integers(0, 1 << 8 * size, shape, np.uint64, endpoint=False).astype(f"u{size}"))


def judge(t: Raw) -> dict[str, Any]:
    """What numpy says."""
    data = t.bits.view(KINDS[t.dtype])
    with np.errstate(all="ignore"):
        wide = data.astype(np.float64)
    good = wide[np.isfinite(wide)]
    out = {
        "elements": wide.size,
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
        "zeros": int((wide == 0).sum()),
        "saturated": int((np.abs(wide) == LARGEST[t.dtype]).sum()) if t.dtype in LARGEST else None,
    }
    if good.size:
        with np.errstate(all="ignore"):
            out |= {"min": good.min(), "max": good.max(), "amax": np.abs(good).max()}
            out |= {"mean": good.mean(), "std": good.std()}
    return out


@pytest.mark.parametrize("dtype", KINDS)
def test_statistics_are_those_of_numpy(dtype: str, tmp_path: Path) -> None:
    # Random bits of F64 reach 1e308, where no sum of squares fits; a part of them tells enough.
    tensors = {"bits": random_bits(dtype, (37, 29)), "small": raw(dtype, [[0, 1, 2], [3, 4, 5]])}
    if dtype == "F64":
        tensors["bits"] = raw(dtype, np.random.default_rng(1).standard_normal((37, 29)) * 1e9)
    if dtype == "F8_E8M0":
        tensors["small"] = raw(dtype, [1, 2, 4])
    write(tmp_path / "model.safetensors", tensors)
    found = measured(tmp_path, "--stats")
    for name, tensor in tensors.items():
        for key, value in judge(tensor).items():
            have = found[name]["stats"][key]
            if value is None or isinstance(value, int):
                assert have == value, (name, key)
            else:
                assert have == pytest.approx(float(value), rel=1e-6, abs=1e-12), (name, key)


def test_special_values(tmp_path: Path) -> None:
    tensors = {
        "float": raw("F32", [np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0]),
        "fp8": raw("F8_E4M3", [448, -448, 0, 1, np.nan]),
        "nan": raw("BF16", [np.nan, np.nan]),
        "none": raw("F32", np.zeros((0, 3))),
        "nothing": raw("BF16", np.zeros((0, 3))),
        "large": raw("I64", [2**62 + 1, -(2**63)]),
        "bool": Raw("BOOL", np.asarray([0, 1, 1], np.uint8)),
    }
    write(tmp_path / "model.safetensors", tensors)
    found = {n: v["stats"] for n, v in measured(tmp_path, "--stats").items()}
    assert (found["float"]["nan"], found["float"]["inf"], found["float"]["zeros"]) == (1, 2, 2)
    assert (found["float"]["min"], found["float"]["max"], found["float"]["mean"]) == (0, 2, pytest.approx(2 / 3))
    assert (found["fp8"]["saturated"], found["fp8"]["nan"], found["fp8"]["amax"]) == (2, 1, 448)
    assert found["nan"] | {"elements": 0} == found["none"] | {"nan": 2}
    assert found["nothing"] == found["none"]
    assert found["none"]["min"] is None
    assert (found["large"]["min"], found["large"]["max"]) == (-(2**63), 2**62 + 1)
    assert found["bool"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3"])
def test_blocks_do_not_change_statistics(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tensor of many blocks; with one block they are the same but for the rounding of sums."""
    t = raw(dtype, np.random.default_rng(3).standard_normal((61, 47)))
    write(tmp_path / "model.safetensors", {"a": t})
    whole = measured(tmp_path, "--stats", "--hash", "--hist")["a"]
    monkeypatch.setattr(values_module, "BLOCK", 512)
    cut = measured(tmp_path, "--stats", "--hash", "--hist")["a"]
    assert cut["digest"] == whole["digest"]
    assert cut["histogram"] == whole["histogram"]
    for key, value in whole["stats"].items():
        expected = value if value is None else pytest.approx(value, rel=1e-12)
        assert cut["stats"][key] == expected, key


def test_sums_do_not_cancel() -> None:
    """A mean far from zero, which the textbook formula for the variance does not survive."""
    data = 1e9 + np.random.default_rng(5).standard_normal(100_000)
    numbers = collector("F64")
    for part in np.array_split(data, 7):
        numbers.add(part)
    assert numbers.stats().std == pytest.approx(data.std(), rel=1e-9)


EXTREMES = {
    "largest": [[1.7976931348623157e308] * 5, [-1.7976931348623157e308] * 3],
    "one sign": [[1.7e308, 1.6e308], [1.5e308]],
    "subnormal": [[5e-324, 1e-323, 3e-320], [-2e-322, 0.0]],
    "small": [[1e-200, 3e-200, 5e-201]],
    "small, then zeros": [[1e-200, 3e-200], [0.0, 0.0]],
    "zeros, then small": [[0.0, 0.0], [1e-200, 3e-200]],
    "small, then plain": [[1e-200, 3e-200], [1.0, 2.0, -4.0]],
    "plain, then large": [[1.0, 2.0], [1e300, -2e300]],
    "large, then small": [[1e300, 2e300], [1e-300, 5e-324]],
    "constant": [[1e300] * 4, [1e300] * 3],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_statistics_of_numbers_whose_squares_are_none(name: str) -> None:
    blocks = EXTREMES[name]
    numbers = collector("F64")
    for block in blocks:
        numbers.add(np.array(block))
    exact = [Fraction(x) for block in blocks for x in block]
    mean = sum(exact, Fraction()) / len(exact)
    variance = sum(((x - mean) ** 2 for x in exact), Fraction()) / len(exact)
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -99999, 99999
        root = (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
    found = numbers.stats()
    assert found.mean == pytest.approx(float(mean), rel=1e-12, abs=5e-324)
    assert found.std == pytest.approx(float(root), rel=1e-12, abs=5e-324 if root else float(max(exact)) * 1e-15)
    assert found.amax == max(abs(float(x)) for x in exact)


INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


def of_extremes(dtype: str) -> dict[str, list[int]]:
    """Integers near the ends of a type, and near what floats can tell apart."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    rng = np.random.default_rng(7)
    middle = (low + high) // 2 + high // 3
    return {
        "ends": [low, high],
        "low": [low] * 3,
        "high": [high] * 5 + [high - 1],
        "one apart": [middle, middle + 1, middle + 2] * 4,
        "any": rng.integers(low, high, 40, dtype, endpoint=True).tolist(),
        "one": [high],
        "zeros": [0, 0, high],
    }


@pytest.mark.parametrize("case", of_extremes("i8"))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_statistics_of_integers_are_those_of_python(dtype: str, case: str) -> None:
    values = of_extremes(dtype)[case]
    name = {"i": "I", "u": "U"}[dtype[0]] + str(8 * int(dtype[1]))
    numbers = collector(name)
    for part in np.array_split(np.array(values, dtype), 3):
        numbers.add(part)
    mean = Fraction(sum(values), len(values))
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    found = numbers.stats()
    assert (found.minimum, found.maximum, found.amax) == (min(values), max(values), max(map(abs, values)))
    assert (found.elements, found.zeros, found.nan, found.inf) == (len(values), values.count(0), 0, 0)
    assert found.mean == pytest.approx(float(mean), rel=1e-15)
    assert found.std == pytest.approx(float(variance) ** 0.5, rel=1e-15 if len(set(values)) < 9 else 1e-14)
    squares = sum(v * v for v in values)
    assert norm_of(found) == pytest.approx(squares**0.5, rel=1e-14)


def test_statistics_of_large_integers_on_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"ends": raw("I64", [-(2**63), 2**63 - 1])})
    assert measured(tmp_path, "--stats")["ends"]["stats"]["mean"] == -0.5


def test_histogram_of_the_largest_numbers() -> None:
    binning = Binning(-1.7e308, 1.7e308, 4)
    binning.add(np.array([-1.7e308, -1e308, 0.0, 1.6e308, 1.7e308]))
    assert binning.result().counts == (2, 0, 1, 2)
    assert np.isfinite(binning.result().edges).all()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50), st.integers(1, 9))
def test_histograms_are_those_of_numpy(data: list[float], bins: int) -> None:
    array = np.asarray(data, np.float32)
    binning = Binning(float(array.min()), float(array.max()), bins)
    for part in np.array_split(array, 3):
        binning.add(part)
    found = binning.result()
    assert sum(found.counts) == len(data)
    if array.min() < array.max():
        expected, edges = np.histogram(array.astype(np.float64), found.edges)
        assert found.counts == tuple(expected)
        assert found.edges[0] == edges[0]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E5M2"])
def test_histogram(dtype: str, tmp_path: Path) -> None:
    t = raw(dtype, np.concatenate([np.random.default_rng(9).standard_normal(500), [np.inf, np.nan]]))
    write(tmp_path / "model.safetensors", {"a": t, "b": raw(dtype, [4, 4]), "c": raw(dtype, [np.nan])})
    found = measured(tmp_path, "--hist")
    data = t.bits.view(KINDS[dtype]).astype(np.float64)
    expected, edges = np.histogram(data[np.isfinite(data)], 20)
    assert found["a"]["histogram"]["counts"] == list(expected)
    assert found["a"]["histogram"]["edges"] == pytest.approx(list(edges))
    assert found["b"]["histogram"] == {"edges": [4, 4], "counts": [2]}
    assert found["c"]["histogram"] == {"edges": [], "counts": []}
    done = ckpttool("inspect", tmp_path, "--hist", "--filter", "a")
    assert [int(line.split()[2]) for line in done.out.splitlines()[2:]] == list(expected)
    assert "no finite element" in ckpttool("inspect", tmp_path, "--hist", "--filter", "c").out


def test_checksums_do_not_depend_on_the_form(tmp_path: Path) -> None:
    model: Tensors = llama()
    source = save_hf(tmp_path / "hf", model, CONFIG)
    expected = {n: "xxh3_128:" + xxhash.xxh3_128_hexdigest(t.bits.tobytes()) for n, t in model.items()}
    reshard(source, tmp_path / "tp4", "--to", "ranks", "--tp-out", 4, "--pp-out", 2)
    for folder in (source, tmp_path / "tp4"):
        assert {n: t["digest"] for n, t in measured(folder, "--hash").items()} == expected
        together = measured(folder, "--hash", "--stats")
        assert {n: t["digest"] for n, t in together.items()} == expected
    edit_header(source / "model.safetensors", lambda h: h["model.norm.weight"].update(dtype="F16"))
    assert measured(source, "--hash")["model.norm.weight"]["digest"] == expected["model.norm.weight"]


def test_packed_elements_have_a_checksum_and_no_statistics(tmp_path: Path) -> None:
    bits = origin(1, "U8", (4,)).bits
    write(tmp_path / "model.safetensors", {"a": Raw("U8", bits)})
    edit_header(tmp_path / "model.safetensors", lambda h: h["a"].update(dtype="F4", shape=[8]))
    found = measured(tmp_path, "--stats", "--hash")["a"]
    assert "stats" not in found
    assert found["digest"] == "xxh3_128:" + xxhash.xxh3_128_hexdigest(bits.tobytes())
    assert ckpttool("inspect", tmp_path, "--stats").out.splitlines()[1].split("\t")[3:] == ["-"] * 9
    assert "not counted" in ckpttool("inspect", tmp_path, "--hist").out
    assert ckpttool("inspect", tmp_path, "--show", "a").code == 1


def test_statistics_of_a_cut_tensor_are_those_of_the_whole(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "hf", {n: random_bits("BF16", t.bits.shape) for n, t in llama().items()}, CONFIG)
    reshard(source, tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    assert measured(source, "--stats") == measured(tmp_path / "tp2", "--stats")


def test_stats_as_a_table(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": raw("F32", [[1, -2.5]]), "e": raw("F8_E4M3", [448])})
    lines = [line.split("\t") for line in ckpttool("inspect", tmp_path, "--stats").out.splitlines()]
    head = ["name", "dtype", "shape", "min", "max", "mean", "std", "amax", "nan", "inf", "zeros", "saturated"]
    assert lines[0] == head
    assert lines[1] == ["a", "F32", "[1, 2]", "-2.5", "1", "-0.75", "1.75", "2.5", "0", "0", "0", "-"]
    assert lines[2][-1] == "1"


# -- elements


def shown(folder: Path, text: str) -> Any:
    done = ckpttool("inspect", folder, "--json", "--show", text)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["list"]
    return found


INDEXES = [
    "",
    "...",
    ":",
    "0",
    "-1",
    "2:5",
    "::3",
    "1:-1:2",
    "...,0",
    "0,...",
    "0,1,2",
    ":,1",
    ":2, ::2, -1",
    "5:2",
    "-3:",
    ":,:,1:",
    "100:",
]


@pytest.mark.parametrize("index", INDEXES)
def test_show_takes_indexes_as_numpy_does(index: str, tmp_path: Path) -> None:
    data = np.arange(6 * 4 * 3, dtype=np.float32).reshape(6, 4, 3)
    write(tmp_path / "model.safetensors", {"a.b": raw("F32", data)})
    found = shown(tmp_path, f"a.b[{index}]" if index else "a.b")
    expected = eval(f"data[{index or '...'}]", {"data": data})  # noqa: S307 - numpy is the judge of its own syntax
    assert found["values"] == expected.tolist()
    assert found["shown_shape"] == list(expected.shape)


@pytest.mark.parametrize("index", ["6", "-7", "0,0,0,0", "a", "1.5", "::0", "::-1", "...,...", ",", "0,,1", "1:2:3:4"])
def test_show_refuses_other_indexes(index: str) -> None:
    with pytest.raises(UsageError):
        parse_index(index, (6, 4, 3), "a")


def test_show_reads_only_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors", {"a": origin(1, "F32", (100, 100))})
    boxes = []
    real = compare.read_piece

    def counted(catalog: Any, piece: Any, box: Any) -> Any:
        boxes.append(box.volume)
        return real(catalog, piece, box)

    monkeypatch.setattr(compare, "read_piece", counted)
    shown(tmp_path, "a[50:52, ::33]")
    assert boxes == [2 * 100]


def test_show_across_ranks(tmp_path: Path) -> None:
    model = llama("F32")
    source = save_hf(tmp_path / "hf", model, CONFIG)
    reshard(source, tmp_path / "tp4", "--to", "ranks", "--tp-out", 4)
    name = "model.layers.0.mlp.down_proj.weight"
    expected = model[name].bits.view(np.float32)[3, ::5]
    for folder in (source, tmp_path / "tp4"):
        found = shown(folder, f"{name}[3, ::5]")
        assert found["values"] == [float(v) for v in expected]


def test_show_prints_values_that_json_does_not_have(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors", {"a": raw("BF16", [1.5, np.nan, -np.inf]), "b": raw("F8_E4M3", [448, np.nan])}
    )
    assert shown(tmp_path, "a")["values"] == [1.5, "nan", "-inf"]
    assert shown(tmp_path, "b")["values"] == [448, "nan"]
    done = ckpttool("inspect", tmp_path, "--show", "a[:2]", "--show", "b")
    assert done.out == "a[:2]  BF16 [2] of [3]\n[1.5 nan]\nb  F8_E4M3 [2]\n[448.  nan]\n"


def test_show_errors(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"model.norm.weight": origin(1, "F32", (4,))})
    done = ckpttool("inspect", tmp_path, "--show", "model.nrom.weight[0]")
    assert done.code == 2
    assert "did you mean `model.norm.weight`" in done.err
    assert ckpttool("inspect", tmp_path, "--show", "model.norm.weight[4]").code == 2


def test_show_refuses_what_nobody_reads_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.safetensors", {"a": origin(1, "F32", (64, 64))})
    monkeypatch.setattr(values_module, "SHOWN", 1000)
    done = ckpttool("inspect", tmp_path, "--show", "a")
    assert done.code == 2
    assert "'a[:4, :4]'" in done.err
    assert shown(tmp_path, "a[:4,:4]")["shown_shape"] == [4, 4]


def test_show_of_a_tied_tensor(tmp_path: Path) -> None:
    model = {n: t for n, t in llama().items() if n != "lm_head.weight"}
    save_hf(tmp_path, model, {**CONFIG, "tie_word_embeddings": True})
    one, other = shown(tmp_path, "lm_head.weight[0]"), shown(tmp_path, "model.embed_tokens.weight[0]")
    assert one["values"] == other["values"]


# -- the kernel of --diff


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_large_integers_differ_by_one(dtype: str) -> None:
    """float64 does not tell them apart."""
    a, b = np.array([2**53, 5, 0], dtype), np.array([2**53 + 1, 4, 0], dtype)
    wrong, largest = differs(a, b, 0, 0)
    assert wrong.tolist() == [True, True, False]
    assert largest == 1
    assert not differs(a, b, 1, 0)[0].any()
    ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    assert differs(ends, ends[::-1].copy(), 0, 0)[1] == float(2**64 - 1)
    assert differs(a[0], b[0], 0, 0)[1] == 1
    assert differs_in_bits(a, b)[1] == 1
    apart = Distance()
    apart.add(a, b)
    assert apart.gap2 == 2
    assert apart.relative == pytest.approx(2**0.5 / 2**53)


def test_signed_and_unsigned_integers_differ_by_one() -> None:
    a, b = np.array([2**62 + 1, -1, 7], "i8"), np.array([2**62, 2**64 - 1, 7], "u8")
    wrong, largest = differs(a, b, 0, 0)
    assert wrong.tolist() == [True, True, False]
    assert largest == float(2**64)
    assert differs(a[:1], b[:1], 0, 0)[1] == 1


def test_differs() -> None:
    a = np.asarray([1.0, 2.0, np.nan, np.inf, 5.0])
    b = np.asarray([1.5, 2.0, np.nan, np.inf, -5.0])
    wrong, largest = differs(a, b, 0.1, 0)
    assert wrong.tolist() == [True, False, False, False, True]
    assert largest == 10
    wrong, largest = differs(a, b, 0, 2)
    assert (wrong.sum(), largest) == (0, 0.0)
