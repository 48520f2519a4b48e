"""What quantize says it did, before anything else."""

from __future__ import annotations

from pathlib import Path

from ckpttool.quant.keep import kept_words
from tests.helpers.command import ckpttool

TINY = Path(__file__).parents[2] / "fixtures" / "hf_tiny_source"


def test_the_summary_counts_weights_bytes_and_what_was_kept(tmp_path: Path) -> None:
    done = ckpttool("quantize", TINY, tmp_path / "dst", "--recipe", "channel", "--keep", "*q_proj*")
    before = sum(f.stat().st_size for f in TINY.glob("*.safetensors")) / 1000
    after = sum(f.stat().st_size for f in (tmp_path / "dst").iterdir()) / 1000
    quantized, kept, *_ = done.err.splitlines()
    assert quantized == f"12 weights quantized (channel, BF16 scales); files: {before:.2f} kB -> {after:.2f} kB"
    assert kept == "9 tensors kept in high precision: 5 vectors, 2 by preset, 2 by --keep"


def test_reasons_in_words() -> None:
    said = kept_words({"vector": 1, "no Linear": 2, "source": 3, "empty": 1, "config": 4})
    assert said == (
        "11 tensors kept in high precision: 4 by config, 3 as in the source, 2 not Linear, 1 vector, 1 empty"
    )
