"""Files of several saves in one directory: what their bytes give away, where no header does.

``reshard`` says it in a note, ``inspect --check --values`` finds it.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ckpttool.containers.torch_zip import read_torch
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool, reshard

FIXTURES = Path("fixtures")
TWINS = "are identical: one may be a copy under the other's name"


def found(source: Path) -> dict[str, str]:
    """Identifier -> text of what the check finds in elements."""
    done = ckpttool("inspect", source, "--check", "--values", "--json")
    return {f["id"]: f["text"] for f in json.loads(done.out)["findings"]}


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("llama_tp8", "model_tp*.safetensors"),
        ("deepseek_v3_mp2", "model*-mp2.safetensors"),
        ("torch/deepspeed/z3", "global_step3/*_optim_states.pt"),
        ("megatron/legacy/qwen3_tp2_plain", "iter_0000005/*/model_optim_rng.pt"),
        ("bytecheckpoint/fsdp2", "model/__*.distcp"),
        ("paddle_zcc/nlp_tp2", "model_state.tp*.pdparams"),
    ],
)
def test_the_file_of_a_rank_under_the_name_of_another(source: str, files: str, tmp_path: Path) -> None:
    there = tmp_path / "save"
    shutil.copytree(FIXTURES / source, there)
    to = ("--to", "hf") if "llama" in source or "deepseek_v3" in source else ("--to", "torch-bin")
    assert TWINS not in reshard(there, tmp_path / "before", *to).err
    assert "files-equal" not in found(there)
    tried = 0
    for one, other in pairwise(sorted(there.glob(files))):
        kept = other.read_bytes()
        shutil.copy(one, other)
        done = ckpttool("reshard", there, tmp_path / f"after{tried}", *to)
        assert done.code or TWINS in done.err, other
        assert done.code or TWINS in found(there)["files-equal"]
        tried += not done.code
        other.write_bytes(kept)
    assert tried


def test_equal_files_of_constants_are_no_copies(tmp_path: Path) -> None:
    """Moments of zeros and norms of ones are the same on every rank, and whole tensors in files of their own."""
    (tmp_path / "save").mkdir()
    for rank in range(2):
        tensors = {
            "model.layers.0.self_attn.o_proj.weight": tensorfile.Raw("F32", np.zeros((8, 4), "<u4")),
            "model.layers.0.self_attn.q_proj.weight": tensorfile.Raw("F32", np.full((4, 8), 0x3F800000, "<u4")),
        }
        tensorfile.write(tmp_path / f"save/model_tp{rank}.safetensors", tensors)
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
    (tmp_path / "save/config.json").write_text(json.dumps(config))
    assert TWINS not in reshard(tmp_path / "save", tmp_path / "out", "--to", "ranks", "--tp-out", 1).err


def test_steps_that_differ(tmp_path: Path) -> None:
    """A parameter that counts another number of steps, as where the chunks of a rank are of another save."""
    there = tmp_path / "save"
    said = reshard(FIXTURES / "torch_fsdp/uneven", there, "--to", "ranks", "--tp-out", 1).err
    assert "the optimizer has taken" not in said
    (path,) = there.glob("*.safetensors")
    tensors = tensorfile.read(path)
    assert "steps-differ" not in found(there)
    (changed, *_) = (n for n in tensors if n.endswith("/step"))
    tensors[changed] = tensorfile.Raw("F32", np.array(3, "<f4").view("<u4"))
    tensorfile.write(path, tensors, tensorfile.header(path)["__metadata__"])
    said = "the optimizer has taken 2 steps with 6 parameters"
    for n, options in enumerate((("--to", "dcp"), ("--to", "hf"))):
        err = reshard(there, tmp_path / f"out{n}", *options).err
        assert said in err
        assert "3 with 1 (embed.weight)" in err
    assert said in found(there)["steps-differ"]


def test_masters_of_another_save(tmp_path: Path) -> None:
    """Model weights are masters rounded to nearest, or the two are of different saves."""
    there = tmp_path / "save"
    shutil.copytree(FIXTURES / "torch/deepspeed/z1", there)
    assert "masters-differ" not in found(there)
    (path,) = there.glob("global_step3/mp_rank_00_model_states.pt")
    file = read_torch(path)
    stored = file.place(file.value["module"]["head.weight"], "head.weight", 0)
    data = bytearray(path.read_bytes())
    data[stored.offset] ^= 1
    path.write_bytes(data)
    assert "`head.weight` is not its master weight rounded to BF16: 1 of 91" in found(there)["masters-differ"]


def test_checksums_of_files_of_torch(tmp_path: Path) -> None:
    """The CRC-32 that each member of the zip has, which torch.load does not look at."""
    there = tmp_path / "save"
    shutil.copytree(FIXTURES / "torch/sharded", there)
    assert "member-checksum" not in found(there)
    for path in sorted(there.glob("*.bin")):
        kept = path.read_bytes()
        file = read_torch(path)
        name, tensor = next(iter(file.value.items()))
        data = bytearray(kept)
        data[file.place(tensor, name, 0).offset + 1] ^= 1
        path.write_bytes(data)
        said = found(there)["member-checksum"]
        assert said.startswith(f"`{path.stem}/data/") or "/data/" in said, said
        assert "CRC-32" in said
        path.write_bytes(kept)
