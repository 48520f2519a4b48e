"""Directories of several models: pipelines of diffusers, modules of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool as api
from ckpttool.core.plan import Plan
from ckpttool.execute import engine
from tests.helpers.command import ckpttool, refused
from tests.helpers.tensorfile import Raw, Tensors, assert_same, encode, origin, read, read_all, write

WEIGHTS = "diffusion_pytorch_model"
DIFFUSERS = ("transformer", "vae")
"""Parts whose files have diffusers' names."""
CONFIGS: dict[str, dict[str, Any]] = {
    "transformer": {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"},
    "vae": {"_class_name": "AutoencoderKL", "_diffusers_version": "0.42.1"},
    "text_encoder": {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"},
}
SMALL = {
    "scheduler/scheduler_config.json": b'{"shift": 3.0}',
    "tokenizer/vocab.json": b'{"a": 0}',
    "README.md": b"# a\n",
}


def tensors(part: str, seed: int = 0) -> Tensors:
    names = {"layers.0.attn.weight": (16, 32), "layers.1.attn.weight": (16, 32), "layers.1.attn.bias": (16,)}
    ident = 10 * sorted(CONFIGS).index(part) + 100 * seed if part in CONFIGS else 77 + seed
    found = {n: origin(ident + i, "F32", s) for i, (n, s) in enumerate(names.items())}
    return {n: Raw(t.dtype, t.bits & 0x3FFFFFFF) for n, t in found.items()}  # all of them finite


def shards(folder: Path, stem: str, held: Tensors) -> None:
    """One file for each tensor, and their index."""
    named = {n: f"{stem}-{i:05d}-of-{len(held):05d}.safetensors" for i, n in enumerate(held, 1)}
    for n, file in named.items():
        write(folder / file, {n: held[n]}, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.bits.nbytes for t in held.values())}, "weight_map": named}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def pipeline(root: Path, seed: int = 0) -> Path:
    for part, config in CONFIGS.items():
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text(json.dumps(config))
    shards(root / "transformer", WEIGHTS, tensors("transformer", seed))
    write(root / "vae" / f"{WEIGHTS}.safetensors", tensors("vae", seed), {"format": "pt"})
    write(root / "vae" / f"{WEIGHTS}.fp16.safetensors", {"x": origin(1, "F16", (2,))})
    write(root / "text_encoder" / "model.safetensors", tensors("text_encoder", seed), {"format": "pt"})
    index: dict[str, Any] = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.42.1",
        "image_encoder": [None, None],
    }
    index |= {n: ["diffusers", c["_class_name"]] for n, c in CONFIGS.items() if "_class_name" in c}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"], "scheduler": ["diffusers", "FlowMatchEuler"]}
    index |= {"tokenizer": ["transformers", "CLIPTokenizer"]}
    (root / "model_index.json").write_text(json.dumps(index))
    for name, data in SMALL.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    return root


def sentences(root: Path, first: str = "") -> Path:
    folder = root / first
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 32}))
    write(folder / "model.safetensors", tensors("bert"), {"format": "pt"})
    for name, config in {"1_Pooling": {"mean": True}, "2_Dense": {"in_features": 32}}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    write(root / "2_Dense" / "model.safetensors", {"linear.weight": origin(5, "F32", (16, 32))}, {"format": "pt"})
    modules = [{"idx": i, "name": str(i), "path": p} for i, p in enumerate([first, "1_Pooling", "2_Dense"])]
    (root / "modules.json").write_text(json.dumps(modules))
    return root


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def done(*words: object) -> str:
    ended = ckpttool(*words)
    assert ended.code == 0, ended.err
    return ended.err + ended.out


