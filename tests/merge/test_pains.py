"""What goes wrong for people who merge checkpoints: each is refused with a way out, or simply works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.ops.merge.config import merged_config
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Array, Tensors, read_all
from tests.merge.models import HIDDEN, bf16, f32, finetuned, floats, llama, llama_config, merge, refused, save
from tests.merge.processors import older

FIXTURES = Path(__file__).parents[2] / "fixtures" / "merge"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of the same shapes."""
    base = llama()
    return save(tmp_path / "a", base), save(tmp_path / "b", finetuned(base, 1))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def mean(*tensors: Array) -> Array:
    out: Array = np.mean(np.stack(tensors), axis=0)
    return out


def same(found: Tensors, wanted: Tensors) -> None:
    """Equal names and bits."""
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not np.array_equal(found[n].bits, wanted[n].bits)] == []


# -- models that do not fit together


def test_different_shapes_are_named(tmp_path: Path) -> None:
    a, b = llama(), llama(seed=1)
    b[Q_PROJ] = bf16(np.zeros((HIDDEN + 8, HIDDEN)))
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    error = refused(tmp_path / "out", tmp_path / "a", tmp_path / "b", "--weights", "0.5,0.5")
    assert f"`{Q_PROJ}`" in error
    assert f"[{HIDDEN}, {HIDDEN}]" in error
    assert f"[{HIDDEN + 8}, {HIDDEN}]" in error


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    """Tensors have names and shapes; that is enough."""
    rng = np.random.default_rng(0)
    shapes = {"trunk.mixer.3.gate": (5, 7), "trunk.mixer.3.bias": (7,), "head": (3, 2, 2)}
    models = []
    for name in "ab":
        models.append({n: bf16(rng.standard_normal(s)) for n, s in shapes.items()})
        config = {"model_type": "mixer_of_tomorrow", "architectures": ["TomorrowForCausalLM"]}
        save(tmp_path / name, models[-1], config)
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--weights", "0.5,0.5")
    same(
        read_all(tmp_path / "out"),
        {n: bf16(mean(floats(models[0][n]), floats(models[1][n]))) for n in shapes},
    )
    assert config_of(tmp_path / "out")["model_type"] == "mixer_of_tomorrow"


@pytest.fixture
def vocabularies(tmp_path: Path) -> Path:
    """``small`` has 32 tokens, ``large`` 36."""
    save(tmp_path / "small", llama(), llama_config())
    save(tmp_path / "large", llama(vocab=36, seed=1), llama_config(vocab=36))
    return tmp_path


def test_a_few_rows_more_are_refused_with_the_way_out(vocabularies: Path) -> None:
    error = refused(vocabularies / "out", vocabularies / "small", vocabularies / "large", "--weights", "0.5,0.5")
    assert "--vocab" in error
    for name in EMBEDDINGS:
        assert f"`{name}`" in error
    assert "[32, 16]" in error
    assert "[36, 16]" in error


@pytest.mark.parametrize(("choice", "rows"), [("min", 32), ("max", 36), ("base", 36)])
def test_a_few_rows_more_merge_as_asked(choice: str, rows: int, vocabularies: Path) -> None:
    out = vocabularies / "out"
    small, large = vocabularies / "small", vocabularies / "large"
    # task_arithmetic with all of `small` added to `large`, which is the base: `small` where both have rows.
    options = (
        "--method",
        "task_arithmetic",
        "--weights",
        "1",
        "--base",
        large,
        "--vocab",
        choice,
        "--dtype",
        "float32",
    )
    merge(small, "-o", out, *options)
    found, a, b = read_all(out), read_all(small), read_all(large)
    for name in EMBEDDINGS:
        assert found[name].bits.shape == (rows, HIDDEN)
        np.testing.assert_allclose(floats(found[name])[:32], floats(a[name]), atol=1e-6)
        np.testing.assert_array_equal(floats(found[name])[32:], floats(b[name])[32:rows])
    assert config_of(out)["vocab_size"] == rows


def lacking(tmp_path: Path) -> tuple[str, str]:
    """``a`` and ``b``, where ``b`` lacks one tensor of ``a`` and has one of its own. Returns both names."""
    a = llama()
    b = finetuned(a, 1)
    del b[Q_PROJ]
    extra = "model.layers.0.mlp.extra.weight"
    b[extra] = bf16(np.ones((4, 4)))
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    return Q_PROJ, extra


