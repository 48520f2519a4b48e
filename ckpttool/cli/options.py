"""Options that several commands have; those of a single command stand in its file.

readable=False leaves the check of a path, and its error, to the code that reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices
from ckpttool.words import either

# What is read, and how it is cut.
Src = Annotated[
    Path, typer.Argument(metavar="SRC", readable=False, help="Directory or file to read.", show_default=False)
]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help=f"Format of SRC: {', '.join(choices.FORMATS)}, pdparams.",
        show_default=False,
        autocompletion=choices.completes(*choices.FORMATS, "pdparams"),
    ),
]
Tp = Annotated[
    int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor-parallel ranks of SRC.", show_default=False)
]
Pp = Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Pipeline stages of SRC.", show_default=False)]
Ep = Annotated[
    int | None, typer.Option("--ep", metavar="N", min=1, help="Expert-parallel ranks of SRC.", show_default=False)
]
Etp = Annotated[
    int | None,
    typer.Option("--etp", metavar="N", min=1, help="Expert-tensor-parallel ranks of SRC.", show_default=False),
]
Sharding = Annotated[
    int | None,
    typer.Option(
        "--sharding", metavar="N", min=1, help="Ranks that share the optimizer state of SRC.", show_default=False
    ),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(
        "--also", metavar="DIR", help="A further directory of SRC, saved by another node.", show_default=False
    ),
]
RankPattern = Annotated[
    str,
    typer.Option(
        "--rank-pattern",
        metavar="PATTERN",
        help="File-name pattern of others' rank files: 'model_{rank}.safetensors', 'tp{tp}/pp{pp}.safetensors'.",
        show_default=False,
    ),
]
FamilyName = Annotated[
    str,
    typer.Option(
        "--family",
        metavar="NAME|FILE",
        help="Layout rules, when config.json does not name them.",
        show_default=False,
        autocompletion=choices.families,
    ),
]
Replicate = Annotated[
    list[str] | None,
    typer.Option("--replicate", metavar="PATTERN", help="These tensors are whole on every rank.", show_default=False),
]
Split = Annotated[
    list[str] | None,
    typer.Option("--split", metavar="PATTERN=AXIS", help="These tensors are cut evenly on AXIS.", show_default=False),
]

# What is written, and how it is cut.
Dst = Annotated[
    Path, typer.Argument(metavar="DST", readable=False, help="Directory to write; must not exist.", show_default=False)
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help=f"Format of DST: {', '.join(choices.FORMATS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.FORMATS),
    ),
]
PaddleTarget = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="VERSION",
        help=f"Software version that will load DST: {', '.join(choices.TARGETS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.TARGETS),
    ),
]
TpOut = Annotated[
    int | None, typer.Option("--tp-out", metavar="N", min=1, help="Tensor-parallel ranks of DST.", show_default=False)
]
PpOut = Annotated[
    int | None, typer.Option("--pp-out", metavar="N", min=1, help="Pipeline stages of DST.", show_default=False)
]
EpOut = Annotated[
    int | None, typer.Option("--ep-out", metavar="N", min=1, help="Expert-parallel ranks of DST.", show_default=False)
]
EtpOut = Annotated[
    int | None,
    typer.Option(
        "--etp-out",
        metavar="N",
        min=1,
        help="Ranks that cut each expert; default: 1 with --ep-out, else tp.",
        show_default=False,
    ),
]
PpLayout = Annotated[
    str,
    typer.Option("--pp-layout", metavar="N,N,...", help="Layers of each pipeline stage of DST.", show_default=False),
]
RanksOut = Annotated[
    str, typer.Option("--ranks-out", metavar="0-3,7", help="Write only these ranks of DST.", show_default=False)
]
MaxShard = Annotated[
    str,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest file of --to hf and vllm; default: 5GB.",
        show_default=False,
    ),
]
VocabMultiple = Annotated[
    int, typer.Option("--vocab-multiple", min=1, metavar="N", help="Pad the vocabulary of cut embeddings to this.")
]

# Which tensors, and what becomes of them.
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="COMPONENT",
        help=f"Only this: {either(choices.COMPONENTS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.COMPONENTS),
    ),
]
RemoveKeys = Annotated[
    list[str] | None,
    typer.Option("--remove-keys", metavar="PATTERN", help="Leave these tensors out.", show_default=False),
]
KeepKeys = Annotated[
    list[str] | None,
    typer.Option("--keep-keys", metavar="PATTERN", help="Leave all other tensors out.", show_default=False),
]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="Rename; * on both sides, or re:OLD=NEW.", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"Cast floats to {either(choices.CASTS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.CASTS),
    ),
]
Dequant = Annotated[
    str,
    typer.Option(
        "--dequant",
        metavar="DTYPE",
        help=f"Quantised weights become {either(choices.PRECISIONS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.PRECISIONS),
    ),
]
Fuse = Annotated[bool, typer.Option("--fuse", help="Fuse what the family can fuse (qkv, gate_up).")]
Unfuse = Annotated[bool, typer.Option("--unfuse", help="Take fused tensors apart.")]

# How weights are quantised.
BlockSides = Annotated[
    str, typer.Option("--block", metavar="MxN", help="Elements per scale; default: 128x128.", show_default=False)
]
ScaleDtype = Annotated[
    str,
    typer.Option(
        "--scale-dtype",
        metavar="DTYPE",
        help="Scale dtype: f32, bf16 or e8m0 (powers of two).",
        show_default=False,
        autocompletion=choices.completes(*choices.SCALES),
    ),
]
QuantMethod = Annotated[
    str,
    typer.Option(
        "--quant-method",
        metavar="METHOD",
        help=f"Checkpoint convention to write: {either(choices.QUANT_METHODS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.QUANT_METHODS),
    ),
]
Edge = Annotated[
    str,
    typer.Option(
        "--edge",
        metavar="ceil|skip|error",
        help="Dimensions not divisible by the block: partly filled block, keep the weight, or refuse.",
        show_default=False,
        autocompletion=choices.completes(*choices.EDGES),
    ),
]
KeepHigh = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="PATTERN", help="Weights that stay in high precision.", show_default=False),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include", metavar="PATTERN", help="Weights that are quantised although others keep them.", show_default=False
    ),
]

# How a run goes.
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Print the plan and write nothing.")]
Force = Annotated[bool, typer.Option("-f", "--force", help="Replace DST when it exists.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read the output back and compare every element; exit 3 if not equal.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Threads that move bytes (default: 2 to 4), or processes that compute (default: one a core).",
        show_default=False,
    ),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory for all buffers together.")]
Manifest = Annotated[bool, typer.Option("--manifest", help="Write a checksum per tensor, for inspect --check.")]

# What is said.
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Suppress progress and notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Explain what was inferred.")]
