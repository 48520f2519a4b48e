"""What an installed ckpttool must be able to do: run by the interpreter of an environment that has nothing else.

`python jobs.py FIXTURES`, in an empty directory. It imports the standard library and what was installed; the command is
the one beside the interpreter. Ends with an AssertionError at the first thing that does not work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

COMMAND = Path(sys.executable).with_name("ckpttool")
LLAMA, MERGE = "llama_tp8", "merge/inputs"
SOURCES = {
    **dict.fromkeys(("ranks", "vllm", "trtllm", "unified", "hybrid", "flex"), LLAMA),
    **dict.fromkeys(("hf", "torch-bin", "dcp", "megatron-dist", "megatron"), LLAMA),
    "deepseek": "deepseek_v3",
    "meta": f"{MERGE}/base",
    "program": "paddle_programs/pir",
    "universal": "torch/deepspeed/z1",
    "zcc": "paddle_zcc/ep2_tp2_sharding2_ema",
}
"""For each format that is written, a fixture that it can hold."""
NEEDS_TORCH = "needs a package that is not installed: torch\n\nhint: pip install 'ckpttool[torch]'"


def ran(*words: object, code: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run the command. Returns what it printed, both streams; fails when it ends with another exit code."""
    done = subprocess.run(
        [COMMAND, *map(str, words)],
        env={"PATH": os.defpath, "HOME": str(Path.cwd()), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    line = " ".join(map(str, words))
    assert done.returncode == code, f"ckpttool {line}: exit {done.returncode}\n{done.stdout}"
    assert "Warning" not in done.stdout, f"ckpttool {line}\n{done.stdout}"
    return done.stdout


def written_formats(fixtures: Path) -> None:
    """Every format is written and verified."""
    from ckpttool.cli.choices import FORMATS

    assert set(SOURCES) == set(FORMATS), "add the new format to SOURCES"
    for name, source in SOURCES.items():
        ran("reshard", fixtures / source, name, "--to", name, "--verify", "--quiet")
        ran("inspect", name, "--check")
    ran("reshard", fixtures / LLAMA, "tp2", "--tp-out", 2, "--verify", "--manifest")
    assert "0 errors, 0 warnings" in ran("inspect", "tp2", "--check", "--values")
    ran("inspect", "tp2", "--diff", "hf", "--values")
    ran("drop-keys", "hf", "smaller", "model.norm.weight")


def merges(fixtures: Path) -> None:
    """Means, draws of both kinds, and what sorts as torch does."""
    one, two, base = (fixtures / MERGE / name for name in ("ft1", "ft2", "base"))
    ran("merge", one, two, "--weights", "0.6,0.4", "-o", "mean")
    task = ("--method", "dare_ties", "--weights", "1,1", "--param", "density=0.5", "--base", base, "--seed", 7)
    ran("merge", one, two, "-o", "drawn", *task)
    ran("merge", one, two, "-o", "as-mergekit", *task, "--rng", "mergekit")
    models = ", ".join(f"{{model: {m}, parameters: {{weight: 0.5, density: 0.5}}}}" for m in (one, two))
    for dtype in ("bfloat16", "float32"):
        recipe = Path(f"{dtype}.yml")
        text = f"models: [{models}]\nbase_model: {base}\nmerge_method: della\ndtype: {dtype}\n"
        recipe.write_text(text, encoding="utf-8")
        ran("merge", recipe, "-o", f"della-{dtype}")
        lacks = dtype == "float32" and not find_spec("torch")
        said = ran("merge", recipe, "-o", f"{dtype}-as-mergekit", "--rng", "mergekit", code=2 if lacks else 0)
        assert (NEEDS_TORCH in said) == lacks, said
    ran("inspect", "mean", "--stats", "--hist")
    ran("inspect", "mean", "--diff", one, "--values", "--json", code=3)


def quantized() -> None:
    """There and back."""
    for recipe in ("block", "nvfp4"):
        ran("quantize", "hf", recipe, "--recipe", recipe, "--verify")
    ran("quantize", "block", "wide", "--to", "bf16", "--verify")
    ran("size", "hf", "--recipe", "bf16", "--tp-out", 2, "--kv", "fp8", "--tokens", "32k")
    ran("reshard", "hf", "requant", "--requant", "channel", "--tp-out", 2, "--to", "vllm", "--verify")


def programs(fixtures: Path) -> None:
    """Paddle's programs, which are read with protobuf."""
    ran("convert-json", fixtures / "paddle_programs/pir/model.json", "pir.safetensors")
    ran("convert-json", "pir.safetensors", "again", "--program", fixtures / "paddle_programs/pir/model.json")
    for name in sorted(p.name for p in (fixtures / "paddle_programs/legacy").glob("*.pdmodel")):
        ran("convert-json", "--check", fixtures / "paddle_programs/legacy" / name)


def python_api(fixtures: Path) -> None:
    """Arrays, a plan that is run, and torch tensors where there is torch."""
    import numpy as np

    import ckpttool
    from ckpttool.errors import UsageError

    with ckpttool.open(fixtures / LLAMA) as source:
        norm = source.read("model.norm.weight")
        assert norm.shape == (64,), norm.shape
        assert str(norm.dtype) == "bfloat16", norm.dtype
        assert source.reshard(tp=2).run("from-python", verify=True).verified
        if find_spec("torch"):
            assert np.array_equal(source.torch("model.norm.weight").float().numpy(), norm.astype(np.float32))
        else:
            said = ""
            try:
                source.torch("model.norm.weight")
            except UsageError as e:
                said = e.render()
            assert NEEDS_TORCH in said, said
    assert ckpttool.check("from-python").ok
    assert ckpttool.diff(fixtures / LLAMA, "from-python").ok


def shell() -> None:
    """Help, completion, and the files that lie beside the package."""
    assert ran("--version").startswith("ckpttool ")
    assert "--tp-out" in ran("reshard", "--help")
    asked = {"_CKPTTOOL_COMPLETE": "complete_bash", "COMP_WORDS": "ckpttool reshard --to h", "COMP_CWORD": "3"}
    assert ran(environment=asked).split() == ["hf", "hybrid"]
    record = ran("inspect", "hf", "--json")
    assert json.loads(record)
    shared = {p.locate() for p in files("ckpttool") or () if "share" in p.parts}
    assert all(Path(str(p)).is_file() for p in shared)


def shown(fixtures: Path) -> None:
    """Pages and texts, which are data of the package."""
    one, two = (fixtures / MERGE / name for name in ("ft1", "ft2"))
    ran("inspect", one, "--html", "report.html", "--stats")
    ran("merge", one, two, "-o", "reported", "--report", "merged.html", "--card")
    for name in ("report.html", "merged.html"):
        assert Path(name).read_text(encoding="utf-8").startswith("<!doctype html>"), name
    ran("inspect", fixtures / LLAMA, "--ranks", "--svg", "ranks.svg")
    ran("doctor", ".")
    assert len(ran("explain", "usage")) > 100


def elsewhere() -> None:
    """Other machines: what is not installed is named."""
    if not find_spec("boto3"):
        assert "hint: pip install 'ckpttool[remote]'" in ran("inspect", "s3://bucket/model", code=2)
    said = ran("inspect", "hf://org/model", environment={"HF_HOME": "hub", "HF_HUB_OFFLINE": "1"}, code=1)
    assert "not installed" not in said, said


def main() -> None:
    """All of it."""
    fixtures = Path(sys.argv[1]).resolve()
    written_formats(fixtures)
    merges(fixtures)
    quantized()
    programs(fixtures)
    python_api(fixtures)
    shell()
    shown(fixtures)
    elsewhere()


if __name__ == "__main__":
    main()