def test_missing_and_extra_tensors_are_listed(tmp_path: Path) -> None:
    missing, extra = lacking(tmp_path)
    error = refused(tmp_path / "out", tmp_path / "a", tmp_path / "b", "--weights", "0.5,0.5")
    assert missing in error
    assert extra in error
    assert "--missing base" in error


def test_missing_tensors_come_from_the_base(tmp_path: Path) -> None:
    missing, _ = lacking(tmp_path)
    options = ("--method", "task_arithmetic", "--weights", "0.5", "--base", tmp_path / "a", "--missing", "base")
    merge(tmp_path / "b", "-o", tmp_path / "out", *options)
    found = read_all(tmp_path / "out")
    assert np.array_equal(found[missing].bits, read_all(tmp_path / "a")[missing].bits)
    assert found.keys() >= read_all(tmp_path / "a").keys()


def test_missing_tensors_are_left_out(tmp_path: Path) -> None:
    missing, extra = lacking(tmp_path)
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--weights", "0.5,0.5", "--missing", "skip")
    assert read_all(tmp_path / "out").keys() == read_all(tmp_path / "a").keys() - {missing, extra}


# -- values


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named(value: float, two: tuple[Path, Path], tmp_path: Path) -> None:
    bad = read_all(two[1])
    values = floats(bad[Q_PROJ])
    values[3, 5] = value
    save(two[1], bad | {Q_PROJ: bf16(values)})
    arguments = (*two, "--weights", "0.5,0.5")
    error = refused(tmp_path / "out", *arguments)
    assert f"`{Q_PROJ}`" in error
    assert "[3, 5]" in error
    assert str(two[1]) in error
    assert str(two[0]) not in error
    assert "--allow-nonfinite" in error
    merge(*arguments, "-o", tmp_path / "out", "--allow-nonfinite")
    found = floats(read_all(tmp_path / "out")[Q_PROJ])
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(found)), [[3, 5]])


def dequantized(folder: Path) -> dict[str, Array]:
    """The weights that an FP8 model stands for."""
    raw = read_all(folder)
    out = {}
    for name, tensor in raw.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype != "F8_E4M3":
            out[name] = floats(tensor)
            continue
        scale = np.kron(floats(raw[name + "_scale_inv"]), np.ones((32, 32)))
        rows, columns = tensor.bits.shape
        out[name] = tensor.bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[:rows, :columns]
    return out


def test_fp8_models_are_dequantized(tmp_path: Path) -> None:
    """Codes merged without their scales are garbage that nobody notices."""
    sources = [FIXTURES / "bad_inputs" / n for n in ("ft2_fp8", "ft3_fp8")]
    merge(*sources, "-o", tmp_path / "out", "--weights", "0.5,0.5", "--dtype", "bfloat16")
    found = read_all(tmp_path / "out")
    a, b = (dequantized(s) for s in sources)
    assert found.keys() == a.keys()
    for name, raw in found.items():
        assert raw.dtype == "BF16"
        # Dequantized weights are bfloat16 or wider: at most one rounding of each source and one of the result.
        np.testing.assert_allclose(floats(raw), mean(a[name], b[name]), rtol=2**-7, atol=2**-8 * np.abs(a[name]).max())
    assert "quantization_config" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_the_config_of_a_merge_in_high_precision_says_nothing_of_a_recipe(field: str) -> None:
    donor = {"model_type": "x", field: {"quant_method": "fp8"}, "text_config": {field: {"quant_method": "fp8"}, "a": 1}}
    assert merged_config(donor, dequantized=True) == {"model_type": "x", "text_config": {"a": 1}}


def test_fp8_and_bf16_models_mix(tmp_path: Path) -> None:
    sources = [FIXTURES / "inputs" / "ft2", FIXTURES / "bad_inputs" / "ft2_fp8"]
    merge(*sources, "-o", tmp_path / "out", "--weights", "0.5,0.5")
    whole = read_all(sources[0])
    for name, raw in read_all(tmp_path / "out").items():
        want = floats(whole[name])
        assert np.sqrt(np.mean((floats(raw) - want) ** 2)) <= 0.05 * np.sqrt(np.mean(want**2))
    assert "quantization_config" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("method", ["linear", "average"])
