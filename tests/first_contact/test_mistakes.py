"""The mistakes that a first-time user makes: each gets one error that says what, where, and a way out that works.

Tables of (files, command line, code, words of the message). What a hint says is followed where that is cheap. The
mistakes about sizes, options and damaged files of a reshard are in tests/reshard/test_refusals.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Raw, write

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA, TINY, SHARDED = FIXTURES / "llama_tp8", FIXTURES / "hf_tiny_source", FIXTURES / "deepseek_v3"
ONE, TWO, BASE = (FIXTURES / "merge" / "inputs" / n for n in ("ft1", "ft2", "base"))
LORA = FIXTURES / "merge" / "inputs" / "lora1"
PROGRAM = FIXTURES / "paddle_programs" / "pir" / "model.json"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are those of an empty directory."""
    monkeypatch.chdir(tmp_path)


def run(line: str) -> Done:
    """A command line, with names of fixtures in braces."""
    names = {k: v for k, v in globals().items() if isinstance(v, Path)}
    return ckpttool(*shlex.split(re.sub(r"\{([A-Z]+)\}", lambda m: shlex.quote(str(names[m[1]])), line)))


def mistake(line: str, code: int) -> str:
    """The error of a command line: one, with a way out, and nothing on stdout."""
    done = run(line)
    assert done.code == code, done.err
    assert done.out == ""
    assert done.err.count("error: ") == 1, done.err
    assert "\nhint: " in done.err, done.err
    assert "Traceback" not in done.err
    return done.err


USAGE: dict[str, tuple[str, tuple[str, ...]]] = {
    "no such command": ("reshrad a b", ("no command `reshrad`", "did you mean `reshard`")),
    "underscores in a command": ("convert_json a", ("did you mean `convert-json`",)),
    "help about a word": ("help reshrad", ("no command `reshrad`", "did you mean `reshard`")),
    "a comparison with one side": ("diff {ONE}", ("B is missing", "ckpttool diff A B")),
    "a size of nothing": ("size", ("SRC is missing", "ckpttool size SRC")),
    **{
        f"the command of another tool: {word}": (word, (f"no command `{word.split()[0]}`", hint))
        for word, hint in (
            ("validate", "use `ckpttool check SRC`"),
            ("validate llama", "use `ckpttool check SRC`"),
            ("compare", "use `ckpttool diff A B`"),
            ("verify", "`ckpttool check SRC`, `ckpttool diff A B`"),
            ("quantise", "ckpttool quantize SRC DST"),
            ("FP8", "ckpttool quantize SRC DST"),
            ("dequantize", "ckpttool quantize SRC DST --to bf16"),
            ("convert", "ckpttool reshard SRC DST --to FORMAT"),
            ("info", "use `ckpttool inspect SRC`"),
            ("show", "--show NAME"),
            ("ls", "ckpttool inspect SRC --list"),
            ("estimate", "ckpttool size SRC"),
            ("cast", "ckpttool reshard SRC DST --dtype bf16"),
            ("split", "ckpttool reshard SRC DST --tp-out N"),
            ("drop", "ckpttool drop-keys SRC DST PATTERN"),
        )
    },
    "no source": ("reshard", ("SRC is missing", "ckpttool reshard SRC DST")),
    "no destination": ("reshard {LLAMA}", ("DST is missing",)),
    "merge without -o": ("merge a b", ("--output is missing", "did you mean `ckpttool merge a -o b`?")),
    "underscores in an option": ("reshard a b --tp_out 2", ("no option --tp_out", "did you mean --tp-out?")),
    "an option with its words together": ("reshard a b --tpout 2", ("did you mean --tp-out?",)),
    "one dash": ("reshard a b -tp 2", ("no option -tp", "--tp-out for the ranks of DST")),
    "the beginning of an option": ("reshard a b --dry", ("did you mean --dry-run?",)),
    "an option of another command": ("drop-keys a b --remove-keys c", ("drop-keys SRC DST 'lm_head.*'",)),
    "another option of another command": ("reshard a -o b", ("ckpttool reshard SRC DST",)),
    "a method's parameter as an option": ("merge a b --density 0.5 -o c", ("--param density=VALUE",)),
    "a number that is none": ("reshard a b --tp-out two", ("--tp-out is `two`", "a whole number")),
    "zero ranks": ("reshard a b --tp-out=0", ("--tp-out is `0`", "at least 1")),
    "a stage of ZeRO that is none": ("fp8-size a --zero 4", ("--zero is `4`", "at most 3")),
    "an option without its value": ("reshard a b --tp-out", ("--tp-out needs a value",)),
    "a glob that the shell expanded": ("reshard a b c d e f", ("c d e ...", "given by its directory", "quoted")),
    "a variable that is not set": ("reshard '' b", ("a path is empty", "variable")),
    "a device's memory without a unit": ("fp8-size {LLAMA} --gpu 80", ("80 has no unit", "80GB")),
    "a size of another world": ("reshard {LLAMA} o --memory 99999999TB", ("larger than any file",)),
    "ranks without end": ("reshard {LLAMA} o --ranks-out 0-9999999999", ("not a list of numbers", "0-3,7")),
    "a layout as a range": ("reshard {LLAMA} o --pp-layout 2-2", ("not a list of numbers", "10,11,11")),
    "another case": ("reshard {LLAMA} o --to HF", ("did you mean `hf`",)),
    "another name of a format": ("reshard {LLAMA} o --to safetensors", ("did you mean `hf`",)),
    "a method in capitals": ("merge {ONE} {TWO} --method TIES -o o", ("did you mean `ties`",)),
    "an order that is none": ("inspect {LLAMA} --sort siz", ("did you mean `size`",)),
    "two tasks of convert-json": ("convert-json a o --program p --check", ("different tasks",)),
}


