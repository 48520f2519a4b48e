"""What every command prints, byte for byte: ``golden/NAME.json`` for programs, ``golden/NAME.txt`` for people: in a
pipe, and as screens of 80 and 120 columns, without colours and, where lines have them, with.

After a change that is meant: ``UPDATE_GOLDEN=1 pytest tests/report/test_golden.py``, and read the diff.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest

from ckpttool.ops import doctor
from ckpttool.report import bars, target
from ckpttool.report.page import ReportPage
from ckpttool.report.text import columns_of
from ckpttool.version import __version__
from tests.helpers.command import ESCAPE, ckpttool, tagged

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
TINY, RANKS, V3 = "fixtures/hf_tiny_source", "fixtures/llama_tp8", "fixtures/deepseek_v3"
PROGRAMS = "fixtures/paddle_programs"
BASE = "fixtures/merge/inputs/base"
MODELS = [f"fixtures/merge/inputs/{name}" for name in ("ft1", "ft2")]
CUT = "--recipe channel --tp-out 2"
LAYER = "--filter *layers.0.*"
CASES = {
    "reshard": f"reshard {RANKS} out --tp-out 2 --verify --manifest",
    "reshard-hf": f"reshard {V3} out --to hf --max-shard-size 200kB -v",
    "reshard-quiet": f"reshard {RANKS} out --tp-out 2 -q",
    "reshard-part": f"reshard {RANKS} out --tp-out 2 --part 1/2",
    "reshard-dry-run": f"reshard {RANKS} out --tp-out 2 --dry-run",
    "reshard-dry-run-quiet": f"reshard {RANKS} out --tp-out 2 --dry-run -q",
    "reshard-dry-run-part": f"reshard {RANKS} out --tp-out 2 --dry-run --part 1/2",
    "reshard-dequant": f"reshard {V3} out --dequant bf16 --verify",
    "merge": f"merge {' '.join(MODELS)} -o out --base {BASE} --method ties --weights 1,0.5 --verify",
    "merge-report": f"merge {' '.join(MODELS)} -o out --weights 1,2 --report page.html",
    "merge-dry-run": f"merge {' '.join(MODELS)} -o out --weights 1,2 --dry-run",
    "merge-recipe-dry-run": "merge made/recipe.yml -o out --dry-run",
    "merge-shards": f"merge {V3} -o out",
    "merge-methods": "merge --list-methods",
    "quantize": f"quantize {TINY} out --recipe block --block 64x64 --verify",
    "quantize-to": f"quantize {V3} out --to bf16",
    "quantize-dry-run": f"quantize {TINY} out --recipe channel --dry-run",
    "size": f"size {V3}",
    "size-dtype": f"size {V3} --by dtype --unit GB",
    "size-module": f"size {TINY} --by module --unit B",
    "size-tensor": f"size {V3} --by tensor --check-total-size",
    "size-serving": f"size {TINY} {CUT} --kv bf16 --tokens 32k --batch 4 --gpu 80GB",
    "size-misfit": f"size {TINY} --tp-out 3 --gpu 80GB",
    "size-small": f"size {TINY} {CUT} --kv bf16 --tokens 32k --gpu 1MB",
    "size-small-quiet": f"size {TINY} {CUT} --kv bf16 --tokens 32k --gpu 1MB -q",
    "size-train": f"size {TINY} {CUT} --train --dp 2 --fp8-transposed",
    "drop-keys": f"drop-keys {V3} out re:layers\\.61\\. --verify",
    "drop-keys-dry-run": f"drop-keys {V3} out re:layers\\.61\\. --dry-run",
    "drop-keys-dry-run-warning": f"drop-keys {TINY} out *q_proj* --dry-run",
    "convert": f"convert-json {PROGRAMS}/pir/model.json out.safetensors --names {PROGRAMS}/model.pdparams",
    "convert-dry-run": f"convert-json {PROGRAMS}/pir/model.json out.safetensors --dry-run",
    "convert-back-dry-run": "convert-json made/pir.safetensors out --program made/pir/model.json --dry-run",
    "convert-check": f"convert-json {PROGRAMS}/pir/model.json --check --params {PROGRAMS}/static/inference.pdiparams",
    "convert-fix": f"convert-json {PROGRAMS}/nan_attr/model.json --fix out.json",
    "write-index": "inspect made/shards --write-index",
    "write-index-dry-run": "inspect made/shards --write-index --dry-run",
    "set-header": "inspect made/model.safetensors --set-header made/header.json --dry-run",
    "inspect": f"inspect {RANKS}",
    "inspect-depth": "inspect fixtures/paddle_unified/nlp_llamafused_bf16_tp2 --depth 2",
    "inspect-adapter": "inspect fixtures/paddle_unified/nlp_llama_lora_bf16_tp1 --depth 1",
    "inspect-program": f"inspect {PROGRAMS}/pir/model.json",
    "inspect-list": f"inspect {V3} --list {LAYER}",
    "inspect-files": f"inspect {RANKS} --files",
    "inspect-metadata": f"inspect {V3} --metadata",
    "inspect-ranks": f"inspect {RANKS} --ranks {LAYER}",
    "inspect-stats": f"inspect {V3} --stats {LAYER}",
    "inspect-stats-folded": f"inspect {RANKS} --stats",
    "inspect-hash": f"inspect {RANKS} --hash {LAYER}",
    "inspect-hist": f"inspect {TINY} --hist --filter *layers.0.*norm*",
    "inspect-stats-hash-hist": f"inspect {TINY} --stats --hist --hash --filter *layers.0.*norm*",
    "inspect-total": f"inspect {RANKS} --hash --total",
    "inspect-show": f"inspect {TINY} --show model.norm.weight[:8] --show lm_head.weight[1:3,:4]",
    "inspect-imports": "inspect fixtures/torch/train --imports",
    "inspect-suggest-family": f"inspect {TINY} --suggest-family",
    "inspect-check": f"inspect {RANKS} --check",
    "inspect-check-broken": "inspect made/broken --check",
    "inspect-check-quiet": "inspect made/broken --check -q",
    "inspect-diff": f"inspect {TINY} --diff {RANKS} --headers-only",
    "inspect-diff-equal": f"inspect {TINY} --diff fixtures/vllm_sharded_tp2",
    "inspect-diff-values": f"inspect {BASE} --diff {MODELS[0]} --values",
    "inspect-diff-quiet": f"inspect {BASE} --diff {MODELS[0]} --values -q",
    "inspect-checkpoints": "inspect made/run --checkpoints",
    "inspect-html": f"inspect {TINY} --html page.html --stats --filter *norm*",
    "inspect-html-ranks": f"inspect {RANKS} --html page.html --check --filter *layers.0.*q_proj*",
    "inspect-html-diff": f"inspect {TINY} --html page.html --diff {RANKS} --values --filter *norm*",
    "doctor": "doctor .",
    "doctor-quiet": "doctor . -q",
    "explain": "explain",
    "explain-class": "explain layout",
    "explain-finding": "explain no-index",
    "failure": "reshard missing out",
    "failure-layout": f"reshard {TINY} out --tp-out 3",
}
FINDINGS = ("sarif", "junit", "gitlab", "github")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What fixtures/ does not have: a damaged checkpoint, shards without an index, a run, an edited header."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("broken", "shards"):
        shutil.copytree(ROOT / V3, folder / name)
    shard = next((folder / "broken").glob("*-00001-*"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    next((folder / "shards").glob("*.index.json")).unlink()
    for step, whole in ((10, True), (20, True), (30, False)):
        checkpoint = folder / "run" / f"checkpoint-{step}"
        shutil.copytree(ROOT / TINY, checkpoint)
        if not whole:
            file = checkpoint / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-10])
        for path in (checkpoint, *checkpoint.iterdir()):
            os.utime(path, (1_790_000_000 + step,) * 2)
    shutil.copy(ROOT / TINY / "model.safetensors", folder)
    header = ckpttool("inspect", folder / "model.safetensors", "--header").out
    (folder / "header.json").write_text(header.replace("layers.1.", "layers.7."), encoding="utf-8")
    shutil.copytree(ROOT / PROGRAMS / "pir", folder / "pir")
    recipe = (ROOT / "fixtures/merge/configs/passthrough_franken__bf16.yml").read_text(encoding="utf-8")
    (folder / "recipe.yml").write_text(recipe.replace("./inputs", "fixtures/merge/inputs"), encoding="utf-8")
    assert not ckpttool("convert-json", folder / "pir" / "model.json", folder / "pir.safetensors").code
    return folder


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, its disk and whoever runs the tests are not what is looked at."""
    points = [
        doctor.Point("place", "space", "ok", "120.00 GB are free"),
        doctor.Point("place", "links", "slow", "files cannot be shared", "files that stay are copied " * 4),
        doctor.Point("python", "boto3", "missing", "s3:// cannot be read", "pip install 'ckpttool[remote]'"),
    ]
    health = doctor.MachineHealth(Path(), points, {"ckpttool": __version__})
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: health)
    monkeypatch.setattr(bars, "PATIENCE_S", math.inf)
    monkeypatch.setattr(target, "times", lambda _: "")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


