"""The commands that are tortured: one for each way in which ckpttool writes files.

A scenario works in a directory of its own (``{w}``) and reads sources (``{s}``, copies of the fixtures) that nothing
may change. ``before`` makes what lies there at the start: an old destination, a file to edit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"

SOURCES = (
    "llama_tp8",
    "hf_tiny_source",
    "deepseek_v3",
    "merge/inputs/ft1",
    "merge/inputs/ft2",
    "merge/inputs/tokA",
    "merge/inputs/tokB",
    "paddle_unified/nlp_llama_bf16_tp2_ignore_merge",
    "paddle_unified/nlp_llama_bf16_tp2_quantO1",
    "paddle_zcc/nlp_tp2",
    "paddle_pickles/model_proto2.pdparams",
    "paddle_programs/pir",
    "paddle_programs/nan_attr",
    "dcp/uneven/checkpoint",
    "torch/deepspeed/z3",
    "torch/deepspeed/universal_z1",
    "torch_fsdp/uneven",
    "bytecheckpoint/fsdp2",
    "torch/train",
)


def nothing(work: Path, sources: Path) -> None:
    """The work directory is empty at the start."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command line, what it finds, and what it may leave."""

    name: str
    command: str
    """Its words; ``--workers 1`` is added where there is such an option."""
    before: Callable[[Path, Path], None] = nothing
    """Makes what lies in the work directory at the start."""
    targets: tuple[str, ...] = ("dst",)
    """Names in the work directory that are, at any moment, as before or complete."""
    resumes: bool = True
    """The command has --resume."""
    forces: bool = False
    """One without --resume has --force."""
    exchange: bool = True
    """The filesystem can exchange two names."""
    uncached: bool = True
    """It takes writes past the page cache; without, the policy is write-behind."""
    edits: str = ""
    """A file that is edited in place: while FILE.header-backup is there, it may be anything."""

    @property
    def prepared(self) -> bool:
        """Something lies in the work directory at the start."""
        return self.before is not nothing

    def words(self, work: Path, sources: Path) -> list[str]:
        workers = ["--workers", "1"] if self.resumes else []
        return [w.format(w=work, s=sources) for w in self.command.split()] + workers


