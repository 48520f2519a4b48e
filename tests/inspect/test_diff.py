"""``inspect --diff``: equal however sharded and named, and every kind of difference told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool as ckpttool_api
from ckpttool.errors import LayoutError
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, origin, save_hf
from tests.inspect.models import CONFIG, edit_json, flip, llama, place
from tests.inspect.test_widths import on_terminal

NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
FIXTURES = Path(__file__).parents[2] / "fixtures"


def diff(left: Path, right: Path, *options: object) -> tuple[int, dict[str, Any]]:
    done = ckpttool("inspect", left, "--diff", right, "--json", *options)
    answer: dict[str, Any] = json.loads(done.out)
    assert answer["schema"] == "ckpttool.inspect/1"
    known = answer["values"] and not answer["failed_components"]
    assert answer["equal"] is ((True if known else None) if done.code == 0 else False)
    return done.code, answer


def told(answer: dict[str, Any]) -> set[tuple[str, str]]:
    """(kind of difference, tensor) of everything that differs."""
    kinds = {(k, n) for k in ("only_left", "only_right") for n in answer[k]}
    return kinds | {(k, e["name"]) for k in ("shapes", "dtypes", "elements") for e in answer[k]}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in several forms."""
    root = tmp_path_factory.mktemp("forms")
    out = {"hf": save_hf(root / "hf", llama(), CONFIG)}
    for name, options in {
        "tp2": ["--to", "ranks", "--tp-out", 2],
        "tp4pp2": ["--to", "ranks", "--tp-out", 4, "--pp-out", 2],
        "fused": ["--to", "ranks", "--tp-out", 2, "--fuse"],
        "vllm": ["--to", "vllm", "--tp-out", 2],
    }.items():
        out[name] = root / name
        reshard(out["hf"], out[name], *options)
    return out


@pytest.mark.product
@pytest.mark.parametrize("left", ["hf", "tp2", "tp4pp2", "fused", "vllm"])
@pytest.mark.parametrize("right", ["hf", "tp2", "fused", "vllm"])
def test_all_forms_of_a_model_are_equal(forms: dict[str, Path], left: str, right: str) -> None:
    code, answer = diff(forms[left], forms[right])
    assert (code, told(answer)) == (0, set())
    assert answer["values"] is True
    if {left, right} & {"hf", "tp2", "tp4pp2"}:
        assert answer["compared"] == 21  # under the published names, nothing fused


def test_a_real_tp8_checkpoint_equals_its_tp2_and_whole_forms(tmp_path: Path) -> None:
    source = FIXTURES / "llama_tp8"
    reshard(source, tmp_path / "tp2", "--tp-out", 2)
    reshard(source, tmp_path / "hf", "--to", "hf")
    for left, right in ((source, tmp_path / "tp2"), (tmp_path / "tp2", tmp_path / "hf"), (tmp_path / "hf", source)):
        code, answer = diff(left, right)
        assert (code, told(answer)) == (0, set())


def test_files_of_another_program_without_config_are_equal() -> None:
    """DeepSeek's own converter, its own names, no config.json; it leaves out the prediction layer."""
    published, native = FIXTURES / "deepseek_v3", FIXTURES / "deepseek_v3_mp2"
    code, answer = diff(published, native)
    assert code == 3
    assert {k for k, _ in told(answer)} == {"only_left"}
    assert all(".61." in n for _, n in told(answer))
    assert diff(native, published)[1]["only_right"] == answer["only_left"]
    assert diff(published, native, "--filter", "re:^(?!.*[.]61[.])")[0] == 0


@pytest.mark.parametrize("form", ["hf", "tp2", "vllm"])
def test_one_wrong_bit_is_found(forms: dict[str, Path], form: str, tmp_path: Path) -> None:
    model = llama()
    q = "model.layers.1.self_attn.q_proj.weight"
    model[q].bits[9, 5] ^= np.uint16(1)
    other = save_hf(tmp_path / "other", model, CONFIG)
    assert diff(forms[form], other, "--headers-only")[0] == 0
    code, answer = diff(forms[form], other)
    assert code == 3
    if form != "vllm":
        assert told(answer) == {("elements", q)}
        (found,) = answer["elements"]
        assert (found["different"], found["of"], found["first"]) == (1, 256, [9, 5])
    else:
        assert len(answer["elements"]) == 1