@pytest.mark.parametrize("case", USAGE)
def test_command_line(case: str) -> None:
    line, words = USAGE[case]
    error = mistake(line, 2)
    for word in words:
        assert word in error, error


PATHS: dict[str, tuple[str, str]] = {
    "a typo": ("inspect modle", "did you mean model?"),
    "a typo above": ("inspect modle/part", "did you mean model/part?"),
    "nothing like it": ("inspect elsewhere", "the current directory holds dangling, model"),
    "a link to nowhere": ("inspect dangling", "a link to gone"),
    "a glob in quotes": ("inspect 'model/p*'", "the directory model"),
    "a name on the hub": ("inspect org/name", "the Hugging Face Hub is hf://org/name"),
    "a tilde in quotes": ("inspect '~/model'", "$HOME"),
    "a model of a merge": ("merge model modle -o o", "did you mean model?"),
}


@pytest.mark.parametrize("case", PATHS)
def test_path(case: str) -> None:
    Path("model/part").mkdir(parents=True)
    Path("dangling").symlink_to("gone")
    line, hint = PATHS[case]
    assert hint in mistake(line, 2)


def test_a_model_of_the_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    assert "hf download org/name" in mistake("inspect hf://org/name", 1)


def fill(*names: str, content: bytes = b"x") -> Path:
    """A directory with these files."""
    for name in names:
        at = Path("src") / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content)
    return Path("src")


STRANGERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "PyTorch, empty": (("pytorch_model.bin",), ("this is not a file of torch.save",)),
    "PyTorch's shards": (("pytorch_model-00001-of-00002.bin",), ("1 of 2 files are missing",)),
    "several of torch.save": (("a.pt", "b.pt"), ("files of torch.save", "give the path of the one")),
    "GGUF, empty": (("llama-q4.gguf",), ("within its header",)),
    "numpy": (("model.npz",), ("another framework",)),
    "Megatron-LM": (("latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/a.pt"), ("Megatron-LM", "fetch")),
    "DeepSpeed's script": (("zero_to_fp32.py",), ("part of a DeepSpeed save", "global_step")),
    "a broken save of DeepSpeed": (
        ("latest", "zero_to_fp32.py", "global_step1/mp_rank_00_model_states.pt"),
        ("saves: global_step1",),
    ),
    "half of a torch DCP": (("__0_0.distcp", ".metadata.tmp"), ("the save was not finished",)),
    "a broken save of accelerate": (
        ("pytorch_model_fsdp_0/.metadata",),
        ("src/pytorch_model_fsdp_0/.metadata", "cut off"),
    ),
    "an archive": (("model.tar.gz",), ("unpack it",)),
    "half a download": (("model.safetensors.part",), ("model.safetensors.part has not finished",)),
    "the hub's cache": (("snapshots/0a1b/config.json",), ("give the snapshot: src/snapshots/0a1b",)),
    "one directory for each rank": (
        ("rank_0/model.safetensors", "rank_1/model.safetensors"),
        ("--rank-pattern 'rank_{rank}/model.safetensors'",),
    ),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_is_not_read(case: str) -> None:
    names, words = STRANGERS[case]
    src = fill(*names)
    for line in (f"inspect {src}", f"reshard {src} dst --tp-out 2"):
        error = mistake(line, 1)
        for word in words:
            assert word in error, error


def test_an_adapter() -> None:
    """It can be looked into. Resharding it alone makes no sense, and what does is named."""
    assert run(f"inspect {LORA}").out.startswith("LoRA adapter, rank 4")
    assert f"`ckpttool merge MODEL+{LORA} -o DST`" in mistake(f"reshard {LORA} dst --tp-out 2", 1)


DISGUISES = {
    "a web page": (b"<!DOCTYPE html>\n<html><head><title>401</title>", "a web page"),
    "a server's error": (b'{"error":"Repository not found"}', "a server's error message"),
    "a server's words": (b"Entry not found", "a server's error message"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "a zip archive": (b"PK\x03\x04" + bytes(40), "torch.save"),
    "a pickle": (b"\x80\x02}q\x00." + b"a" * 20, "a pickle"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + b"a" * 20, "GGUF"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"a" * 20, "unpack it"),
    "zeros": (bytes(4096), "never filled"),
}


@pytest.mark.parametrize("case", DISGUISES)
def test_another_file_under_the_name(case: str) -> None:
    content, words = DISGUISES[case]
    assert words in mistake(f"inspect {fill('model.safetensors', content=content)}", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "config.json is empty"), (b"<html>", "config.json is a web page"), (b"{", "config.json is not valid JSON")],
)
def test_config_that_is_none(content: bytes, words: str) -> None:
    shutil.copytree(TINY, "src")
    Path("src/config.json").write_bytes(content)
    assert words in mistake("reshard src dst --tp-out 2", 1)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("reshard {LLAMA}/model_tp0.safetensors dst --to hf", 8),
        ("merge {LLAMA}/model_tp0.safetensors {LLAMA}/model_tp1.safetensors -o dst", 8),
        ("drop-keys {SHARDED}/model-00001-of-00002.safetensors dst 'model.norm.*'", 2),
        ("fp8-cast {SHARDED}/model-00001-of-00002.safetensors dst", 2),
        ("fp8-size {SHARDED}/model-00001-of-00002.safetensors", 2),
    ],
)
def test_one_file_of_several(line: str, files: int) -> None:
    """A merge of shards by their files would be their average, and a part of a model is not a model."""
    error = mistake(line, 2)
    assert f"one of the {files} files of a checkpoint" in error
    match = re.search(r"give their directory: (\S+); or --from hf", error)
    assert match
    name, *rest = shlex.split(line)
    followed = [w for w in rest if not w.endswith(".safetensors")]
    if name != "fp8-cast":  # the second is one of quantized weights, which take a recipe to quantize anew
        assert ckpttool(name, match[1], *followed, "-q").code == 0
    assert run(f"inspect {{LLAMA}}/{'model_tp0.safetensors'} --depth 1").code == 0  # to look at one is fine