def bf16(held: Tensors) -> Tensors:
    """Rounded to the nearest, ties to even."""
    out = {}
    for name, t in held.items():
        bits = t.bits.astype(np.uint64)
        out[name] = Raw("BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))
    return out


def test_a_pipeline_is_cast_part_by_part_and_keeps_its_form(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    done("reshard", src, dst, "--dtype", "bf16", "--verify")
    found = files(dst)
    assert {n: found[n] for n in (*SMALL, "model_index.json")} == SMALL | {
        "model_index.json": (src / "model_index.json").read_bytes()
    }
    weights = {n for n in found if n.endswith(".safetensors")}
    assert weights == {
        f"transformer/{WEIGHTS}.safetensors",
        f"vae/{WEIGHTS}.safetensors",
        "text_encoder/model.safetensors",
    }
    for part, config in CONFIGS.items():
        assert_same(read_all(dst / part), bf16(tensors(part)))
        assert json.loads(found[f"{part}/config.json"]) == config


def test_one_part_is_written_and_all_else_stays_byte_for_byte(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    said = done("reshard", src, dst, "--part", "vae", "--dtype", "f64", "--verify")
    assert "as they are: transformer, text_encoder" in said
    before, after = files(src), files(dst)
    assert {n: d for n, d in before.items() if not n.startswith("vae/")} == {
        n: d for n, d in after.items() if not n.startswith("vae/")
    }
    assert {t.dtype for t in read_all(dst / "vae").values()} == {"F64"}
    assert "fp16.safetensors is another variant" in said


def test_shards_of_a_part_have_the_names_that_its_loader_looks_for(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    done("reshard", src, dst, "--max-shard-size", "2100B")
    names = {n for n in files(dst) if "safetensors" in n}
    assert f"vae/{WEIGHTS}.safetensors.index.json" in names
    assert f"vae/{WEIGHTS}-00001-of-00003.safetensors" in names
    assert "text_encoder/model-00001-of-00003.safetensors" in names
    for part in CONFIGS:
        assert_same(read_all(dst / part), tensors(part))


def test_quantizing_asks_which_part(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    ended = ckpttool("quantize", src, dst)
    assert ended.code == 2
    assert "transformer, vae, text_encoder" in ended.err
    assert "--part transformer" in ended.err
    assert not dst.exists()
    done("quantize", src, dst, "--part", "transformer", "--recipe", "channel", "--verify")
    assert "quantization_config" in json.loads((dst / "transformer" / "config.json").read_text())
    assert read_all(dst / "transformer")["layers.0.attn.weight"].dtype == "F8_E4M3"
    alone = tmp_path / "alone"
    done("quantize", src / "transformer", alone, "--recipe", "channel")
    assert files(alone) == {n.partition("/")[2]: d for n, d in files(dst).items() if n.startswith("transformer/")}
    back = tmp_path / "back"
    done("quantize", dst, back, "--to", "f32", "--verify")  # only the part that is quantized changes
    assert read_all(back / "transformer")["layers.0.attn.weight"].dtype == "F32"
    assert_same(read(back / "vae" / f"{WEIGHTS}.safetensors"), tensors("vae"))


def test_drop_keys_writes_the_part_that_loses_something(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    said = done("drop-keys", src, dst, "transformer.layers.1.*", "--verify")
    assert "2 tensors removed" in said
    held = tensors("transformer")
    assert_same(read_all(dst / "transformer"), {n: held[n] for n in ["layers.0.attn.weight"]})
    before, after = files(src), files(dst)
    assert {n: d for n, d in before.items() if not n.startswith("transformer/")} == {
        n: d for n, d in after.items() if not n.startswith("transformer/")
    }
    ended = ckpttool("drop-keys", src, tmp_path / "none", "vae.*")
    assert ended.code == 2
    assert "no tensor of the part vae is left" in ended.err


def test_two_pipelines_are_merged_part_by_part(tmp_path: Path) -> None:
    one, two, dst = pipeline(tmp_path / "one"), pipeline(tmp_path / "two", 1), tmp_path / "dst"
    done("merge", one, two, "-o", dst, "--verify")
    for part in CONFIGS:
        done("merge", one / part, two / part, "-o", tmp_path / part)
        alone = files(tmp_path / part)
        mine = {n.removeprefix(f"{part}/"): d for n, d in files(dst).items() if n.startswith(f"{part}/")}
        assert alone.keys() == mine.keys()
        for name in alone.keys() - {"ckpttool.merge.json"}:
            assert alone[name] == mine[name], name
        records = [json.loads(x["ckpttool.merge.json"])["sources"] for x in (alone, mine)]
        assert [s["hash"] for s in records[0]] == [s["hash"] for s in records[1]]
    assert {n: d for n, d in files(dst).items() if n in SMALL} == SMALL


def test_a_card_is_of_one_model(tmp_path: Path) -> None:
    one, other = pipeline(tmp_path / "one"), pipeline(tmp_path / "other", 7)
    done = ckpttool("merge", one, other, "-o", tmp_path / "out", "--card")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: --card is for one model, and the sources are directories of several",
        "",
        "hint: merge one part of them: PIPELINE/transformer",
    ]  # and no arrow that leads nowhere


def test_pipelines_of_different_parts_are_not_merged(tmp_path: Path) -> None:
    one, two, dst = pipeline(tmp_path / "one"), pipeline(tmp_path / "two", 1), tmp_path / "dst"
    for f in (two / "vae").iterdir():
        f.unlink()
    (two / "vae").rmdir()
    ended = ckpttool("merge", one, two, "-o", dst)
    assert ended.code == 1
    assert "vae" in ended.err
    done("merge", one, two, "-o", dst, "--part", "transformer", "--part", "text_encoder")
    assert_same(read(dst / "vae" / f"{WEIGHTS}.safetensors"), tensors("vae"))
    ended = ckpttool("merge", one, two / "transformer", "-o", tmp_path / "d2")
    assert ended.code == 1
    assert "a single model" in ended.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tp-out", "2"), "--tp-out 2 is for one model"),
        (("--to", "dcp"), "--to dcp is for one model"),
        (("--rename", "*=a.*"), "--rename is for one model"),
        (("--part", "unet"), "no part of that name"),
        (("--family", "llama"), "are for one model"),
        (("--tp", "2"), "--tp is for one model"),
        (("--remove-keys", "transformers.*"), "matches no tensor"),
    ],
)
def test_what_only_one_model_can_have_is_refused_with_the_parts(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    said = refused(pipeline(tmp_path / "src"), tmp_path / "dst", *words, code=2)
    assert why in said


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "a/b", "", "transformer/../../outside", "_outside"])
def test_names_of_an_index_do_not_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    src = pipeline(tmp_path / "src")
    write(tmp_path / "outside" / "model.safetensors", {"secret": origin(1, "F32", (4,))})
    path = src / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: ["diffusers", "AutoencoderKL"]}))
    done("reshard", src, tmp_path / "dst")
    assert not any("secret" in read_all(p) for p in (tmp_path / "dst").rglob("*") if p.is_dir())
    root = sentences(tmp_path / "st")
    modules = [*json.loads((root / "modules.json").read_text()), {"path": name}, {"path": 3}, "text", None]
    (root / "modules.json").write_text(json.dumps(modules))
    done("reshard", root, tmp_path / "st2")
    assert files(tmp_path / "st2").keys() == files(root).keys()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"_class_name": 7, "vae": ["diffusers", "AutoencoderKL"]}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    src = pipeline(tmp_path / "src")
    (src / "model_index.json").write_text(text)
    ended = ckpttool("inspect", src)
    assert ended.code in (0, 1)
    assert "Traceback" not in ended.err