def run(
    words: str, made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False
) -> tuple[int, str, str]:
    """Run in a directory with nothing but fixtures/ and made/; what differs from run to run is ``*``."""
    folder.mkdir()
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    shutil.copytree(made, folder / "made")
    monkeypatch.chdir(folder)
    done = ckpttool(*words.split(), terminal=terminal)
    return done.code, normal(done.out, folder), normal(done.err, folder)


_VARIES = (
    (r'("(?:seconds|plan|write|verify|bytes_per_second|peak_memory_estimate|peak_buffers)": )\d[\d.e-]*', r"\1*"),
    (r'("write_policy": )"\w+"', r'\1"*"'),
    (r"(?m)\S+ [kMGT]?B at most, of", "* at most, of"),
    (r", \S+ [kMGT]?B free\b", ", * free"),
    (r'("free": )\d+', r"\1*"),
    (r"at most \S+ [kMGT]?B of buffers", "at most * of buffers"),
    (r"writes: \w+", "writes: *"),
    (r"2026-\d\d-\d\d \d\d:\d\d", "2026-*"),
    (r"page\.html: \S+ [kMGT]?B", "page.html: *"),
)


def normal(text: str, folder: Path) -> str:
    """The text without what no two machines or runs have in common."""
    text = text.replace(str(folder), "HERE").replace(str(ROOT), "ROOT").replace(__version__, "VERSION")
    for pattern, kept in _VARIES:
        text = re.sub(pattern, kept, text)
    return text