def test_files_that_only_look_numbered() -> None:
    """Whole models side by side are merged."""
    for n in (1, 2):
        shutil.copy(ONE.parent / f"ft{n + 1}" / "model.safetensors", f"epoch_{n}.safetensors")
    assert run("merge epoch_1.safetensors epoch_2.safetensors -o dst -q").code == 0


PATTERNS = {
    "several in one": ("'lm_head.weight,model.norm.weight'", "'lm_head.weight' 'model.norm.weight'"),
    "alternatives": ("'lm_head.*|model.norm.*'", "'lm_head.*' 'model.norm.*'"),
    "a regular expression": (r"'norm\.weight$'", r"'re:norm\.weight$'"),
    "a run of the shell": ("'model.layers.{0..2}.*'", "'model.layers.{0,1,2}.*'"),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_pattern_in_another_syntax(case: str) -> None:
    pattern, meant = PATTERNS[case]
    error = mistake(f"drop-keys {{LLAMA}} dst {pattern}", 2)
    assert meant in error
    assert run(f"drop-keys {{LLAMA}} dst {error[error.index(meant) :].strip()} -n").code == 0


def test_pattern_that_the_shell_expanded() -> None:
    Path("notes.txt").touch()
    assert "notes.txt is a file here: quote patterns" in mistake("drop-keys {LLAMA} dst notes.txt", 2)


@pytest.mark.parametrize(("line", "place"), [("{LLAMA} 'lm_head.*' dst", "DST"), ("'lm_head.*' {LLAMA} dst", "SRC")])
def test_pattern_in_the_place_of_a_path(line: str, place: str) -> None:
    assert f"stands where {place} does" in mistake(f"drop-keys {line}", 2)


def test_destination_whose_name_looks_like_a_pattern() -> None:
    error = mistake("drop-keys {LLAMA} 'dst[1]' 'lm_head.*'", 2)
    assert run(f"drop-keys {{LLAMA}} '{error.rpartition(': ')[2].strip()}' 'lm_head.*' -q").code == 0
    assert Path("dst[1]").is_dir()


def test_rank_pattern_without_a_match() -> None:
    error = mistake("inspect {LLAMA} --rank-pattern 'model_{rank}.safetensors'", 1)
    match = re.search(r"for example '(\S+)'", error)
    assert match
    assert run(f"inspect {{LLAMA}} --rank-pattern '{match[1]}' --depth 1").code == 0


def test_model_of_no_known_family() -> None:
    shutil.copytree(TINY, "src")
    config = Path("src/config.json")
    config.write_text(config.read_text().replace("llama", "foobar").replace("LlamaFor", "FooBarFor"))
    error = mistake("reshard src dst --tp-out 2", 1)
    assert "model_type `foobar`" in error
    fitting = error[error.index("--family ") :].split(" ", 1)[1].split(";")[0].strip().split(", ")
    assert "llama" in fitting
    assert "gpt2" not in fitting
    assert run("reshard src dst --tp-out 2 --family llama -q").code == 0


DESTINATIONS: dict[str, tuple[str, str]] = {
    "no directory above": ("reshard {LLAMA} 'no such/dst' --tp-out 2", "mkdir -p"),
    "the source": ("reshard model model", "SRC and DST are the same"),
    "taken": ("reshard {LLAMA} model --tp-out 2", "choose another DST, or use --force"),
}


@pytest.mark.parametrize("case", DESTINATIONS)
def test_destination(case: str) -> None:
    shutil.copytree(TINY, "model")
    line, words = DESTINATIONS[case]
    error = mistake(line, 1)
    assert words in error
    if words == "mkdir -p":
        Path(shlex.split(error[error.index(words) :])[2]).mkdir(parents=True)
        assert run(line).code == 0


MERGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a weight for the base": (
        "{ONE} {TWO} --base {BASE} --method ties --weights 1,1,1 --param density=1",
        ("3 values for 2 sources", "give 2, in the order of the sources", "--base that is not among them has none"),
    ),
    "weights of a method that has none": (
        "{ONE} {TWO} --base {BASE} --method slerp --weights 1,1",
        ("has no weights", "drop --weights", "--param t=VALUE"),
    ),
    "weights without a sum": ("{ONE} {TWO} --weights 1,-1", ("sum to 0", "--param normalize=false")),
}