def test_a_part_without_its_weights_is_missed(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    (src / "text_encoder" / "model.safetensors").unlink()
    assert "the part text_encoder has a config.json and no weights" in refused(src, tmp_path / "dst")
    missing = src / "transformer" / f"{WEIGHTS}-00002-of-00003.safetensors"
    missing.unlink()
    assert missing.name in refused(src / "transformer", tmp_path / "dst")


def test_the_parts_are_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it or nothing: a part that cannot be written leaves no directory with the others."""
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    write(src / "vae" / f"{WEIGHTS}.safetensors", {"w": Raw("F32", np.full((4, 4), 0x7F800001, "<u4"))})
    data = encode({"w": origin(3, "F32", (4, 4))})
    seen: list[Plan] = []
    before = engine.run

    def run(plan: Plan, *rest: Any) -> Any:
        seen.append(plan)
        (src / "vae" / f"{WEIGHTS}.safetensors").write_bytes(data + b" ")
        return before(plan, *rest)

    monkeypatch.setattr("ckpttool.ops.reshard.run", run)
    ended = ckpttool("reshard", src, dst, "--dtype", "bf16")
    assert ended.code == 1
    assert seen
    assert not dst.exists()
    assert not dst.with_name("dst.partial").exists()


@pytest.mark.parametrize("first", ["", "0_Transformer"])
def test_modules_of_sentence_transformers_go_together(tmp_path: Path, first: str) -> None:
    src, dst = sentences(tmp_path / "src", first), tmp_path / "dst"
    done("reshard", src, dst, "--dtype", "bf16", "--verify")
    assert files(dst).keys() == files(src).keys()
    assert_same(read(dst / first / "model.safetensors"), bf16(tensors("bert")))
    assert read(dst / "2_Dense" / "model.safetensors")["linear.weight"].dtype == "BF16"
    cast = tmp_path / "cast"
    said = done("quantize", src, cast, "--recipe", "channel", "--verify")
    assert "the only part whose config.json names a model" in said
    assert read(cast / first / "model.safetensors")["layers.0.attn.weight"].dtype == "F8_E4M3"
    assert files(cast)["2_Dense/model.safetensors"] == files(src)["2_Dense/model.safetensors"]
    assert files(cast).keys() == files(src).keys()


def test_what_is_no_model_stays_one_file(tmp_path: Path) -> None:
    """sentence-transformers looks for model.safetensors alone in the directory of a dense layer."""
    done("reshard", sentences(tmp_path / "src"), tmp_path / "dst", "--max-shard-size", "1kB")
    assert {p.name for p in (tmp_path / "dst" / "2_Dense").iterdir()} == {"config.json", "model.safetensors"}
    assert (tmp_path / "dst" / "model-00001-of-00003.safetensors").is_file()


def test_a_part_that_is_a_link_out_of_the_pipeline_is_refused(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    (src / "vae").rename(tmp_path / "elsewhere")
    (src / "vae").symlink_to(tmp_path / "elsewhere")
    assert "a link to a directory outside" in refused(src, tmp_path / "dst")
    (src / "vae").unlink()
    (tmp_path / "elsewhere").rename(src / "real")
    (src / "vae").symlink_to("real")
    done("reshard", src, tmp_path / "dst")
    assert_same(read_all(tmp_path / "dst" / "vae"), tensors("vae"))


def test_inspect_shows_the_parts(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    shown = done("inspect", src)
    assert "FluxPipeline" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(tuple(CONFIGS))] == [
        "text_encoder",
        "transformer",
        "vae",
    ]
    assert done("inspect", src, "--list", "--part", "vae").count("vae.layers") == 3
    assert ckpttool("inspect", src, "--check", "--values").code == 0
    same = ckpttool("inspect", src, "--diff", pipeline(tmp_path / "again"), "--values")
    assert same.code == 0
    assert ckpttool("inspect", src, "--diff", pipeline(tmp_path / "other", 1), "--values").code == 3


def test_a_family_is_suggested_for_one_part(tmp_path: Path) -> None:
    ended = ckpttool("inspect", pipeline(tmp_path / "src"), "--suggest-family")
    assert ended.code == 2
    assert "several parts" in ended.err


def test_check_looks_into_each_part(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    index = src / "transformer" / f"{WEIGHTS}.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["gone"] = said["weight_map"]["layers.0.attn.weight"]
    index.write_text(json.dumps(said))
    ended = ckpttool("inspect", src, "--check")
    assert ended.code == 3
    assert "gone" in ended.out


def test_checksums_of_a_pipeline_are_proven(tmp_path: Path) -> None:
    src, dst = pipeline(tmp_path / "src"), tmp_path / "dst"
    done("reshard", src, dst, "--dtype", "bf16", "--manifest")
    assert "9 checksums" in done("inspect", dst, "--check")
    path = dst / "vae" / f"{WEIGHTS}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    ended = ckpttool("inspect", dst, "--check")
    assert ended.code == 3
    assert "vae" in ended.out
    path.write_bytes(path.read_bytes() + b"\x00")
    ended = ckpttool("inspect", dst, "--check")
    assert ended.code == 3
    assert f"vae/{path.name}" in ended.out


def test_a_variant_is_not_said_to_load_by_itself(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    (src / "vae" / f"{WEIGHTS}.safetensors").unlink()
    said = done("reshard", src, tmp_path / "dst", "--dtype", "bf16")
    assert "from_pretrained" not in said
    assert (tmp_path / "dst" / "vae" / f"{WEIGHTS}.fp16.safetensors").is_file()
    assert "from_pretrained" not in done("reshard", src, tmp_path / "two", "--part", "transformer")
    assert "from_pretrained" in done("reshard", pipeline(tmp_path / "other"), tmp_path / "three")


def test_the_api_has_the_parts_too(tmp_path: Path) -> None:
    src = pipeline(tmp_path / "src")
    opened = api.open(src, part=["vae"])
    assert list(opened) == [f"vae.{n}" for n in tensors("vae")]
    opened.reshard(dtype="bf16").run(tmp_path / "dst", verify=True)
    assert read(tmp_path / "dst" / "vae" / f"{WEIGHTS}.safetensors")["layers.1.attn.bias"].dtype == "BF16"
    assert_same(read_all(tmp_path / "dst" / "transformer"), tensors("transformer"))
    merging = api.merge([src, pipeline(tmp_path / "two", 1)], part=["vae"])
    merging.run(tmp_path / "merged", verify=True)
    assert_same(read_all(tmp_path / "merged" / "transformer"), tensors("transformer"))
    assert read(tmp_path / "merged" / "vae" / f"{WEIGHTS}.safetensors").keys() == tensors("vae").keys()


def test_the_size_of_a_pipeline_is_that_of_its_parts(tmp_path: Path) -> None:
    ended = ckpttool("size", pipeline(tmp_path / "src"))
    assert ended.code == 2
    assert "are for one: transformer, vae, text_encoder" in ended.err
    assert "without 2_Dense" in done("size", sentences(tmp_path / "st"))
