"""Listing: what is chosen, in which order, in which form; and that it is quick."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import Done, ckpttool, reshard
from tests.helpers.tensorfile import Raw, origin, save_hf, write
from tests.inspect.models import CONFIG, FIRST, SECOND, edit_header, fp8_llama, llama, save_json, save_shards

FP8 = "F8_E4M3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shards(tmp_path_factory.mktemp("list") / "model", fp8_llama(), CONFIG)


def names(done: Done) -> list[str]:
    """The first column of a table."""
    assert done.code == 0, done.err
    return [line.split("\t")[0] for line in done.out.splitlines()[1:]]


def ask(folder: Path, *options: object) -> dict[str, Any]:
    done = ckpttool("inspect", folder, "--json", *options)
    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    assert answer["schema"] == "ckpttool.inspect/1"
    return answer


def test_list_is_tab_separated_off_a_terminal(model: Path) -> None:
    done = ckpttool("inspect", model, "--list")
    lines = done.out.splitlines()
    assert lines[0].split("\t") == ["name", "dtype", "shape", "bytes", "pieces", "file", "offset"]
    assert len(lines) == 1 + len(fp8_llama())
    row = next(line.split("\t") for line in lines if line.startswith("model.layers.1.mlp.down_proj.weight\t"))
    assert row[1:6] == [FP8, "[16, 24]", "384", "1", SECOND]
    assert done.err == ""


def test_list_as_json_has_every_tensor(model: Path) -> None:
    answer = ask(model, "--list")
    found = {t["name"]: (t["dtype"], tuple(t["shape"])) for t in answer["list"]}
    assert found == {n: (t.dtype, t.bits.shape) for n, t in fp8_llama().items()}
    assert answer["listed_bytes"] == sum(t.bits.nbytes for t in fp8_llama().values())
    assert answer["dtypes"][FP8]["tensors"] == 14


def test_offsets_are_those_of_the_bytes(model: Path) -> None:
    for t in ask(model, "--list", "--filter", "*.mlp.*proj.weight")["list"]:
        data = (model / t["file"]).read_bytes()[t["offset"] : t["offset"] + t["bytes"]]
        assert data == fp8_llama()[t["name"]].bits.tobytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--filter", "*norm.weight"], 5),
        (["--filter", "*norm.weight", "--filter", "lm_head.*"], 6),
        (["--filter", r"re:layers\.1\..*weight$"], 9),
        (["--dtype", "fp8"], 14),
        (["--dtype", "F8_E4M3", "--dtype", "float32"], 28),
        (["--min-size", "1kB"], 2),
        (["--min-size", "1024"], 2),
        (["--dtype", "BF16", "--min-size", "33"], 2),
    ],
)
def test_filters(model: Path, options: list[str], expected: int) -> None:
    assert len(names(ckpttool("inspect", model, "--list", *options))) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--filter", "*nrom*"], "did you mean"),
        (["--dtype", "f16"], "dtypes here: BF16, F32, F8_E4M3"),
        (["--dtype", "f17"], "unknown dtype `f17`\n\nhint: dtypes here: BF16, F32, F8_E4M3"),
        (["--min-size", "1TB"], "the largest has"),
        (["--min-size", "many"], "is not a size"),
        (["--sort", "colour"], "not one of name, size, offset, file"),
    ],
)
def test_a_choice_that_leaves_nothing_is_an_error(model: Path, options: list[str], words: str) -> None:
    done = ckpttool("inspect", model, "--list", *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_sorting(tmp_path: Path) -> None:
    tensors = {
        "b.10.w": origin(0, "F32", (4,)),
        "b.9.w": origin(1, "F32", (2,)),
        "a": origin(2, "F32", (8,)),
    }
    write(tmp_path / "model-00001-of-00002.safetensors", {"c": origin(3, "F32", (6,))})
    write(tmp_path / "model-00002-of-00002.safetensors", tensors)
    for by, expected in {
        "name": ["a", "b.9.w", "b.10.w", "c"],
        "size": ["a", "c", "b.10.w", "b.9.w"],
        "offset": ["c", "b.10.w", "b.9.w", "a"],
        "file": ["c", "a", "b.9.w", "b.10.w"],
    }.items():
        assert names(ckpttool("inspect", tmp_path, "--list", "--sort", by)) == expected
    assert names(ckpttool("inspect", tmp_path, "--list")) == ["a", "b.9.w", "b.10.w", "c"]


def test_tree(model: Path) -> None:
    done = ckpttool("inspect", model)
    lines = done.out.splitlines()
    assert lines[0] == "Llama, 2 layers, 4,944 parameters, FP8"
    assert lines[1] == f"{model}: hf, 2 files"
    assert lines[2].startswith("35 tensors, ")
    assert any(line.split() == ["down_proj", "4", "816", "bytes"] for line in lines)
    assert any(line.split() == ["weight", FP8, "[16,", "24]", "2", "768", "bytes"] for line in lines)
    assert any(line.strip().startswith("layers.{0..1} ") for line in lines)


def test_tree_with_depth(model: Path) -> None:
    tree = ask(model, "--depth", 2)["tree"]
    assert {line["depth"] for line in tree} == {0, 1}
    assert {line["name"] for line in tree} == {
        "lm_head.weight",
        "model",
        "model.embed_tokens.weight",
        "model.layers.{0..1}",
        "model.norm.weight",
    }
    assert next(line["tensors"] for line in tree if line["name"] == "model.layers.{0..1}") == 32


def test_files(model: Path, tmp_path: Path) -> None:
    files = ask(model, "--files")["list"]
    assert [f["name"] for f in files] == [FIRST, SECOND]
    assert [f["bytes"] for f in files] == [(model / f["name"]).stat().st_size for f in files]
    assert sum(f["tensors"] for f in files) == 35
    reshard(save_hf(tmp_path / "src", llama(), CONFIG), tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    done = ckpttool("inspect", tmp_path / "tp2", "--files")
    assert [line.split("\t")[-1] for line in done.out.splitlines()] == ["rank", "0", "1"]


def test_metadata(model: Path, tmp_path: Path) -> None:
    answer = ask(model, "--metadata")
    assert answer["metadata"] == {FIRST: {"format": "pt"}, SECOND: {"format": "pt"}}
    assert answer["config"] == CONFIG
    assert ckpttool("inspect", model, "--metadata").out == f"{FIRST} and 1 other file\n  format: pt\n"
    write(tmp_path / "model.safetensors", llama())
    assert "no metadata" in ckpttool("inspect", tmp_path, "--metadata").out


def test_ranks_are_listed_as_whole_tensors(tmp_path: Path) -> None:
    reshard(save_hf(tmp_path / "src", llama(), CONFIG), tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    answer = ask(tmp_path / "tp2", "--list")
    assert {t["name"]: tuple(t["shape"]) for t in answer["list"]} == {n: t.bits.shape for n, t in llama().items()}
    assert answer["logical"] is True
    assert {t["pieces"] for t in answer["list"]} == {2}


def test_ranks_without_rules_are_listed_as_they_are_stored(tmp_path: Path) -> None:
    """Nobody says how the two files belong together; inspect shows what it can and says so."""
    for r in range(2):
        write(
            tmp_path / f"model_rank{r}.safetensors", {"odd.w": origin(r, "F32", (2,)), "same": origin(r, "F32", (3,))}
        )
    done = ckpttool("inspect", tmp_path, "--list")
    assert [line.split("\t")[:5] for line in done.out.splitlines()[1:]] == [
        ["odd.w", "F32", "[2]", "8", "2"],
        ["same", "F32", "[3]", "12", "2"],
    ]
    assert "names and shapes are those that each rank stores" in done.err
    assert ask(tmp_path, "--list")["logical"] is False
    assert ckpttool("inspect", tmp_path, "--stats").code == 1
    assert ask(tmp_path, "--list", "--split", "*=none")["logical"] is True


def test_empty_and_scalar_tensors_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"none": origin(1, "F32", (0, 4)), "one": origin(2, "F32", ())})
    found = {t["name"]: (t["shape"], t["bytes"]) for t in ask(tmp_path, "--list")["list"]}
    assert found == {"none": ([0, 4], 0), "one": ([], 4)}
    assert ckpttool("inspect", tmp_path).code == 0


def test_strange_names_stay_on_one_line(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a\tb\nc": origin(1, "F32", (2,)), "ü.0.w": origin(2, "F32", (2,))})
    done = ckpttool("inspect", tmp_path, "--list")
    assert names(done) == ["a\\tb\\nc", "ü.0.w"]
    assert {t["name"] for t in ask(tmp_path, "--list")["list"]} == {"a\tb\nc", "ü.0.w"}
    assert "a\\tb\\nc" in ckpttool("inspect", tmp_path).out


def test_sub_byte_dtypes_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": Raw("U8", origin(1, "U8", (6,)).bits)})
    edit_header(tmp_path / "model.safetensors", lambda h: h["a"].update(dtype="F6_E2M3", shape=[8]))
    (found,) = ask(tmp_path, "--list")["list"]
    assert (found["dtype"], found["shape"], found["bytes"]) == ("F6_E2M3", [8], 6)


@pytest.mark.parametrize(
    "options",
    [
        ["--list", "--files"],
        ["--check", "--diff", "x"],
        ["--values"],
        ["--atol", "1"],
        ["--svg", "x.svg"],
        ["--list", "--depth", "2"],
        ["--check", "--filter", "*"],
        ["--diff", "x", "--dtype", "bf16"],
        ["--stats", "--ranks"],
    ],
)
def test_questions_that_make_no_sense_are_usage_errors(model: Path, options: list[str]) -> None:
    done = ckpttool("inspect", model, *options)
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err


def test_a_broken_file_is_an_error_that_points_to_check(tmp_path: Path) -> None:
    save_shards(tmp_path, llama(), CONFIG)
    edit_header(tmp_path / SECOND, lambda h: h["lm_head.weight"].update(dtype="F7"), more=b"\0")
    done = ckpttool("inspect", tmp_path)
    assert done.code == 1
    assert "F7" in done.err
    assert "inspect --check" in done.err


def sparse(folder: Path, files: int, tensors: int) -> None:
    """Files with headers of their own and data that is a hole in the file."""
    folder.mkdir()
    number = 0
    weight_map = {}
    for f in range(files):
        name = f"model-{f + 1:05d}-of-{files:05d}.safetensors"
        header, at = {}, 0
        for _ in range(tensors // files):
            layer, rest = divmod(number, 1024)
            tensor = f"model.layers.{layer}.mlp.experts.{rest // 4}.{'abcd'[rest % 4]}_proj.weight"
            header[tensor] = {"dtype": "BF16", "shape": [2048, 7168], "data_offsets": [at, at + 29360128]}
            weight_map[tensor] = name
            at += 29360128
            number += 1
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    save_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


@pytest.mark.parametrize(
    ("files", "tensors", "seconds"), [(16, 2_048, 1), pytest.param(100, 10_000, 3, marks=pytest.mark.thorough)]
)
def test_many_tensors_are_listed_quickly_without_heavy_imports(
    files: int, tensors: int, seconds: int, tmp_path: Path
) -> None:
    """A tenth of the promised 100,000 tensors in 1,000 files within a second, with room for a busy machine."""
    sparse(tmp_path / "model", files, tensors)
    program = (
        "import sys; sys.argv = ['ckpttool', 'inspect', sys.argv[1]]\n"
        "from ckpttool.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([m for m in ('numpy', 'torch', 'yaml', 'rich', 'safetensors') if m in sys.modules], file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model"], capture_output=True, text=True, check=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < seconds
    assert done.stderr == "[]\n"
    assert "experts.{0..255}" in done.stdout