@pytest.mark.parametrize("case", MERGES)
def test_merge(case: str) -> None:
    line, words = MERGES[case]
    done = run(f"merge {line} -o dst")
    assert done.code in (1, 2)
    for word in words:
        assert word in done.err, done.err
    follow: dict[str, Callable[[], Done]] = {
        "a weight for the base": lambda: run(f"merge {line.replace('1,1,1', '1,1')} -o dst -n"),
        "weights of a method that has none": lambda: run(
            f"merge {line.replace('--weights 1,1', '--param t=0.5')} -o dst -n"
        ),
        "weights without a sum": lambda: run(f"merge {line} --param normalize=false -o dst -q"),
    }
    done = follow[case]()
    assert done.code == 0 or "exactly" in done.err, done.err


def test_whole_numbers_that_differ() -> None:
    """They are not merged. The tensor may be left out, which takes a target that is not a program."""
    one = FIXTURES / "paddle_programs" / "dtypes"
    shutil.copytree(one, "two")
    params = Path("two/model.pdiparams")
    params.write_bytes(params.read_bytes()[:160] + b"\x77" + params.read_bytes()[161:])
    error = mistake(f"merge {one} two -o dst", 1)
    assert "which is not merged" in error
    match = re.search(r"hint: leave it out: (--remove-keys .* --to hf) \(", error)
    assert match
    assert run(f"merge {one} two -o dst -q {match[1]}").code == 0


def test_help_is_short_and_whole() -> None:
    """At 80 columns: a line for each command, sections for options, examples that can be read as command lines."""
    from typer.main import get_command

    from ckpttool.cli.app import app
    from ckpttool.cli.help import COMMON, EXAMPLES, NOTES, TASKS

    out = run("--help").out
    assert "..." not in out.partition("\n")[2]
    assert [out.index(f"\n{task}:\n") for task, _ in TASKS] == sorted(out.index(f"\n{task}:\n") for task, _ in TASKS)
    assert sorted(name for _, names in TASKS for name in names) == sorted(EXAMPLES)
    group = get_command(app)
    assert set(EXAMPLES) == set(group.commands)  # type: ignore[attr-defined]
    for name, lines in EXAMPLES.items():
        out = run(f"{name} --help").out
        assert all(len(line) <= 80 for line in out.splitlines())
        sections = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert sections[:2] == ["Examples:", "Arguments:"], name
        assert sections[-1 - len(NOTES.get(name, ()))] == "Output:", name
        common = out.partition(f"\n{COMMON}:\n")[2].partition("\n\n")[0]
        few = len(group.commands[name].params) < 8  # type: ignore[attr-defined]
        assert len(re.findall("^  -", common, re.MULTILINE)) in ((0,) if few else range(5, 10)), name
        assert few or sections[2] == f"{COMMON}:", name
        for line in lines:
            assert line in out
            words = shlex.split(line)
            assert words[:2] == ["ckpttool", name]
            group.commands[name].make_context(name, words[2:])  # type: ignore[attr-defined]


def test_recipe_without_the_ending() -> None:
    """A recipe is one by what it says, too."""
    models = "".join(f"- {{model: {m}, parameters: {{weight: 1}}}}\n" for m in (ONE, TWO))
    Path("recipe.txt").write_text(f"merge_method: linear\nmodels:\n{models}")
    assert run("merge recipe.txt -o dst -q").code == 0
    os.mkfifo("pipe")  # a look into it would wait for ever, and take what it says away
    assert "the source cannot be listed" in mistake("merge pipe -o other", 2)


