"""Where no quantized weight is left, config.json does not claim one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool

FP8 = Path(__file__).parents[2] / "fixtures/fp8/formats/deepseek_fp8"
CODED = ("*.mlp.up_proj.weight*", "*.kv_a_proj_with_mqa.weight*", "*.mlp.odd_proj.weight*")


@pytest.mark.parametrize("command", ["reshard", "drop-keys"])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_config_after_removing_quantized_weights(command: str, *, all_of_them: bool, tmp_path: Path) -> None:
    source = shutil.copytree(FP8, tmp_path / "src")
    (source / "hf_quant_config.json").unlink(missing_ok=True)
    patterns = CODED if all_of_them else CODED[1:]
    words = patterns if command == "drop-keys" else [w for p in patterns for w in ("--remove-keys", p)]
    done = ckpttool(command, source, tmp_path / "out", *words, merged=True)
    assert done.code == 0, done.out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ("quantization_config" in config) is not all_of_them
    assert ("no quantized weights are left" in done.out) is all_of_them