def test_tells_kinds_of_difference_apart(tmp_path: Path) -> None:
    left = save_hf(tmp_path / "left", llama(), CONFIG)
    model: Tensors = {n: t for n, t in llama().items() if n != NORM}
    model["extra.weight"] = origin(50, "BF16", (3,))
    model[HEAD] = origin(51, "F16", (32, 16))
    model[EMBED] = origin(52, "BF16", (16, 32))
    right = save_hf(tmp_path / "right", model, CONFIG)
    code, answer = diff(left, right)
    assert code == 3
    expected = {("only_left", NORM), ("only_right", "extra.weight"), ("dtypes", HEAD), ("shapes", EMBED)}
    assert told(answer) == expected
    assert answer["dtypes"] == [{"name": HEAD, "left": "BF16", "right": "F16"}]
    assert answer["shapes"] == [{"name": EMBED, "left": "[32, 16]", "right": "[16, 32]"}]
    assert told(diff(left, right, "--filter", "lm_head*")[1]) == {("dtypes", HEAD)}


def floats(values: list[float], dtype: str = "F32") -> Raw:
    data = np.asarray(values, np.float32)
    return Raw(dtype, data.view(np.uint32) if dtype == "F32" else (data.view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("options", [[], ["--atol", 0.1]])
def test_a_number_alone_and_whole_numbers_are_compared(tmp_path: Path, options: list[object]) -> None:
    def made(root: str, scale: float, step: int) -> Path:
        alone = Raw("F32", np.asarray(scale, np.float32).view(np.uint32))
        whole = Raw("I32", np.asarray([1, -7, step], np.int32))
        return save_hf(tmp_path / root, {"alone": alone, "whole": whole, "same": Raw("F32", np.asarray(7, np.uint32))})

    left = made("left", 3.5, 10)
    assert diff(left, made("equal", 3.5, 10), *options)[0] == 0
    code, answer = diff(left, made("right", -3.5, 40), *options)
    found = {d["name"]: (d["different"], d["first"], d["max_abs"], d["relative"]) for d in answer["elements"]}
    assert code == 3
    assert found["alone"] == (1, [], 7.0, 2.0)
    assert found["whole"][:3] == (1, [2], 30.0)
    assert found.keys() == {"alone", "whole"}


def test_tolerance(tmp_path: Path) -> None:
    left = save_hf(tmp_path / "left", {"a": floats([1, 2, 3, np.nan, np.inf])})
    right = save_hf(tmp_path / "right", {"a": floats([1.001, 2, 3.3, np.nan, np.inf])})
    code, answer = diff(left, right)
    assert code == 3
    assert answer["elements"][0]["different"] == 2
    assert answer["elements"][0]["max_abs"] == pytest.approx(0.3, rel=1e-3)
    assert diff(left, right, "--atol", 0.4)[0] == 0
    assert diff(left, right, "--rtol", 0.1)[0] == 0
    code, answer = diff(left, right, "--atol", 0.01)
    assert (code, answer["elements"][0]["different"], answer["elements"][0]["first"]) == (3, 1, [2])
    assert answer["tolerance"] == {"atol": 0.01, "rtol": 0.0}
    other = save_hf(tmp_path / "other", {"a": floats([1, 2, 3, 4, np.inf])})
    assert diff(left, other, "--atol", 100)[1]["elements"][0]["max_abs"] == "nan"


def test_a_tolerance_forgives_the_dtype_and_nothing_else(tmp_path: Path) -> None:
    left = save_hf(tmp_path / "left", {"a": floats([1, 2.5, -3])})
    right = save_hf(tmp_path / "right", {"a": floats([1, 2.5, -3], "BF16")})
    assert diff(left, right)[0] == 3
    code, answer = diff(left, right, "--atol", 0)
    assert code == 0
    assert told(answer) == {("dtypes", "a")}


def test_zero_and_minus_zero_differ_bit_for_bit_only(tmp_path: Path) -> None:
    left = save_hf(tmp_path / "left", {"a": floats([0.0, 1])})
    right = save_hf(tmp_path / "right", {"a": floats([-0.0, 1])})
    assert diff(left, right)[0] == 3
    assert diff(left, right, "--atol", 0)[0] == 0


def test_tied_embeddings_are_equal_stored_once_or_twice(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    model = llama()
    once = save_hf(tmp_path / "once", {n: t for n, t in model.items() if n != HEAD}, config)
    twice = save_hf(tmp_path / "twice", {**model, HEAD: model[EMBED]}, config)
    assert diff(once, twice)[0] == 0
    assert diff(twice, once)[0] == 0
    assert diff(once, once)[0] == 0
    flip(twice / "model.safetensors", place(twice / "model.safetensors", HEAD)[0])
    assert told(diff(once, twice)[1]) == {("elements", HEAD)}
    edit_json(twice / "config.json", lambda c: c.update(tie_word_embeddings=False))
    assert diff(once, twice, "--headers-only")[0] == 0


def test_packed_elements_are_compared_as_bytes(tmp_path: Path) -> None:
    def packed(value: int) -> Path:
        """Four bytes that hold eight elements of four bits."""
        folder = save_hf(tmp_path / str(value), {"a": Raw("U8", np.asarray([1, 2, 3, value], np.uint8))})
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"U8", "shape": [4]', b'"F4", "shape": [8]'))
        return folder

    assert diff(packed(4), packed(4))[0] == 0
    assert told(diff(packed(4), packed(5))[1]) == {("elements", "a")}


def test_text(forms: dict[str, Path], tmp_path: Path) -> None:
    done = ckpttool("inspect", forms["hf"], "--diff", forms["tp2"])
    assert (done.code, done.out) == (0, "equal: 21 tensors (names, dtypes, shapes, values compared)\n")
    assert ckpttool("inspect", forms["hf"], "--diff", forms["tp2"], "--values").out == done.out
    near = ckpttool("inspect", forms["hf"], "--diff", forms["tp2"], "--atol", 0.5, "--rtol", 1e-3)
    said = "equal: 21 tensors (names and shapes compared, values within 0.5 + 0.001 * |B|)\n"
    assert (near.code, near.out) == (0, said)
    other = save_hf(tmp_path / "other", {n: t for n, t in llama().items() if n != NORM}, CONFIG)
    done = ckpttool("inspect", forms["hf"], "--diff", other)
    assert done.code == 3
    columns = "difference\tname\twhat"
    assert done.out.splitlines() == [f"{columns}\trelative\tcosine", f"only in A\t{NORM}\t\t\t"]
    changed = "different: 0 of 20 tensors changed, 1 only in A (names, dtypes, shapes{} compared{})\n"
    assert done.err == changed.format(", values", "")
    done = ckpttool("inspect", forms["hf"], "--diff", other, "--headers-only")
    assert (done.code, done.err) == (3, changed.format("", "; values not compared"))
    assert done.out.splitlines() == [columns, f"only in A\t{NORM}\t"]


def noisy(tensors: Tensors, names: dict[str, float]) -> Tensors:
    """Some tensors times a factor, from their fourth row on."""
    out = dict(tensors)
    for name, factor in names.items():
        values = widened(tensors[name])
        values[3:] *= factor
        out[name] = Raw("BF16", (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    return out


def widened(tensor: Raw) -> np.ndarray[Any, np.dtype[Any]]:
    """BF16 as float64."""
    return (tensor.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.mark.parametrize("block", [64, 4 << 20])
def test_how_far_tensors_are_apart(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are equal, so with small blocks some lie before the first difference."""
    monkeypatch.setattr("ckpttool.ops.inspect.diff.BLOCK", block)
    one = {n: Raw("BF16", (t.bits & 0x807F) | 0x3E80) for n, t in llama().items()}
    two = noisy(one, {UP.format(0): 1.5, UP.format(1): 4.0, EMBED: 2.0})
    left, right = save_hf(tmp_path / "one", one, CONFIG), save_hf(tmp_path / "two", two, CONFIG)
    code, answer = diff(left, right)
    assert (code, answer["changed"], answer["compared"]) == (3, 3, 21)
    assert [e["name"] for e in answer["elements"]] == [UP.format(1), EMBED, UP.format(0)]
    for e in answer["elements"]:
        a, b = widened(one[e["name"]]).ravel(), widened(two[e["name"]]).ravel()
        assert e["relative"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-12)
        assert e["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
        assert e["different"] == int((a != b).sum())
    done = ckpttool("inspect", left, "--diff", right)
    assert done.err == "different: 3 of 21 tensors changed (names, dtypes, shapes, values compared)\n"
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert rows[0] == ["difference", "name", "what", "relative", "cosine"]
    assert [float(r[3]) for r in rows[1:]] == pytest.approx([e["relative"] for e in answer["elements"]], rel=1e-8)
    shown = on_terminal("inspect", left, "--diff", right)
    assert shown[:2] == [done.err.removesuffix("\n"), ""]
    table = shown[2 : shown.index("", 2)]  # by layer and by module: test_drift
    assert [line.split()[0] for line in table] == ["changed", UP.format("{0..1}"), EMBED]
    assert max(map(len, shown)) <= 80


def test_what_is_not_a_number_comes_first(tmp_path: Path) -> None:
    one, two = llama(), noisy(llama(), {EMBED: 3.0})
    two[NORM] = Raw("BF16", np.full(16, 0x7FC0, np.uint16))
    two[HEAD] = Raw("BF16", np.zeros_like(one[HEAD].bits))
    left, right = save_hf(tmp_path / "one", one, CONFIG), save_hf(tmp_path / "two", two, CONFIG)
    found = {e["name"]: (e["relative"], e["cosine"]) for e in diff(left, right)[1]["elements"]}
    assert {n: found[n] for n in (NORM, HEAD)} == {NORM: ("nan", "nan"), HEAD: ("inf", None)}
    assert list(found)[2] == EMBED


def test_a_missing_other_is_a_usage_error(forms: dict[str, Path], tmp_path: Path) -> None:
    done = ckpttool("inspect", forms["hf"], "--diff", tmp_path / "gone")
    assert done.code == 2
    assert "does not exist" in done.err


def test_headers_say_nothing_of_values(forms: dict[str, Path], tmp_path: Path) -> None:
    """Models of equal headers and different values: nobody who has not read the values says that they are equal."""
    other = save_hf(tmp_path / "other", noisy(llama(), {EMBED: 2.0}), CONFIG)
    done = ckpttool("inspect", forms["hf"], "--diff", other)
    assert (done.code, done.err.startswith("different: 1 of 21 ")) == (3, True)
    done = ckpttool("inspect", forms["hf"], "--diff", other, "--headers-only")
    how = "(names, dtypes, shapes compared; values not compared)"
    assert (done.code, done.out) == (0, f"same headers: 21 tensors {how}\n")
    code, answer = diff(forms["hf"], other, "--headers-only")
    assert (code, answer["equal"], answer["values"], "drift" in answer) == (0, None, False, False)
    library = ckpttool_api.open(forms["hf"])
    assert [library.diff(other, values=v).equal for v in (True, False)] == [False, None]
    assert library.diff(forms["tp2"]).equal is True
    assert "same headers: 21 tensors" in repr(library.diff(other, values=False))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--headers-only"], "--atol, --rtol and --headers-only belong to --diff"),
        (["--diff", "x", "--headers-only", "--values"], "--headers-only and --values contradict each other"),
        (["--diff", "x", "--headers-only", "--atol", "1"], "--headers-only compares no values"),
        (["--values"], "--values belongs to --check"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], said: str) -> None:
    done = ckpttool("inspect", FIXTURES / "llama_tp8", *options)
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(("left", "right", "equal"), [("fused", "apart", None), ("fused", "fused", True)])
def test_components_that_cannot_be_compared_are_not_equal(
    left: str, right: str, equal: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is equal; nothing is known of an optimizer whose names cannot be brought to the other side's."""
    roots = {"fused": FIXTURES / "paddle_unified" / "nlp_llamafused_bf16_tp2", "apart": tmp_path / "apart"}
    reshard(roots["fused"], roots["apart"], "--unfuse", "--quiet")

    def refuse(*_: object) -> None:
        raise LayoutError("no names for it")

    monkeypatch.setattr("ckpttool.ops.inspect.diff.propagate_to_component", refuse)
    code, answer = diff(roots[left], roots[right])
    assert (code, answer["equal"]) == (0, equal)
    assert bool(answer["failed_components"]) is (equal is None)
    if equal is None:
        done = ckpttool("inspect", roots[left], "--diff", roots[right])
        assert done.out.startswith("no difference: ")
        assert "not compared: " in done.out
        done = ckpttool("inspect", roots[left], "--diff", roots[right], "--only", "optimizer")
        assert (done.code, "nothing can be compared" in done.err) == (1, True)


@pytest.mark.parametrize("kind", ["equal", "different", "same headers", "no difference"])
def test_terminal_page_and_notebook_give_one_verdict(
    kind: str, forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right, options = forms["hf"], forms["tp2"], []
    if kind == "different":
        right = save_hf(tmp_path / "other", noisy(llama(), {EMBED: 2.0}), CONFIG)
    elif kind == "same headers":
        options = ["--headers-only"]
    elif kind == "no difference":
        left = FIXTURES / "paddle_unified" / "nlp_llamafused_bf16_tp2"
        right = tmp_path / "apart"
        reshard(left, right, "--unfuse", "--quiet")

        def refuse(*_: object) -> None:
            raise LayoutError("no names for it")

        monkeypatch.setattr("ckpttool.ops.inspect.diff.propagate_to_component", refuse)
    found = ckpttool_api.open(left).diff(right, values=not options)
    said = found.verdict()
    assert said.word == kind
    done = ckpttool("inspect", left, "--diff", right, *options)
    assert "\n".join([str(said), *said.omitted]) in done.err + done.out
    assert str(said) in getattr(found, "_repr_html_")()  # noqa: B009  (of a class that knows nothing of notebooks)
    page = ckpttool("inspect", left, "--diff", right, *options, "--html", tmp_path / "r.html", "--json")
    verdict = json.loads(page.out)["verdicts"][1]["text"]
    assert verdict == said.naming(right.name)
    assert "equal" not in verdict.lower() or found.equal


def test_one_element_of_many_is_counted_and_not_rounded_away(tmp_path: Path) -> None:
    values = [1.0] * 5000
    left = save_hf(tmp_path / "left", {"a": floats(values)})
    right = save_hf(tmp_path / "right", {"a": floats([1.05, *values[1:]])})
    row = on_terminal("inspect", left, "--diff", right)[3].split()
    assert (row[0], row[2][:6], row[3]) == ("a", "0.9999", "1")
    assert float(row[2]) < 1
