"""One digest for a model however it is cut, fused, named and stored, and another one for any other model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, origin, save_hf
from tests.inspect.models import CONFIG, llama

ZCC = Path("fixtures/paddle_zcc/ep2_tp2_sharding2_ema")
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def total(folder: Path, *options: object) -> str:
    done = ckpttool("inspect", folder, "--hash", "--total", "--quiet", *options)
    assert (done.code, done.err) == (0, ""), done.err
    assert re.fullmatch(r"xxh3_128:[0-9a-f]{32}\n", done.out)
    return done.out.strip()


def by_hand(tensors: Tensors) -> str:
    """As the documentation says it."""
    lines = sorted(
        f"{n}\t{t.dtype}\t{','.join(map(str, t.bits.shape))}\t{xxhash.xxh3_128_hexdigest(t.bits.tobytes())}\n".encode()
        for n, t in tensors.items()
    )
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(b''.join(lines))}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("total") / "model", llama(), CONFIG)


@pytest.mark.sample(
    "--to ranks --tp-out 4 --pp-out 2", "--to vllm --tp-out 2", "--to trtllm --tp-out 2", "--to unified --tp-out 2"
)
@pytest.mark.parametrize(
    "options",
    [
        ("--to", "hf", "--max-shard-size", "2kB"),
        ("--to", "ranks", "--tp-out", 4, "--pp-out", 2),
        ("--to", "ranks", "--tp-out", 2, "--fuse"),
        ("--to", "vllm", "--tp-out", 2),
        ("--to", "trtllm", "--tp-out", 2),
        ("--to", "unified", "--tp-out", 2),
        ("--to", "flex"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_the_same_for_every_form(options: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    reshard(model, tmp_path / "other", *options)
    assert total(tmp_path / "other") == total(model) == by_hand(llama())


@pytest.mark.parametrize(
    "change",
    [
        {"model.norm.weight": Raw("BF16", np.arange(16, dtype=np.uint16))},
        {"model.norm.weight": Raw("F16", llama()["model.norm.weight"].bits)},
        {EMBED: Raw("BF16", llama()[EMBED].bits.reshape(16, 32))},
        {"more.weight": origin(0, "BF16", (1,))},
    ],
    ids=["value", "dtype", "shape", "name"],
)
def test_another_content_has_another_digest(change: Tensors, model: Path, tmp_path: Path) -> None:
    other = llama() | change
    assert total(save_hf(tmp_path, other, CONFIG)) == by_hand(other) != total(model)


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    twice = llama() | {HEAD: llama()[EMBED]}
    once = {n: t for n, t in twice.items() if n != HEAD}
    save_hf(tmp_path / "twice", twice, config)
    save_hf(tmp_path / "once", once, config)
    reshard(tmp_path / "once", tmp_path / "vllm", "--to", "vllm", "--tp-out", 2)
    found = {total(tmp_path / form) for form in ("twice", "once", "vllm")}
    assert found == {by_hand(once)}


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = {"a": Raw("F32", np.zeros((0, 4), np.uint32)), "b": origin(3, "F32", ()), "c": origin(1, "U8", (5,))}
    assert total(save_hf(tmp_path, tensors, {})) == by_hand(tensors)


@pytest.mark.thorough  # the same of digests: test_components
def test_the_state_of_training_counts_and_its_sharding_does_not(tmp_path: Path) -> None:
    reshard(ZCC, tmp_path / "zcc", "--to", "zcc", "--tp-out", 1, "--ep-out", 1, "--sharding-out", 4)
    everything = total(ZCC)
    assert total(tmp_path / "zcc") == everything
    reshard(ZCC, tmp_path / "unified", "--to", "unified")
    known = ("--only", "model", "--only", "optimizer", "--only", "master_weights")
    trained = total(ZCC, *known)
    assert total(tmp_path / "unified", *known) == trained
    assert len({everything, trained, total(ZCC, "--only", "model")}) == 3


def test_without_quiet_a_note_says_what_it_is_of(model: Path) -> None:
    done = ckpttool("inspect", model, "--hash", "--total")
    assert done.out.strip() == total(model)
    assert done.err.splitlines()[-1] == "note: the digest is of 21 tensors: model"


def test_json_has_the_lines(model: Path) -> None:
    answer = json.loads(ckpttool("inspect", model, "--hash", "--total", "--json").out)
    assert (answer["view"], answer["digest"]) == ("total", total(model))
    assert {t["name"]: tuple(t["shape"]) for t in answer["list"]} == {n: t.bits.shape for n, t in llama().items()}


@pytest.mark.parametrize(
    "wrong", [["--total"], ["--hash", "--total", "--stats"], ["--hash", "--total", "--filter", "*"]]
)
def test_questions_that_make_no_sense(wrong: list[str], model: Path) -> None:
    done = ckpttool("inspect", model, *wrong)
    assert (done.code, done.out) == (2, "")
    assert "--total" in done.err