def test_a_mean_of_many_bf16_models_is_rounded_once(method: str, tmp_path: Path) -> None:
    """Summed in bfloat16, 48 models would lose five bits."""
    rng = np.random.default_rng(0)
    models = [{"w": bf16(1 + 0.1 * rng.standard_normal((64, 65)))} for _ in range(48)]
    sources = [save(tmp_path / f"m{i}", m, {"model_type": "x"}) for i, m in enumerate(models)]
    weights = ("--param", "weight=1") if method == "linear" else ()
    merge(*sources, "-o", tmp_path / "out", "--method", method, *weights)
    found = floats(read_all(tmp_path / "out")["w"])
    exact = mean(*(floats(m["w"]) for m in models))
    half_ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
    # The float32 sum may be off by a little, and then the other neighbour is as near as can be said.
    assert (np.abs(found - exact) <= half_ulp * (1 + 1e-3)).all()


def test_mixed_dtypes_need_no_words(tmp_path: Path) -> None:
    """Norms in float32 beside weights in bfloat16: each tensor has the wider of its sources' types."""
    a = llama()
    b = {n: f32(floats(r)) if "norm" in n else r for n, r in llama(seed=1).items()}
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--weights", "0.5,0.5")
    assert {n for n, r in read_all(tmp_path / "out").items() if r.dtype == "F32"} == {n for n in a if "norm" in n}
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "all", "--weights", "0.5,0.5", "--dtype", "bfloat16")
    assert {r.dtype for r in read_all(tmp_path / "all").values()} == {"BF16"}


# -- recipes


def test_unknown_keys_are_all_listed(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"""\
merge_method: ties
base_model: {a}
normalize: false
unknown_key: 1
models:
- model: {b}
  weight: 0.5
  parameters: {{weight: 0.5, densty: 0.1}}
parameters: {{lamda: 0.1}}
""",
        encoding="utf-8",
    )
    error = refused(tmp_path / "out", recipe, code=2)
    for word in ("normalize", "unknown_key", "densty", "lamda"):
        assert f"`{word}`" in error
    assert "did you mean `density`" in error
    assert "did you mean `lambda`" in error
    for line in (3, 4, 7, 8, 9):
        assert f"recipe.yml:{line}" in error


# -- files