def prepare(sources: Path) -> None:
    """Copy the fixtures that are read."""
    for name in SOURCES:
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (FIXTURES / name).is_dir():
            shutil.copytree(FIXTURES / name, target, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(FIXTURES / name, target)
    models = "".join(f"- {{model: {sources}/merge/inputs/{m}, parameters: {{weight: 1}}}}\n" for m in ("tokA", "tokB"))
    for name in ("1_Pooling/config.json", "assets/inner/notes.txt"):
        path = sources / "merge/inputs/ft2" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    (sources / "tokenizers.yml").write_text(
        f"merge_method: linear\nmodels:\n{models}tokenizer: {{source: union}}\ndtype: float32\n"
    )


def _old(w: Path, _: Path) -> None:
    (w / "dst/inner").mkdir(parents=True)
    (w / "dst/model.safetensors").write_bytes(b"old" * 100)
    (w / "dst/inner/more").write_text("old")


def _old_file(w: Path, _: Path) -> None:
    (w / "dst.safetensors").write_bytes(b"old" * 100)


def _shards(w: Path, s: Path) -> None:
    (w / "m").mkdir()
    for f in sorted((s / "merge/inputs/ft1").glob("*.safetensors")):
        shutil.copyfile(f, w / "m" / f.name)


def _stale_index(w: Path, s: Path) -> None:
    _shards(w, s)
    (w / "m/model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')


def _editable(longer: bool) -> Callable[[Path, Path], None]:
    def make(w: Path, s: Path) -> None:
        path = w / "m.safetensors"
        shutil.copyfile(s / "merge/inputs/ft2/model.safetensors", path)
        raw = path.read_bytes()
        head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        meta = head.setdefault("__metadata__", {})
        meta["format"] = "pt" * 200 if longer else "np"
        (w / "edited.json").write_text(json.dumps(head))

    return make


_UNIFIED = "{s}/paddle_unified/nlp_llama_bf16_tp2"
_PROGRAMS = "{s}/paddle_programs"

SCENARIOS = (
    Scenario("reshard ranks", "reshard {s}/llama_tp8 {w}/dst --tp-out 2 --manifest"),
    Scenario(
        "reshard hf, --verify",
        "reshard {s}/hf_tiny_source {w}/dst --to hf --max-shard-size 90000 --verify",
        uncached=False,
    ),
    Scenario("reshard --to deepseek", "reshard {s}/deepseek_v3 {w}/dst --to deepseek --tp-out 2"),
    Scenario("reshard --to vllm", "reshard {s}/hf_tiny_source {w}/dst --to vllm --tp-out 2"),
    Scenario("reshard --to trtllm", "reshard {s}/hf_tiny_source {w}/dst --to trtllm --tp-out 2", uncached=False),
    Scenario("reshard --to unified", f"reshard {_UNIFIED}_ignore_merge {{w}}/dst --to unified"),
    Scenario(
        "reshard --to hybrid", f"reshard {_UNIFIED}_ignore_merge {{w}}/dst --to hybrid --tp-out 2 --sharding-out 2"
    ),
    Scenario("reshard --to zcc", "reshard {s}/paddle_zcc/nlp_tp2 {w}/dst --to zcc --tp-out 2 --sharding-out 2"),
    Scenario("reshard --to flex", "reshard {s}/paddle_zcc/nlp_tp2 {w}/dst --to flex --tp-out 2 --sharding-out 2"),
    Scenario("reshard --to dcp", "reshard {s}/dcp/uneven/checkpoint {w}/dst --to dcp --sharding-out 2"),
    Scenario("reshard --to universal", "reshard {s}/torch/deepspeed/z3 {w}/dst --to universal"),
    Scenario("reshard --to meta", "reshard {s}/hf_tiny_source {w}/dst --to meta --tp-out 1"),
    Scenario("reshard --to flex, of torch's", "reshard {s}/torch/deepspeed/universal_z1 {w}/dst --to flex"),
    Scenario("reshard --to hybrid, of torch's", "reshard {s}/torch_fsdp/uneven {w}/dst --to hybrid --sharding-out 2"),
    Scenario("reshard --to unified, of torch's", "reshard {s}/bytecheckpoint/fsdp2 {w}/dst --to unified"),
    Scenario("reshard --to torch-bin", "reshard {s}/torch/train {w}/dst --to torch-bin"),
    Scenario("reshard --to program", f"reshard {_PROGRAMS}/pir/model.json {{w}}/dst --to program"),
    Scenario("reshard, scratch", "reshard {s}/paddle_pickles/model_proto2.pdparams {w}/dst --to hf"),
    Scenario("reshard, quantized moments", f"reshard {_UNIFIED}_quantO1 {{w}}/dst --to unified --tp-out 1"),
    Scenario("reshard --force", "reshard {s}/hf_tiny_source {w}/dst --tp-out 2 --force", _old),
    Scenario(
        "reshard --force, no exchange",
        "reshard {s}/hf_tiny_source {w}/dst --force",
        _old,
        exchange=False,
        uncached=False,
    ),
    Scenario("drop-keys", "drop-keys {s}/merge/inputs/ft1 {w}/dst *.0.mlp.*"),
    Scenario("drop-keys --link", "drop-keys {s}/merge/inputs/ft1 {w}/dst lm_head.* --link --manifest"),
    Scenario("drop-keys, subdirectories", "drop-keys {s}/merge/inputs/ft2 {w}/dst *.0.mlp.*"),
    Scenario("quantize", "quantize {s}/hf_tiny_source {w}/dst --block 32x32 --manifest"),
    Scenario(
        "merge",
        "merge {s}/merge/inputs/ft1 {s}/merge/inputs/ft2 --weights 0.6,0.4 -o {w}/dst --card --manifest",
    ),
    Scenario("merge, two vocabularies", "merge {s}/tokenizers.yml -o {w}/dst"),
    Scenario(
        "convert-json", f"convert-json {_PROGRAMS}/pir/model.json {{w}}/dst.safetensors", targets=("dst.safetensors",)
    ),
    Scenario(
        "convert-json --force",
        f"convert-json {_PROGRAMS}/pir/model.json {{w}}/dst.safetensors --force",
        _old_file,
        targets=("dst.safetensors",),
    ),
    Scenario("convert-json, shards", f"convert-json {_PROGRAMS}/pir/model.json {{w}}/dst --max-shard-size 800"),
    Scenario(
        "convert-json --program",
        f"convert-json {{s}}/pir.safetensors {{w}}/dst --program {_PROGRAMS}/pir/model.json",
    ),
    Scenario(
        "convert-json --fix",
        f"convert-json {_PROGRAMS}/nan_attr/model.json --fix {{w}}/fixed.json",
        targets=("fixed.json",),
        resumes=False,
        forces=True,
    ),
    Scenario(
        "inspect --write-index",
        "inspect {w}/m --write-index",
        _stale_index,
        targets=("m/model.safetensors.index.json",),
        resumes=False,
    ),
    Scenario(
        "inspect --set-header, in place",
        "inspect {w}/m.safetensors --set-header {w}/edited.json",
        _editable(longer=False),
        targets=("m.safetensors",),
        resumes=False,
        edits="m.safetensors",
    ),
    Scenario(
        "inspect --set-header, copied",
        "inspect {w}/m.safetensors --set-header {w}/edited.json",
        _editable(longer=True),
        targets=("m.safetensors",),
        resumes=False,
    ),
)
