"""Runs: directories of several checkpoints, which ``inspect`` lists and all other commands refuse by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ckpttool.formats.runs import step_of
from ckpttool.ops.inspect.source import read
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import origin, save_hf
from tests.inspect.test_widths import on_terminal

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHEN = 1_790_000_000


def save(root: Path, name: str, fixture: str = "", *, add: tuple[str, ...] = ()) -> Path:
    """A checkpoint of a run: a small one, or a copy of a fixture."""
    at = root / name
    if fixture:
        shutil.copytree(FIXTURES / fixture, at)
    else:
        save_hf(at, {"model.norm.weight": origin(0, "BF16", (16,))}, {"model_type": "llama"})
    for file in add:
        (at / file).write_text("{}", "utf-8")
    return at


def listed(root: Path, *options: object) -> dict[str, Any]:
    done = ckpttool("inspect", root, "--json", *options)
    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    assert (answer["schema"], answer["view"]) == ("ckpttool.inspect/1", "checkpoints")
    return answer


def rows(root: Path, *options: object) -> list[tuple[str, int | None, bool | None]]:
    return [(r["name"], r["step"], r["complete"]) for r in listed(root, *options)["checkpoints"]]


def test_steps_are_in_their_order_and_the_newest_complete_one_is_marked(tmp_path: Path) -> None:
    for step in (500, 1000, 10000, 9500):
        save(tmp_path, f"checkpoint-{step}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "README.md").write_text("a run", "utf-8")
    answer = listed(tmp_path)
    assert [r["step"] for r in answer["checkpoints"]] == [500, 1000, 9500, 10000]
    first = answer["checkpoints"][0]
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoint-500").iterdir())
    assert {k: first[k] for k in ("format", "bytes", "files", "optimizer", "complete", "why")} == {
        "format": "hf", "bytes": size, "files": 2, "optimizer": False, "complete": True, "why": None,
    }  # fmt: skip
    assert (answer["resume"], answer["because"]) == ("checkpoint-10000", "the newest that is complete")


KINDS = {
    "torchtitan": ("step-{}", "dcp/titan_llama3/checkpoint", "dcp", True),
    "transformers": ("checkpoint-{}", "hf_tiny_source", "hf", False),
    "paddle": ("checkpoint-{}", "paddle_zcc/nlp_tp2", "hybrid", True),
    "paddle-unified": ("checkpoint-{}", "paddle_unified/nlp_llamafused_bf16_tp2", "unified", True),
    "megatron": ("iter_{:07}", "megatron/dist/llama_tp2/iter_0000005", "megatron-dist", True),
    "megatron-legacy": ("iter_{:07}", "megatron/legacy/llama_pp2_vp2/iter_0000005", "megatron", True),
    "deepspeed": ("global_step{}", "torch/deepspeed/z1/global_step3", "deepspeed", True),
    "accelerate": ("checkpoint_{}", "hf_tiny_source", "hf", False),
    "nemo": ("model--val_loss=0.5-step={}", "megatron/nemo/own", "megatron", False),
    "verl": ("global_step_{}", "torch_fsdp/fsdp1", "fsdp", True),
}


@pytest.mark.sample("torchtitan", "paddle", "megatron", "deepspeed")
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_trainer(kind: str, tmp_path: Path) -> None:
    form, fixture, format_name, optimizer = KINDS[kind]
    for step in (2, 10):
        save(tmp_path, form.format(step), fixture)
    answer = listed(tmp_path, "--checkpoints")
    found = [(r["name"], r["step"], r["format"], r["complete"], r["optimizer"]) for r in answer["checkpoints"]]
    assert found == [(form.format(n), n, format_name, True, optimizer) for n in (2, 10)]
    assert answer["resume"] == form.format(10)


@pytest.mark.parametrize(("pointer", "form", "fixture"), [
    ("latest", "global_step{}", "torch/deepspeed/z1/global_step3"),
    ("latest_checkpointed_iteration.txt", "iter_{:07}", "megatron/dist/llama_tp2/iter_0000005"),
])  # fmt: skip
def test_what_a_pointer_names_is_one_checkpoint_still(pointer: str, form: str, fixture: str, tmp_path: Path) -> None:
    """reshard and all the others open it, and inspect shows it and says that there are others."""
    for step in (2, 10, 20):
        save(tmp_path, form.format(step), fixture)
    said = form.format(10) if pointer == "latest" else "10"
    (tmp_path / pointer).write_text(said + "\n", "utf-8")
    done = ckpttool("inspect", tmp_path)
    assert done.code == 0
    assert "3 checkpoints of a run lie here: `ckpttool inspect RUN --checkpoints` lists them" in done.err
    assert form.format(10) in done.err
    answer = listed(tmp_path, "--checkpoints")
    assert (answer["resume"], answer["because"]) == (form.format(10), pointer)
    (tmp_path / pointer).write_text("77", "utf-8")
    assert listed(tmp_path, "--checkpoints")["notes"] == [f"{pointer} names a checkpoint that is not here"]


def test_a_link_to_the_newest_is_a_mark_and_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"step{step}")
    (tmp_path / "latest").symlink_to("step2")
    answer = listed(tmp_path)
    assert [r["name"] for r in answer["checkpoints"]] == ["step1", "step2", "step3"]
    assert (answer["resume"], answer["because"]) == ("step2", "latest")


def test_one_checkpoint_stays_one(tmp_path: Path) -> None:
    """The directory in which a trainer put the final model, above its checkpoints."""
    save(tmp_path, ".")
    alone = json.loads(ckpttool("inspect", tmp_path, "--json").out)
    assert (alone["view"], alone["notes"]) == ("tree", [])
    save(tmp_path, "checkpoint-500")
    answer = json.loads(ckpttool("inspect", tmp_path, "--json").out)
    assert answer["view"] == "tree"
    assert answer["notes"] == ["1 checkpoint of a run lies here: `ckpttool inspect RUN --checkpoints` lists them"]
    assert rows(tmp_path, "--checkpoints") == [("checkpoint-500", 500, True)]


def test_what_is_missing_is_said_in_a_few_words(tmp_path: Path) -> None:
    for step in (100, 200):
        save(tmp_path, f"checkpoint-{step}", "paddle_zcc/nlp_tp2")
    save(tmp_path, "checkpoint-300", "dcp/titan_llama3/checkpoint")
    (tmp_path / "checkpoint-300" / ".metadata").unlink()
    save(tmp_path, "checkpoint-400")
    os.truncate(tmp_path / "checkpoint-400" / "model.safetensors", 20)
    save(tmp_path, "checkpoint-500.tmp")
    (tmp_path / "checkpoint-600").mkdir()
    save(tmp_path, "checkpoint-700", "hf_tiny_source")
    (tmp_path / "checkpoint-700" / "model.safetensors").unlink()
    answer = listed(tmp_path)
    found = {r["step"]: (r["complete"], r["why"]) for r in answer["checkpoints"]}
    assert found[100] == (True, None)
    assert found[300] == (False, "the save was not finished: .metadata is missing, which is written last")
    assert "20" in found[400][1]
    assert found[500] == (False, "its name says that it is being written, or was left unfinished")
    assert found[600] == (False, "it is empty")
    assert found[700][0] is False
    assert [found[n][0] for n in (400, 500, 600)] == [False] * 3
    assert answer["notes"] == [
        "checkpoint-700 is not complete: a trainer that takes the highest step would resume from it"
    ]


def test_what_trainers_write_last_is_missed_where_others_have_it(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-1", add=("trainer_state.json",))
    save(tmp_path, "checkpoint-2")
    assert listed(tmp_path)["checkpoints"][1]["why"] == (
        "trainer_state.json is missing, which its trainer writes last and others here have"
    )
    save(tmp_path, "final")
    assert rows(tmp_path)[-1] == ("final", None, True)  # a model alone
    shutil.rmtree(tmp_path / "final")
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    assert rows(tmp_path) == [("checkpoint-1", 1, True), ("checkpoint-2", 2, True)]


def test_ranks_of_paddle_that_have_not_finished(tmp_path: Path) -> None:
    signals = tuple(f"saved_signal_{i}" for i in range(12))
    save(tmp_path, "checkpoint-1", add=signals)
    save(tmp_path, "checkpoint-2", add=(*signals[:2], *signals[3:10], signals[11]))
    save(tmp_path, "checkpoint-3")
    save(tmp_path, "checkpoint-4", "llama_tp8", add=signals[:8])
    found = listed(tmp_path, "--checkpoints")["checkpoints"]
    assert [r["complete"] for r in found] == [True, False, False, True]
    missing = [(r["why"] or "").partition(" ")[0] for r in found]
    assert missing == ["", "saved_signal_2", "saved_signal_0", ""]


def test_what_cannot_be_listed_is_not_known(tmp_path: Path) -> None:
    save(tmp_path, "step-1")
    (tmp_path / "step-2").mkdir()
    scanning = os.scandir

    def refused(path: Any = ".") -> Any:
        if str(path).endswith("step-2"):
            raise PermissionError(13, "Permission denied", str(path))
        return scanning(path)

    with patch("os.scandir", refused):
        found = listed(tmp_path)["checkpoints"][1]
    assert (found["complete"], found["why"]) == (None, "it cannot be listed: Permission denied")


def test_of_many_other_directories_some_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.formats.runs._STRANGERS", 3)
    for i in range(3):
        (tmp_path / f"a{i}").mkdir()
    save(tmp_path, "z")
    save(tmp_path, "zz")
    assert ckpttool("inspect", tmp_path).code == 1
    save(tmp_path, "step-5")
    assert rows(tmp_path) == [("step-5", 5, True)]


def test_mixed_formats(tmp_path: Path) -> None:
    save(tmp_path, "step-1", "dcp/titan_llama3/checkpoint")
    save(tmp_path, "step-2")
    save(tmp_path, "step-3", "llama_tp8")
    found = listed(tmp_path, "--checkpoints")["checkpoints"]
    assert [(r["format"], r["mesh"]["tp"]) for r in found] == [("dcp", 1), ("hf", 1), ("ranks", 8)]


def test_a_level_further_down(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", f"step_{step}")
    (tmp_path / "logs").mkdir()
    assert [name for name, *_ in rows(tmp_path)] == ["checkpoints/step_1", "checkpoints/step_2"]
    done = ckpttool("inspect", tmp_path, "--diff", "checkpoints/step_1", "2")
    assert done.code == 0, done.err


def test_files_of_lightning(tmp_path: Path) -> None:
    source = next((FIXTURES / "torch" / "train").glob("*.pth"))
    for name in ("epoch=0-step=50.ckpt", "epoch=1-step=100.ckpt", "last.ckpt"):
        shutil.copyfile(source, tmp_path / name)
    answer = listed(tmp_path)
    assert [(r["name"], r["step"]) for r in answer["checkpoints"]] == [
        ("epoch=0-step=50.ckpt", 50), ("epoch=1-step=100.ckpt", 100), ("last.ckpt", None),
    ]  # fmt: skip
    assert answer["resume"] == "last.ckpt"


@pytest.mark.parametrize("names", [("rank0", "rank1"), ("0", "1"), ("tp_0", "tp_1")])
def test_directories_of_ranks_are_no_run(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        save(tmp_path, name)
    done = ckpttool("inspect", tmp_path)
    assert (done.code, "--rank-pattern" in done.err) == (1, True)


def test_a_directory_of_models_is_listed_by_name(tmp_path: Path) -> None:
    for name in ("qwen", "llama"):
        save(tmp_path, name)
    assert rows(tmp_path) == [("llama", None, True), ("qwen", None, True)]


def test_commands_for_one_checkpoint_name_the_newest_complete_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "run", f"step-{step}")
    os.truncate(tmp_path / "run" / "step-3" / "model.safetensors", 9)
    for command in (
        ("inspect", tmp_path / "run", "--list"),
        ("inspect", tmp_path / "run", "--check"),
        ("inspect", tmp_path / "run", "--filter", "x"),
        ("inspect", tmp_path / "run", "--diff", tmp_path / "run" / "step-1"),
        ("reshard", tmp_path / "run", tmp_path / "dst"),
        ("merge", tmp_path / "run", "-o", tmp_path / "dst"),
        ("size", tmp_path / "run"),
        ("drop-keys", tmp_path / "run", tmp_path / "dst", "a"),
    ):
        done = ckpttool(*command)
        assert (done.code, done.out) == (2, "")
        assert "this is a directory of 3 checkpoints, and one is needed" in done.err
        assert "checkpoints: step-3, step-2, step-1" in done.err
        assert f"the newest that is complete is step-2: {tmp_path / 'run' / 'step-2'}" in done.err
        assert not (tmp_path / "dst").exists()


def test_the_newest_complete_one_is_the_one_that_is_listed_as_such(tmp_path: Path) -> None:
    """A save without what its trainer writes last, or with an unfinished name, is not called complete in a hint."""
    for step in (1, 2, 3):
        save(tmp_path, f"checkpoint-{step}")
        if step < 3:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    save(tmp_path, "checkpoint-4.tmp")
    assert "the newest that is complete is checkpoint-2:" in ckpttool("inspect", tmp_path, "--check").err
    listed = json.loads(ckpttool("inspect", tmp_path, "--json").out)
    assert listed["resume"] == "checkpoint-2"
    (tmp_path / "latest").write_text("checkpoint-3")
    assert "latest names checkpoint-3, which is not complete; the newest that is complete is checkpoint-2" in (
        ckpttool("inspect", tmp_path).err
    )


def test_a_source_without_a_format_names_its_directories(tmp_path: Path) -> None:
    save(tmp_path / "run" / "out", "step-1")
    assert "\n      directories: run\n" in ckpttool("inspect", tmp_path).err
    one = tmp_path / "run" / "out" / "step-1"
    (one / "config.json").write_text("{}")
    assert f"hint: this file has no tensors; give its directory: {one}" in ckpttool("inspect", one / "config.json").err


def test_two_of_a_run_are_compared_by_name_step_or_path(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, f"step-{step}")
    for first, second in (("step-1", "step-2"), ("1", "2"), (tmp_path / "step-1", tmp_path / "step-2")):
        done = ckpttool("inspect", tmp_path, "--diff", first, second)
        assert (done.code, done.err) == (0, "")
    done = ckpttool("inspect", tmp_path, "--diff", "step-1", "step-9")
    assert (done.code, "step-1, step-2" in done.err) == (2, True)
    for other in ("step-2", "2"):  # of the run that SRC is in
        done = ckpttool("inspect", tmp_path / "step-1", "--diff", other)
        assert (done.code, f"hint: --diff {tmp_path / 'step-2'}" in done.err) == (2, True), done.err
    done = ckpttool("inspect", tmp_path, "step-2")
    assert (done.code, "ckpttool diff " in done.err) == (2, True)


def test_hostile_names_steer_nothing(tmp_path: Path) -> None:
    for name in ("checkpoint-1\x1b[31m", "checkpoint-2\u202egnp", "checkpoint-3\nstep", "checkpoint-4\tx"):
        save(tmp_path, name)
    done = ckpttool("inspect", tmp_path)
    assert done.code == 0
    assert len(done.out.splitlines()) == 5
    assert {line.count("\t") for line in done.out.splitlines()} == {10}
    for text in (done.out, *on_terminal("inspect", tmp_path), ckpttool("size", tmp_path).err):
        assert not any(c in text for c in "\x1b\u202e")


def test_links_that_turn_in_a_circle(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-1")
    (tmp_path / "checkpoint-2").symlink_to(".")
    assert rows(tmp_path)[0] == ("checkpoint-1", 1, True)
    assert ckpttool("size", tmp_path).code == 2


def test_a_checkpoint_that_goes_meanwhile_is_left_out(tmp_path: Path) -> None:
    """A trainer keeps the last few, and removes the others while somebody looks."""
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}")

    def racing(place: Path, options: Any) -> Any:
        if place.name == "step-1":
            shutil.rmtree(tmp_path / "step-1")
            shutil.rmtree(tmp_path / "step-2")
        return read(place, options)

    with patch("ckpttool.ops.inspect.runs.read", racing):
        answer = listed(tmp_path)
    assert [r["name"] for r in answer["checkpoints"]] == ["step-3"]
    assert answer["notes"] == [f"step-{n} disappeared while the checkpoints were listed" for n in (1, 2)]


@pytest.mark.parametrize("options", [("--filter", "x"), ("--only", "model"), ("--list",)])
def test_what_a_list_of_checkpoints_does_not_go_with(options: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, "step-1")
    done = ckpttool("inspect", tmp_path, "--checkpoints", *options)
    assert (done.code, done.out) == (2, "")


def test_no_checkpoints_at_all(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    done = ckpttool("inspect", tmp_path, "--checkpoints")
    assert (done.code, "no checkpoints in this directory" in done.err) == (2, True)
    assert "no checkpoint format is recognised" in ckpttool("inspect", tmp_path).err


def test_in_a_pipe_it_is_a_table_of_tabs(tmp_path: Path) -> None:
    for step in (1, 2):
        at = save(tmp_path, f"step-{step}")
        for file in at.iterdir():
            os.utime(file, (WHEN, WHEN))
    done = ckpttool("inspect", tmp_path)
    head, first, second = [line.split("\t") for line in done.out.splitlines()]
    assert head == [
        "name",
        "step",
        "bytes",
        "files",
        "format",
        "mesh",
        "optimizer",
        "saved",
        "complete",
        "resume",
        "why",
    ]
    assert first[:2] + first[3:] == ["step-1", "1", "2", "hf", "-", "no", "2026-09-21T14:13:20Z", "yes", "no", "-"]
    assert second[9] == "yes"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    for step in (1, 20000):
        save(tmp_path, f"megatron_gpt--val_loss=2.34-step={step}-consumed_samples=800000.0")
    (tmp_path / "step-30000").mkdir()
    lines = on_terminal("inspect", tmp_path, columns=columns)
    whole = [line for line in lines if str(tmp_path) in line or line.startswith("  megatron_gpt")]
    assert max(len(line) for line in lines if line not in whole) <= columns
    assert [line for line in lines if "complete <" in line]
    assert any(line == "step-30000: it is empty" for line in lines)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500), ("tmp-checkpoint-500", 500), ("iter_0001000", 1000), ("global_step1000", 1000),
        ("step-1000", 1000), ("epoch=3-step=1000.ckpt", 1000), ("epoch_3", 3), ("step1000-unsharded", 1000),
        ("ep0-ba1000", 1000), ("checkpoint_1_2000.pt", 2000), ("1000", 1000), ("model--val_loss=2.5-epoch=1", 1),
        ("final", None), ("llama-3", None), ("qwen2.5-7b", None),
    ],
)  # fmt: skip
def test_what_names_say(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(("names", "said"), [(("", "step-2"), "names no checkpoint"), (("1", "step-1"), "twice")])
def test_two_checkpoints_are_asked_for(tmp_path: Path, names: tuple[str, str], said: str) -> None:
    save(tmp_path, "step-1")
    save(tmp_path, "step-2")
    done = ckpttool("inspect", tmp_path, "--diff", *names)
    assert done.code == 2
    assert said in done.err