def test_a_wrong_total_size_is_not_copied(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    (a / "model.safetensors").unlink()
    save(a, llama(), shards=3)
    index = json.loads((a / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["metadata"]["total_size"] = 29
    (a / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    out = tmp_path / "out"
    merge(a, b, "-o", out, "--weights", "0.5,0.5", "--max-shard-size", "5KB")
    written = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert written["metadata"]["total_size"] == sum(r.bits.nbytes for r in read_all(out).values())
    assert sorted(set(written["weight_map"].values())) == sorted(p.name for p in out.glob("*.safetensors"))
    assert len(set(written["weight_map"].values())) > 1


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    """Writing the output layer that no source has would make the model larger."""
    for i, name in enumerate("ab"):
        tensors = llama(seed=i)
        del tensors["lm_head.weight"]
        save(tmp_path / name, tensors, llama_config(tie_word_embeddings=True))
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--weights", "0.5,0.5")
    assert "lm_head.weight" not in read_all(tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


def stored_tied(folder: Path, seed: int, *, copy: bool, tied: bool = True) -> Path:
    """A Llama, tied or not; ``copy``: it stores a head."""
    tensors = llama(seed=seed)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if not copy:
        del tensors["lm_head.weight"]
    return save(folder, tensors, llama_config(tie_word_embeddings=tied))


@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("how", ["linear", "dare_linear", "filter", "missing"])
def test_tied_tensors_are_merged_once(tmp_path: Path, how: str, copies: tuple[bool, bool]) -> None:
    """A random mask, a filter on the head or a base that lacks it must not set apart what the config ties."""
    a, b = (stored_tied(tmp_path / "ab"[i], i, copy=c) for i, c in enumerate(copies))
    out = tmp_path / "out"
    if how == "filter":
        weight = "[{filter: lm_head, value: 0.9}, {value: 0.5}]"
        models = "".join(f"  - {{model: {p}, parameters: {{weight: {weight}}}}}\n" for p in (a, b))
        recipe = tmp_path / "recipe.yml"
        recipe.write_text(f"merge_method: linear\nmodels:\n{models}")
        merge(recipe, "-o", out, "--verify")
    elif how == "dare_linear":
        words = ["--method", how, "--param", "density=0.5", "--weights", "1", "--base", a]
        merge(b, "-o", out, *words, "--verify")
    else:
        merge(a, b, "-o", out, "--weights", "0.5,0.5", *(["--missing", "base"] if how == "missing" else []))
    assert "lm_head.weight" not in read_all(out)
    assert config_of(out)["tie_word_embeddings"] is True


@pytest.mark.parametrize("first", ["tied", "untied"])
@pytest.mark.parametrize("copy", [True, False])
def test_tied_and_untied_models_give_an_untied_one(tmp_path: Path, first: str, copy: bool) -> None:
    tied = stored_tied(tmp_path / "tied", 0, copy=copy)
    untied = stored_tied(tmp_path / "untied", 1, copy=True, tied=False)
    order = (tied, untied) if first == "tied" else (untied, tied)
    done = merge(*order, "-o", tmp_path / "out", "--weights", "0.5,0.5", "--verify")
    assert "tensors by themselves in others" in done.err
    found = read_all(tmp_path / "out")
    for name in EMBEDDINGS:
        ends = floats(read_all(tied)[EMBEDDINGS[0]]), floats(read_all(untied)[name])
        assert np.allclose(floats(found[name]), (ends[0] + ends[1]) / 2, atol=1e-2)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False


def test_a_copy_that_differs_from_what_it_is_tied_to_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in two:
        (folder / "config.json").write_text(json.dumps(llama_config(tie_word_embeddings=True)))
    assert "which the config ties to each other, differ" in refused(tmp_path / "out", *two, "--weights", "0.5,0.5")


def test_a_directory_that_exists_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Shards of an older merge beside those of a new one are a checkpoint of nothing."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_bytes(b"old")
    error = refused(out, *two, "--weights", "0.5,0.5")
    assert "--force" in error
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == b"old"
    merge(*two, "-o", out, "--weights", "0.5,0.5", "--force")
    assert sorted(p.name for p in out.glob("*.safetensors")) == ["model.safetensors"]


def test_the_config_is_always_the_same_models(tmp_path: Path) -> None:
    """That of the base, else of the first model, whatever order a set of paths has."""
    tensors = llama()
    for name in ("base", "second", *"abcde"):
        save(tmp_path / name, tensors, llama_config(rms_norm_eps={"base": 1.0, "second": 3.0}.get(name, 2.0)))
    second = tmp_path / "second"
    for name in "abcde":  # a set of two has either order, by their names
        merge(tmp_path / name, second, "-o", tmp_path / f"out {name}", "--weights", "0.5,0.5")
        assert config_of(tmp_path / f"out {name}")["rms_norm_eps"] == 2.0
    merge(second, tmp_path / "a", "-o", tmp_path / "other", "--weights", "0.5,0.5")
    assert config_of(tmp_path / "other")["rms_norm_eps"] == 3.0
    options = ("--method", "task_arithmetic", "--weights", "0.5,0.5", "--base", tmp_path / "base")
    merge(tmp_path / "a", second, "-o", tmp_path / "based", *options)
    assert config_of(tmp_path / "based")["rms_norm_eps"] == 1.0


@pytest.mark.parametrize(
    ("dtype", "rng", "code"), [("float32", "mergekit", 2), ("float32", "counter", 0), ("bfloat16", "mergekit", 0)]
)
def test_torch_is_asked_for_before_anything_is_written(
    dtype: str, rng: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only della with mergekit's draws in float32 sorts as torch does; without torch it does not begin."""
    monkeypatch.setitem(sys.modules, "torch", None)
    inputs = Path(__file__).parents[2] / "fixtures/merge/inputs"
    model = f"models: [{{model: {inputs}/ft1, parameters: {{weight: 1, density: 0.5}}}}]"
    text = f"{model}\nbase_model: {inputs}/base\nmerge_method: della\ndtype: {dtype}\n"
    (tmp_path / "recipe.yml").write_text(text, encoding="utf-8")
    done = ckpttool("merge", tmp_path / "recipe.yml", "-o", tmp_path / "out", "--seed", "1", "--rng", rng)
    assert done.code == code, done.err
    assert (tmp_path / "out").exists() == (code == 0)
    if code:
        assert "--method della with --rng mergekit needs a package that is not installed: torch" in done.err
        assert "hint: pip install 'ckpttool[torch]'" in done.err


# -- accidents


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and a model large enough that a merge takes a while: 8 tensors of 0.5 MB."""
    work = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    base = {f"w{i}": bf16(rng.standard_normal((256, 1024), np.float32)) for i in range(8)}
    noise = 0.1 * rng.standard_normal((256, 1024), np.float32)
    tuned = {n: bf16(floats(r).astype(np.float32) + noise) for n, r in base.items()}
    return save(work / "base", base, {"model_type": "x"}), save(work / "ft", tuned, {"model_type": "x"})


def arguments(large: tuple[Path, Path], out: Path) -> list[object]:
    """A merge with draws."""
    words = ("--method", "della", "--weights", "0.7", "--param", "density=0.5", "--seed", "7", "--workers", "2")
    return [large[1], "-o", out, "--base", large[0], *words, "--max-shard-size", "1MB"]


def endless(large: tuple[Path, Path], out: Path) -> list[object]:
    """A merge that takes minutes."""
    words = ("--method", "karcher", "--param", "max_iter=100000", "--param", "tol=0", "--workers", "2")
    return [*large, "-o", out, *words]


def started(out: Path, words: list[object], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A merge that has begun to write."""
    command = [sys.executable, "-m", "ckpttool", "merge", *map(str, words)]
    tool = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    partial = out.with_name(out.name + ".partial")
    while tool.poll() is None and not any(partial.glob("*.safetensors*")):
        time.sleep(0.005)
    return tool


@pytest.mark.parametrize("wait", [0.0, 0.02])
@pytest.mark.thorough  # in short: test_resumed of test_paddle_sources.py, and test_kill of tests/execute
def test_killed_half_way_and_resumed(wait: float, large: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(out, arguments(large, out)) as tool:
        time.sleep(wait)
        tool.send_signal(signal.SIGKILL)
    if not out.exists():  # else it was killed between the rename and its end, or had ended
        assert tool.returncode == -signal.SIGKILL
        merge(*arguments(large, out), "--resume")
    merge(*arguments(large, tmp_path / "clean"))
    same(read_all(out), read_all(tmp_path / "clean"))
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "clean").iterdir())
    shutil.rmtree(out)


@pytest.mark.thorough  # in short: test_parts_by_other_kernels_are_verified of test_portable.py
def test_killed_on_one_processor_and_resumed_on_another(large: tuple[Path, Path], tmp_path: Path) -> None:
    words = [large[1], "--base", large[0], "--method", "slerp", "--param", "t=0.3", "--dtype", "f32", "--workers", "2"]
    words += ["--max-shard-size", "1MB"]
    out = tmp_path / "out"
    with started(out, [*words, "-o", out], older()) as tool:
        tool.send_signal(signal.SIGKILL)
    if not out.exists():
        merge(*words, "-o", out, "--resume", "--verify")
    merge(*words, "-o", tmp_path / "clean")
    same(read_all(out), read_all(tmp_path / "clean"))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


@pytest.mark.thorough
def test_a_worker_that_dies_fails_the_merge(large: tuple[Path, Path], tmp_path: Path) -> None:
    """A missing shard and exit code 0 would be the worst of all."""
    out = tmp_path / "out"
    with started(out, endless(large, out)) as tool:
        try:
            os.kill(children(tool.pid)[0], signal.SIGKILL)
            _, error = tool.communicate(timeout=60)
        finally:
            tool.kill()
    assert tool.returncode == 1
    assert "a worker process ended: killed by SIGKILL" in error
    assert "Traceback" not in error
    assert not out.exists()