def test_names_from_a_file_without_names() -> None:
    params = PROGRAM.with_suffix(".pdiparams")
    assert "--names model.pdparams" in mistake(f"convert-json {{PROGRAM}} o.safetensors --names {params}", 1)


def test_nothing_is_asked_for() -> None:
    """The commonest slip, --tp-out forgotten, is not an error: the ranks are rewritten, which is said."""
    assert "note: same parallelism as SRC (tp 8); change it with --tp-out" in run("reshard {LLAMA} dst").err
    assert "same parallelism as SRC" not in run("reshard {LLAMA} other --tp-out 8").err


def test_quantized_without_a_config() -> None:
    shutil.copytree(TINY, "src")
    Path("src/config.json").unlink()
    assert "note: there is no config.json" in run("fp8-cast src dst").err


FORMER = {
    "drop-keys a b c --tp-out 2": "`ckpttool reshard SRC DST --remove-keys PATTERN --tp-out 2`",
    "drop-keys a b c --to=hf": "`ckpttool reshard SRC DST --remove-keys PATTERN --to hf`",
    "drop-keys a b c --replicate 'x y'": "`ckpttool reshard SRC DST --remove-keys PATTERN --split 'x y=none'`",
    "merge a b -o c --ranks-out 0-3": "`ckpttool reshard MERGED DST --ranks-out 0-3`",
    "merge a b -o c --fuse": "`ckpttool reshard MERGED DST --fuse`",
    "merge a b -o c --rank-pattern 'x{rank}'": "`ckpttool reshard SRC MODEL --to hf --rank-pattern 'x{rank}'`",
    "quantize a b --tp-out 2": "`ckpttool reshard SRC DST --requant RECIPE --tp-out 2`",
    "fp8-cast a b --pow2": "--scale-dtype f32:pow2",
    "size a --device-mem 80GB": "--gpu 80GB",
    "size a --pp 2": "--pp-out",
    "reshard a b --replicate '*.freq'": "--split '*.freq=none'",
    "reshard a b --replicate": "--split 'VALUE=none'",
    "reshard a b --sharding-version v1": "--sharding-out N:v1",
    "inspect a --offline": "set HF_HUB_OFFLINE=1",
    "merge a b -o c --connections 4": "set CKPTTOOL_CONNECTIONS=4",
}


@pytest.mark.parametrize("line", FORMER)
def test_former_options(line: str) -> None:
    """An option that has moved is an error that says where to."""
    error = mistake(line, 2)
    assert "has no option" in error
    assert FORMER[line] in error