def check(name: str, found: str) -> None:
    """Compare with the file of this name, or write it."""
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(found, encoding="utf-8")
    assert found == (file.read_text(encoding="utf-8") if file.exists() else "")


@pytest.mark.parametrize("name", [n for n, words in CASES.items() if "-q" not in words.split()])
def test_json(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = run(f"{CASES[name]} --json", made, tmp_path / "here", monkeypatch)
    check(f"{name}.json", out)


WIDTHS = (80, 120)


def shown(words: str, made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """What a terminal shows, with its escapes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    return run(words, made, folder, monkeypatch, terminal=True)[1]


@pytest.mark.parametrize("name", CASES)
def test_text(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(CASES[name], made, tmp_path / "pipe", monkeypatch)
    assert "\x1b" not in out + err
    coloured = [shown(CASES[name], made, tmp_path / str(n), monkeypatch, n) for n in WIDTHS]
    narrow, wide = (ESCAPE.sub("", text) for text in coloured)
    painted = [line for line in coloured[0].splitlines() if "\x1b" in line]
    parts = {"pipe": out, "messages": err, "80 columns": narrow, "120 columns": "" if wide == narrow else wide}
    parts["80 columns, lines with colours"] = "".join(f"{tagged(line)}\n" for line in painted)
    text = "\n".join(f"==== {title}\n{part}" for title, part in parts.items() if part)
    check(f"{name}.txt", f"ckpttool {CASES[name]}\nexit {code}\n{text}")
    for columns, screen in ((80, narrow), (120, wide)):
        assert too_wide(screen, columns) == []


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("name", CASES)
def test_no_line_is_wider_than_a_narrow_terminal(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = shown(CASES[name], made, tmp_path / "60", monkeypatch, 60)
    assert "\x1b" not in screen
    assert too_wide(screen, 60) == []


def too_wide(screen: str, columns: int) -> list[str]:
    """Lines that are wider than a terminal, except what is copied as a whole: a command, a line of a file that is
    printed, a path or a name that alone is longer than a line."""
    if screen.startswith("# A draft from"):  # of a family file
        return []
    copied = re.compile(r" *(?:\$ |next: |hint: (?:-|pip |\w+=))")
    lines = [line for line in screen.splitlines() if columns_of(line) > columns and not copied.match(line)]
    return [line for line in lines if len(line.split()) > 1]


@pytest.mark.parametrize("name", ["inspect", "inspect-check-broken", "merge-recipe-dry-run", "failure"])
def test_colours_move_nothing(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = shown(CASES[name], made, tmp_path / "coloured", monkeypatch, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured != shown(CASES[name], made, tmp_path / "plain", monkeypatch, 80) == ESCAPE.sub("", coloured)


def test_report_of_a_merge(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[ReportPage] = []

    def render(page: ReportPage) -> str:
        shown.append(page)
        return "<!doctype html>"

    monkeypatch.setattr("ckpttool.report.merged.render", render)
    words = f"merge {' '.join(MODELS)} -o out --base {BASE} --method ties --weights 1,0.5 --report page.html"
    run(words, made, tmp_path / "here", monkeypatch)
    # The last digits of sums of floats are the machine's.
    rounded = json.loads(json.dumps(shown[0]), parse_float=lambda text: float(f"{float(text):.5g}"))
    check("page-of-merge.json", json.dumps(rounded, indent=1) + "\n")


@pytest.mark.parametrize("kind", FINDINGS)
def test_findings(kind: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = run(f"inspect made/broken --check --findings {kind}", made, tmp_path / "here", monkeypatch)
    check(f"findings.{kind}", re.sub(r'("(?:fingerprint|primaryLocationLineHash)": )"\w+"', r'\1"*"', out))