OTHERS = {
    "mergekit's order": ("merge {ONE} {TWO} out", "did you mean `ckpttool merge {ONE} {TWO} -o out`?"),
    "mergekit's --cuda": ("merge {ONE} -o o --cuda", "leave it out: no GPU is used"),
    "mergekit's --allow-crimes": ("merge {ONE} -o o --allow-crimes", "--missing base or --missing skip"),
    "mergekit's --out-shard-size": ("merge {ONE} -o o --out-shard-size 5GB", "use --max-shard-size"),
    "mergekit's command": ("mergekit-yaml ties.yml out", "use `ckpttool merge RECIPE.yml -o DST`"),
    "mergekit's tokenizers": ("merge {ONE} {TWO} -o o --tokenizer-source union", "set `tokenizer:` in a recipe"),
    "weights as several words": ("merge {ONE} {TWO} 0.4 -o o", "one word: --weights 0.6,0.4"),
    "the report of a merge": ("merge {ONE} {TWO} -o o --html r.html", "--report FILE"),
    "the report of a model": ("inspect {ONE} --report r.html", "use --html"),
    "a component": ("inspect {ONE} --component model", "use --only"),
    "names like grep": ("inspect {ONE} --match q_proj", "use --filter"),
    "vLLM's quantization": ("reshard {LLAMA} o --quantization fp8", "use --requant RECIPE"),
    "a format to quantize to": ("quantize {LLAMA} o --to vllm", "ckpttool reshard SRC DST --requant RECIPE --to vllm"),
    "SGLang": ("reshard {LLAMA} o --to sglang", "did you mean `vllm`?"),
    "a number of ranks": ("reshard {LLAMA} o --to hf --ranks-out 2", "set how many there are"),
    "tokens without a cache": ("size {LLAMA} --tokens 32k", "also pass --kv bf16 or --kv fp8"),
    "vLLM's -tp": ("reshard {LLAMA} o --to vllm -tp 4", "--tp-out for the ranks of DST, --tp for those of SRC"),
    "vLLM's long option": ("reshard {LLAMA} o --tensor-parallel-size 4", "--tp-out for the ranks of DST"),
    "Paddle's spelling": ("reshard {LLAMA} o --tensor_parallel_size 4", "--tp-out for the ranks of DST"),
    "no command": ("{LLAMA}", "a command comes first: `ckpttool inspect {LLAMA}`"),
    "two checkpoints": ("inspect {ONE} {TWO}", "to compare: `ckpttool diff {ONE} {TWO}`"),
    "a GPU's number": ("fp8-size {LLAMA} --gpu 4090", "did you mean rtx4090; one of "),
    "a GPU's name": ("fp8-size {LLAMA} --gpu h1000", "did you mean h100; one of "),
    "a part of names": ("inspect {LLAMA} --filter q_proj", "did you mean '*q_proj*'?"),
    "a part of names to keep": ("fp8-cast {LLAMA} o --keep q_proj", "did you mean '*q_proj*'?"),
    "a part of one name": ("inspect {LLAMA} --filter lm_head", "did you mean `lm_head.weight`?"),
    "FP8 as a dtype": ("fp8-cast {LLAMA} o --to fp8", "--recipe quantizes"),
    "FP8 as a recipe": ("fp8-cast {LLAMA} o --recipe fp8", "FP8 is tensor, channel or block"),
    "nothing to dequantize": ("fp8-cast {ONE} o --to bf16", "--dtype DTYPE casts"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_people_know_from_elsewhere(case: str) -> None:
    line, hint = OTHERS[case]
    for name in ("LLAMA", "ONE", "TWO"):
        hint = hint.replace(f"{{{name}}}", str(globals()[name]))
    assert hint in mistake(line, 2)


def test_names_of_the_hub_beside_a_directory_like_them() -> None:
    """A name on the hub is one, although a directory here is spelled almost like its owner."""
    Path("llama/step").mkdir(parents=True)
    assert "hf://meta-llama/Llama-3" in mistake("inspect meta-llama/Llama-3", 2)
    assert "did you mean llama/step?" in mistake("inspect llamma/step", 2)
    assert "hf://" not in mistake("inspect llama/other", 2)


def test_two_steps_of_a_run_differ() -> None:
    """They have the same names: that they are equal in that is not what one wants to know."""
    assert run("inspect {ONE} --diff {TWO}").code == 3
    assert run("inspect {ONE} --diff {TWO} --headers-only").out.endswith("; values not compared)\n")


def test_what_cannot_be_cut_does_not_fit() -> None:
    """No "fits" beside "not possible"."""
    done = run("fp8-size {LLAMA} --tp-out 3 --gpu h100 -q")
    assert done.code == 3
    assert done.out.startswith("not possible: ")
    assert "fits" not in done.out


def test_names_with_empty_components() -> None:
    """The tree shows a name as it is."""
    names = ("../../e", "a..b", "a.b")
    write(Path("model.safetensors"), {n: Raw("U8", np.zeros(1, np.uint8)) for n in names})
    lines = run("inspect model.safetensors").out.splitlines()[5:]
    assert [line.split()[0] for line in lines] == [*sorted(names)]
