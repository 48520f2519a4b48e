"""The command line: options and help only. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ckpttool import __version__
from ckpttool.errors import CkptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.checkpoint import OpenOptions
    from ckpttool.execute import RunOptions
    from ckpttool.ops.recode import Recoding
    from ckpttool.ops.reshard import Target


class _Commands(TyperGroup):
    """Ends every command alike: an expected failure is one clear error and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except CkptError as e:
            sys.stderr.write(e.render() + "\n")
            raise typer.Exit(e.exit_code) from None
        except KeyboardInterrupt as e:
            sys.stderr.write(f"{str(e) or 'interrupted'}\n")  # says how to go on when something was finished
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of our output is gone (`| head`); that is no failure. Keep Python from writing to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


app = typer.Typer(
    name="ckpttool",
    cls=_Commands,
    help="Reshard, merge and inspect checkpoints of large models, on one plain node, in bounded memory.",
    rich_markup_mode=None,  # rich costs more than the whole rest of --help
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

SOURCE = "Source"
TARGET = "Target"

# readable=False leaves the check, and its error, to the code that reads.
Src = Annotated[
    Path, typer.Argument(metavar="SRC", readable=False, help="Directory or file to read.", show_default=False)
]
Dst = Annotated[
    Path, typer.Argument(metavar="DST", readable=False, help="Directory to write; must not exist.", show_default=False)
]
FORMATS = "hf, ranks, deepseek, vllm, trtllm, unified, hybrid, zcc, flex"
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of SRC.", show_default=False)]
Pp = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages of SRC.", show_default=False)]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel ranks of SRC.", show_default=False)]
Etp = Annotated[
    int | None, typer.Option("--etp", min=1, help="Expert-tensor-parallel ranks of SRC.", show_default=False)
]
TpOut = Annotated[int | None, typer.Option("--tp-out", min=1, help="Tensor-parallel ranks of DST.", show_default=False)]
PpOut = Annotated[int | None, typer.Option("--pp-out", min=1, help="Pipeline stages of DST.", show_default=False)]
EpOut = Annotated[int | None, typer.Option("--ep-out", min=1, help="Expert-parallel ranks of DST.", show_default=False)]
EtpOut = Annotated[
    int | None,
    typer.Option("--etp-out", min=1, help="Expert-tensor-parallel ranks of DST; tp unless said.", show_default=False),
]
PpLayout = Annotated[
    str,
    typer.Option("--pp-layout", metavar="N,N,...", help="Layers of each pipeline stage of DST.", show_default=False),
]
RanksOut = Annotated[
    str, typer.Option("--ranks-out", metavar="0-3,7", help="Write only these ranks of DST.", show_default=False)
]
From = Annotated[
    str,
    typer.Option("--from", metavar="FORMAT", help=f"Format of SRC: {FORMATS}, pdparams.", show_default=False),
]
To = Annotated[
    str,
    typer.Option("--to", metavar="FORMAT", help=f"Format of DST: {FORMATS}.", show_default=False),
]
Sharding = Annotated[
    int | None,
    typer.Option("--sharding", min=1, help="Ranks that share the optimizer state of SRC.", show_default=False),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(
        "--also", metavar="DIR", help="A further directory of SRC, saved by another node.", show_default=False
    ),
]
ShardingOut = Annotated[
    int | None,
    typer.Option("--sharding-out", min=1, help="Ranks that share the optimizer state of DST.", show_default=False),
]
ShardingVersion = Annotated[
    str,
    typer.Option(
        "--sharding-version", metavar="v1|v2", help="How --sharding-out shares: v2 unless said.", show_default=False
    ),
]
PaddleTarget = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="VERSION",
        help="Reader of DST: paddlenlp-3.0, paddleformers-0.4, paddleformers-1.2.",
        show_default=False,
    ),
]
NativeNames = Annotated[
    bool, typer.Option("--native-names", help="Names as --target's own models have them, not those of SRC.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="COMPONENT",
        help="Only this: model, adapter, master_weights, optimizer or ema.",
        show_default=False,
    ),
]
Ema = Annotated[bool, typer.Option("--ema", help="Write the exponential moving average as the model.")]
Aoa = Annotated[
    Path | None,
    typer.Option("--aoa", metavar="FILE", help="Names and shapes by Paddle's AOA statements.", show_default=False),
]
RankPattern = Annotated[
    str,
    typer.Option(
        "--rank-pattern",
        metavar="PATTERN",
        help="Names of anyone's rank files: 'model_{rank}.safetensors', 'tp{tp}/pp{pp}.safetensors'.",
        show_default=False,
    ),
]
FamilyName = Annotated[
    str,
    typer.Option(
        "--family", metavar="NAME|FILE", help="Layout rules, when config.json does not name them.", show_default=False
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
    str, typer.Option("--dtype", metavar="DTYPE", help="Cast floats to f64, f32, f16 or bf16.", show_default=False)
]
Fuse = Annotated[bool, typer.Option("--fuse", help="Fuse what the family can fuse (qkv, gate_up).")]
Unfuse = Annotated[bool, typer.Option("--unfuse", help="Take fused tensors apart.")]
MaxShard = Annotated[
    str,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest file of --to hf and vllm; 5GB unless said.",
        show_default=False,
    ),
]
VocabMultiple = Annotated[
    int, typer.Option("--vocab-multiple", min=1, metavar="N", help="Pad the vocabulary of cut embeddings to this.")
]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Print the plan and write nothing.")]
Force = Annotated[bool, typer.Option("-f", "--force", help="Replace DST when it exists.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read the output back and compare every element; exit 3 if not equal.")
]
VerifyMerge = Annotated[
    bool,
    typer.Option("--verify", help="Merge once more and compare with what was written; exit 3 if not equal."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Threads that move bytes, processes that compute.", show_default=False),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory for all buffers together.")]
Manifest = Annotated[bool, typer.Option("--manifest", help="Write a checksum per tensor, for inspect --check.")]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Checkpoints (PATH or PATH+ADAPTER), or one recipe: mergekit's YAML or Paddle's merge_config.json.",
        show_default=False,
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="DST", readable=False, help="Directory to write; must not exist.", show_default=False
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method", metavar="NAME", help="Unless said, linear with --weights and average without.", show_default=False
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="W,W,...",
        help="One weight for each source, or for each adapter of a single one.",
        show_default=False,
    ),
]
Base = Annotated[
    str, typer.Option("--base", metavar="PATH", help="The model that the others started from.", show_default=False)
]
Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="A parameter of the method; NAME=A,B,... gives one value to each source.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of methods that draw random numbers.")]
Rng = Annotated[
    str,
    typer.Option(
        "--rng",
        metavar="STREAM",
        help="counter: reproducible whatever else is merged; mergekit: its draws, bit for bit.",
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        "--missing",
        metavar="base|skip",
        help="Tensors that not all sources have: take the base's, or leave them out.",
        show_default=False,
    ),
]
Vocab = Annotated[
    str,
    typer.Option(
        "--vocab",
        metavar="min|max|base",
        help="Rows of embeddings when the sources have different numbers of them.",
        show_default=False,
    ),
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Write NaN and infinities instead of refusing them.")
]
Card = Annotated[bool, typer.Option("--card", help="Add a section about the merge to README.md of DST.")]
Dequant = Annotated[
    str,
    typer.Option("--dequant", metavar="DTYPE", help="Quantised weights become bf16, f16 or f32.", show_default=False),
]
Requant = Annotated[
    str,
    typer.Option(
        "--requant",
        metavar="RECIPE[:MxN]",
        help="Weights are quantised anew, as fp8-cast does: channel, block:64x128.",
        show_default=False,
    ),
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe", metavar="RECIPE", help="tensor, channel, block, mxfp8, nvfp4 or mxfp4.", show_default=False
    ),
]
ToPrecision = Annotated[
    str,
    typer.Option("--to", metavar="DTYPE", help="Dequantise instead: bf16, f16 or f32.", show_default=False),
]
BlockSides = Annotated[
    str, typer.Option("--block", metavar="MxN", help="Elements per scale: 128x128 unless said.", show_default=False)
]
ScaleDtype = Annotated[
    str,
    typer.Option(
        "--scale-dtype", metavar="DTYPE", help="Of scales: f32, bf16 or e8m0 (powers of two).", show_default=False
    ),
]
QuantMethod = Annotated[
    str,
    typer.Option(
        "--quant-method",
        metavar="METHOD",
        help="Whose names: fp8, compressed-tensors, modelopt or fbgemm_fp8.",
        show_default=False,
    ),
]
CodeDtype = Annotated[str, typer.Option("--code", metavar="DTYPE", help="Of codes: e4m3 or e5m2.", show_default=False)]
PowersOfTwo = Annotated[bool, typer.Option("--pow2", help="Scales are powers of two, whatever their dtype.")]
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
KeepPreset = Annotated[
    str,
    typer.Option("--keep-preset", metavar="NAME", help="What stays: hf-default, deepseek, experts-only or none."),
]
Edge = Annotated[
    str,
    typer.Option(
        "--edge",
        metavar="ceil|skip|error",
        help="Sides that are no multiple of the block: a partly filled one, keep the weight, or refuse.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", readable=False, help="config.json of a SRC that has none.", show_default=False
    ),
]
SizeRecipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="as-is, bf16, tensor, channel, block, mxfp8, nvfp4 or mxfp4; block unless SRC is quantised.",
        show_default=False,
    ),
]
StaticAct = Annotated[bool, typer.Option("--static-act", help="One scale for the inputs of each weight, too.")]
SizePreset = Annotated[
    str,
    typer.Option(
        "--keep-preset",
        metavar="NAME",
        help="What stays: hf-default, deepseek, experts-only or none.",
        show_default=False,
    ),
]
NoMtp = Annotated[bool, typer.Option("--no-mtp", help="Without the multi-token-prediction layers.")]
VocabPad = Annotated[
    int | None,
    typer.Option(
        "--vocab-pad", min=1, metavar="N", help="Ranks pad the vocabulary to this; 64 unless said.", show_default=False
    ),
]
SizeEtpOut = Annotated[
    int | None,
    typer.Option(
        "--etp-out", min=1, help="Expert-tensor-parallel ranks; 1 with --ep-out, else tp.", show_default=False
    ),
]
KvDtype = Annotated[
    str,
    typer.Option("--kv", metavar="DTYPE", help="Add keys and values: bf16, fp8 or fp8_ds_mla.", show_default=False),
]
Tokens = Annotated[
    int | None, typer.Option("--tokens", min=1, metavar="N", help="Tokens of a sequence.", show_default=False)
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Sequences; 1 unless said.", show_default=False)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        metavar="N",
        help="Tokens that an engine reserves in every layer, whatever its window.",
        show_default=False,
    ),
]
Train = Annotated[bool, typer.Option("--train", help="What training holds instead of serving.")]
Zero = Annotated[
    int | None,
    typer.Option("--zero", min=0, max=3, help="Stage of ZeRO; 1 unless said.", show_default=False),
]
DataParallel = Annotated[
    int | None, typer.Option("--dp", min=1, metavar="N", help="Data-parallel ranks; 1 unless said.", show_default=False)
]
Grad = Annotated[
    str, typer.Option("--grad", metavar="DTYPE", help="Gradients: fp32 (unless said) or bf16.", show_default=False)
]
Master = Annotated[
    str, typer.Option("--master", metavar="DTYPE", help="Master weights: fp32 or none.", show_default=False)
]
Moment = Annotated[
    str, typer.Option("--moment", metavar="DTYPE", help="The two moments: fp32 or bf16.", show_default=False)
]
Fp8Transposed = Annotated[
    bool, typer.Option("--fp8-transposed", help="Codes are held a second time, for the backward pass.")
]
DeviceMem = Annotated[
    str,
    typer.Option(
        "--device-mem", metavar="SIZE", help="Memory of a device; exit 3 if it is not enough.", show_default=False
    ),
]
By = Annotated[str, typer.Option("--by", metavar="class|dtype|module|tensor", help="Rows of the table.")]
Unit = Annotated[
    str,
    typer.Option(
        "--unit", metavar="GB|GiB|B", help="Of sizes besides bytes; GB and GiB unless said.", show_default=False
    ),
]
CheckTotalSize = Annotated[
    bool, typer.Option("--check-total-size", help="Compare the index with the headers; exit 3 if they differ.")
]
Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATTERN...", help="Tensors to leave out: globs or re:REGEX.", show_default=False),
]
Link = Annotated[
    bool, typer.Option("--link", help="Reflink or hard-link files that do not change, instead of copying them.")
]
List = Annotated[bool, typer.Option("--list", help="One tensor a line.")]
Files = Annotated[bool, typer.Option("--files", help="One file a line.")]
Ranks = Annotated[bool, typer.Option("--ranks", help="Draw which rank holds which box of which tensor.")]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="With --ranks: write the picture to FILE, too.", show_default=False),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Min, max, mean, std, amax, NaN, Inf, zeros and saturated FP8 of each tensor.")
]
Hist = Annotated[bool, typer.Option("--hist", help="A histogram of each tensor.")]
Hash = Annotated[bool, typer.Option("--hash", help="A checksum of each whole tensor, the same for every sharding.")]
Show = Annotated[
    list[str] | None,
    typer.Option(
        "--show", metavar="NAME[INDEX]", help="Elements: 'a.weight[:8, -1]', as in numpy.", show_default=False
    ),
]
Metadata = Annotated[bool, typer.Option("--metadata", help="What the files' headers say besides tensors.")]
Check = Annotated[
    bool, typer.Option("--check", help="Look for problems, and prove a manifest's checksums; exit 3 on an error.")
]
Diff = Annotated[
    Path | None,
    typer.Option("--diff", metavar="OTHER", help="Compare with OTHER; exit 3 when they differ.", show_default=False),
]
Values = Annotated[bool, typer.Option("--values", help="With --diff and --check: read the elements, too.")]
Atol = Annotated[
    float | None,
    typer.Option("--atol", min=0, help="With --diff: absolute tolerance, dtypes may differ.", show_default=False),
]
Rtol = Annotated[
    float | None,
    typer.Option("--rtol", min=0, help="With --diff: tolerance relative to OTHER.", show_default=False),
]
Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="PATTERN", help="Only these tensors: a glob or re:REGEX.", show_default=False),
]
OfDtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="DTYPE", help="Only tensors of this dtype.", show_default=False),
]
MinSize = Annotated[
    str, typer.Option("--min-size", metavar="SIZE", help="Only tensors at least this large.", show_default=False)
]
Sort = Annotated[str, typer.Option("--sort", metavar="KEY", help="Order by name, size, offset or file.")]
Depth = Annotated[
    int | None, typer.Option("--depth", min=1, metavar="N", help="Levels of the tree.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but errors.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more about what was inferred.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reshard, merge and inspect checkpoints of large models, on one plain node, in bounded memory."""


def parse_size(text: str, option: str) -> int:
    """``5GB``, ``512MiB``, ``64M`` or a number of bytes. KB, MB, GB are powers of 1000; KiB, MiB, GiB of 1024."""
    import re

    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not m or (m[3] and not m[2]):
        raise UsageError(f"{option} `{text}` is not a size", hint="write 5GB, 512MiB or a number of bytes")
    value = int(float(m[1]) * (1024 if m[3] else 1000) ** " kmgt".index(m[2] or " "))
    if value < 1:
        raise UsageError(f"{option} must be positive")
    return value


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """``10,11,11`` or ``0-3,7``."""
    out: list[int] = []
    try:
        for item in text.split(","):
            first, dash, last = item.partition("-")
            numbers = range(int(first), int(last) + 1) if dash else [int(first)]
            if not numbers:
                raise ValueError  # 3-0
            out += numbers
    except ValueError:
        raise UsageError(f"{option} `{text}` is not a list of numbers", hint="for example 0-3,7") from None
    return tuple(out)


def _open_options(
    *,
    fmt: str,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    etp: int | None,
    rank_pattern: str,
    family: str,
    replicate: list[str] | None,
    split: list[str] | None,
    sharding: int | None = None,
    also: list[Path] | None = None,
) -> OpenOptions:
    from ckpttool.formats.base import OpenOptions, ReadOptions

    mesh = ReadOptions(tp, pp, ep, etp, (), rank_pattern, sharding, tuple(also or ()))
    return OpenOptions(fmt, mesh, family, tuple(replicate or ()), tuple(split or ()))


def _high(dtype: str, option: str) -> str:
    """A dtype for dequantised weights, as the table has it."""
    from ckpttool.ops.recode import high

    return high(dtype, option) if dtype else ""


def _sides(text: str, option: str) -> tuple[int, int] | None:
    """``128x128``."""
    if not text:
        return None
    rows, cross, columns = text.lower().partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise UsageError(f"{option} `{text}` is not MxN", hint="for example 128x128")
    return int(rows), int(columns)


def _recoding(dequant: str, requant: str) -> Recoding | None:
    from ckpttool.ops.recode import Recoding
    from ckpttool.quant.scheme import scheme

    if dequant and requant:
        raise UsageError("--dequant and --requant exclude each other")
    if requant:
        recipe, colon, block = requant.partition(":")
        if colon and not block:
            raise UsageError(f"--requant `{requant}` has no block behind its colon", hint="--requant block:64x128")
        return Recoding(scheme(recipe, block=_sides(block, "--requant")), like_source=True)
    return Recoding(None, _high(dequant, "--dequant")) if dequant else None


def _target(
    *,
    to: str,
    tp_out: int | None,
    pp_out: int | None,
    ep_out: int | None,
    etp_out: int | None,
    pp_layout: str,
    ranks_out: str,
    max_shard_size: str,
    dtype: str,
    fuse: bool,
    unfuse: bool,
    vocab_multiple: int,
    sharding_out: int | None = None,
    sharding_version: str = "",
    version: str = "",
    only: list[str] | None = None,
    ema: bool = False,
    native_names: bool = False,
    aoa: Path | None = None,
) -> Target:
    from ckpttool.ops.components import COMPONENTS
    from ckpttool.ops.reshard import Target

    return Target(
        format=to,
        tp=tp_out,
        pp=pp_out,
        ep=ep_out,
        etp=etp_out,
        pp_layout=_numbers(pp_layout, "--pp-layout") if pp_layout else (),
        ranks=_numbers(ranks_out, "--ranks-out") if ranks_out else None,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None,
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=vocab_multiple,
        sharding=sharding_out,
        sharding_version=_one_of(sharding_version, "--sharding-version", "v1", "v2"),
        version=version,
        components=tuple(_one_of(c, "--only", *COMPONENTS) for c in only or ()),
        ema=ema,
        native_names=native_names,
        aoa=aoa,
    )


def _one_of(value: str, option: str, *allowed: str) -> Any:
    """``value``, or "" when nothing was said. Raises UsageError for anything but ``allowed``."""
    if value and value not in allowed:
        raise UsageError(f"{option} `{value}` is not one of {', '.join(allowed)}")
    return value


def _run_options(*, memory: str, workers: int | None, force: bool, resume: bool, manifest: bool) -> RunOptions:
    from ckpttool.execute import RunOptions
    from ckpttool.execute.options import default_processes, default_workers

    size = parse_size(memory, "--memory")
    if size < 4 << 20:
        raise UsageError(f"--memory {memory} is too small", hint="4MiB is the least, 64MiB the default")
    return RunOptions(
        memory=size,
        workers=workers or default_workers(),
        processes=workers or default_processes(),
        force=force,
        resume=resume,
        manifest=manifest,
    )


@app.command()
def reshard(
    src: Src,
    dst: Dst,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    sharding: Sharding = None,
    also: Also = None,
    tp_out: TpOut = None,
    pp_out: PpOut = None,
    ep_out: EpOut = None,
    etp_out: EtpOut = None,
    pp_layout: PpLayout = "",
    sharding_out: ShardingOut = None,
    sharding_version: ShardingVersion = "",
    ranks_out: RanksOut = "",
    from_: From = "",
    to: To = "",
    version: PaddleTarget = "",
    native_names: NativeNames = False,
    only: Only = None,
    ema: Ema = False,
    aoa: Aoa = None,
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    replicate: Replicate = None,
    split: Split = None,
    remove_keys: RemoveKeys = None,
    keep_keys: KeepKeys = None,
    rename: Rename = None,
    dtype: Dtype = "",
    dequant: Dequant = "",
    requant: Requant = "",
    fuse: Fuse = False,
    unfuse: Unfuse = False,
    max_shard_size: MaxShard = "",
    vocab_multiple: VocabMultiple = 1,
    dry_run: DryRun = False,
    force: Force = False,
    resume: Resume = False,
    verify: Verify = False,
    workers: Workers = None,
    memory: Memory = "64MiB",
    manifest: Manifest = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write SRC for another number of ranks, in another format or under other names."""
    from ckpttool import report
    from ckpttool.ops.reshard import Selection, execute, prepare

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
        sharding=sharding,
        also=also,
    )
    target = _target(
        to=to,
        tp_out=tp_out,
        pp_out=pp_out,
        ep_out=ep_out,
        etp_out=etp_out,
        pp_layout=pp_layout,
        ranks_out=ranks_out,
        max_shard_size=max_shard_size,
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=vocab_multiple,
        sharding_out=sharding_out,
        sharding_version=sharding_version,
        version=version,
        only=only,
        ema=ema,
        native_names=native_names,
        aoa=aoa,
    )
    run = _run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()), tuple(rename or ()))
    prepared = prepare(src, opened, target, selection, _recoding(dequant, requant))
    if dry_run:
        report.show_plan(prepared, run, as_json=json)
        return
    result = execute(prepared, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_reshard(result, as_json=json, quiet=quiet, verbose=verbose)


@app.command()
def merge(
    sources: Sources,
    output: Output,
    method: MethodName = "",
    weights: Weights = "",
    base: Base = "",
    param: Param = None,
    seed: Seed = 0,
    rng: Rng = "counter",
    missing: Missing = "",
    vocab: Vocab = "",
    allow_nonfinite: AllowNonfinite = False,
    card: Card = False,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    tp_out: TpOut = None,
    pp_out: PpOut = None,
    ep_out: EpOut = None,
    etp_out: EtpOut = None,
    pp_layout: PpLayout = "",
    ranks_out: RanksOut = "",
    from_: From = "",
    to: To = "",
    version: PaddleTarget = "",
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    replicate: Replicate = None,
    split: Split = None,
    remove_keys: RemoveKeys = None,
    keep_keys: KeepKeys = None,
    rename: Rename = None,
    dtype: Dtype = "",
    dequant: Dequant = "",
    fuse: Fuse = False,
    unfuse: Unfuse = False,
    max_shard_size: MaxShard = "",
    vocab_multiple: VocabMultiple = 1,
    dry_run: DryRun = False,
    force: Force = False,
    resume: Resume = False,
    verify: VerifyMerge = False,
    workers: Workers = None,
    memory: Memory = "64MiB",
    manifest: Manifest = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write one checkpoint out of several, or out of the shards of one."""
    from ckpttool import report
    from ckpttool.ops.merge import Choices, execute, prepare, prepare_one
    from ckpttool.ops.reshard import Selection
    from ckpttool.recipe.flags import adapted, recipe_of
    from ckpttool.recipe.read import is_recipe, read_recipe

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
    )
    target = _target(
        to=to,
        tp_out=tp_out,
        pp_out=pp_out,
        ep_out=ep_out,
        etp_out=etp_out,
        pp_layout=pp_layout,
        ranks_out=ranks_out,
        max_shard_size=max_shard_size,
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=vocab_multiple,
        version=version,
    )
    run = _run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()), tuple(rename or ()))
    choices = Choices(
        _one_of(missing, "--missing", "base", "skip"),
        _one_of(vocab, "--vocab", "min", "max", "base"),
        allow_nonfinite,
        seed,
        _one_of(rng, "--rng", "counter", "mergekit"),
        card,
        _high(dequant, "--dequant"),
    )
    said = bool(method or weights or base or param)
    if is_recipe(sources):
        if said:
            raise UsageError(
                "a recipe says method, weights, base and parameters itself",
                hint="leave --method, --weights, --base and --param away, or name the checkpoints themselves",
            )
        recipe = read_recipe(sources[0])
        prepared = prepare(recipe, opened, target, selection, choices)
    elif len(sources) == 1 and not said and "+" not in sources[0]:
        prepared = prepare_one(sources[0], opened, target, selection, _recoding(dequant, ""))
    elif len(sources) == 1 and not (method or base or param):
        prepared = prepare(adapted(sources[0], weights), opened, target, selection, choices)
    else:
        recipe = recipe_of(
            sources,
            method=method or ("linear" if weights else "average"),
            weights=weights,
            base=base,
            params=param or (),
        )
        prepared = prepare(recipe, opened, target, selection, choices)
    if dry_run:
        report.show_merge_plan(prepared, run, as_json=json)
        return
    result = execute(prepared, output, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_merge(result, as_json=json, quiet=quiet, verbose=verbose)


@app.command(name="drop-keys")
def drop_keys(
    src: Src,
    dst: Dst,
    patterns: Patterns = None,
    keep_keys: KeepKeys = None,
    link: Link = False,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    sharding: Sharding = None,
    also: Also = None,
    tp_out: TpOut = None,
    pp_out: PpOut = None,
    ep_out: EpOut = None,
    etp_out: EtpOut = None,
    pp_layout: PpLayout = "",
    from_: From = "",
    to: To = "",
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    replicate: Replicate = None,
    split: Split = None,
    rename: Rename = None,
    dtype: Dtype = "",
    max_shard_size: MaxShard = "",
    dry_run: DryRun = False,
    force: Force = False,
    resume: Resume = False,
    verify: Verify = False,
    workers: Workers = None,
    memory: Memory = "64MiB",
    manifest: Manifest = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write SRC without some of its tensors; files that lose none stay as they are."""
    from ckpttool import report
    from ckpttool.ops.drop_keys import prepare
    from ckpttool.ops.reshard import Selection, execute

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
        sharding=sharding,
        also=also,
    )
    target = _target(
        to=to,
        tp_out=tp_out,
        pp_out=pp_out,
        ep_out=ep_out,
        etp_out=etp_out,
        pp_layout=pp_layout,
        ranks_out="",
        max_shard_size=max_shard_size,
        dtype=dtype,
        fuse=False,
        unfuse=False,
        vocab_multiple=1,
    )
    run = _run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(patterns or ()), tuple(keep_keys or ()), tuple(rename or ()))
    prepared = prepare(src, opened, selection, target, link=link)
    if dry_run:
        report.show_drop_plan(prepared, as_json=json)
        return
    result = execute(prepared.target, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_drop(prepared, result, as_json=json, quiet=quiet)


@app.command()
def inspect(
    src: Src,
    list_: List = False,
    files: Files = False,
    ranks: Ranks = False,
    svg: Svg = None,
    stats: Stats = False,
    hist: Hist = False,
    hash_: Hash = False,
    show: Show = None,
    metadata: Metadata = False,
    check: Check = False,
    diff: Diff = None,
    values: Values = False,
    atol: Atol = None,
    rtol: Rtol = None,
    filter_: Filter = None,
    only: Only = None,
    dtype: OfDtype = None,
    min_size: MinSize = "",
    sort: Sort = "name",
    depth: Depth = None,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    sharding: Sharding = None,
    also: Also = None,
    from_: From = "",
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    replicate: Replicate = None,
    split: Split = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what is inside SRC: a tree of its tensors, or what the options ask for."""
    from ckpttool import report
    from ckpttool.ops.inspect.answer import Question
    from ckpttool.ops.inspect.answer import inspect as look
    from ckpttool.ops.inspect.listing import COMPONENTS, Choice

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
        sharding=sharding,
        also=also,
    )
    components = tuple(_one_of(c, "--only", *COMPONENTS) for c in only or ())
    smallest = parse_size(min_size, "--min-size") if min_size else 0
    question = Question(
        choice=Choice(tuple(filter_ or ()), tuple(dtype or ()), smallest, sort, components),
        list=list_,
        files=files,
        ranks=ranks,
        metadata=metadata,
        show=tuple(show or ()),
        stats=stats,
        histogram=hist,
        digest=hash_,
        check=check,
        diff=diff,
        values=values,
        atol=atol,
        rtol=rtol,
        depth=depth,
        svg=svg,
    )
    answer = look(src, opened, question, report.progress(quiet=quiet or json) if question.reads_bytes else None)
    report.show_inspect(answer, as_json=json, quiet=quiet)
    if not answer.ok:
        raise typer.Exit(3)


@app.command(name="fp8-cast")
def fp8_cast(
    src: Src,
    dst: Dst,
    recipe: Recipe = "",
    to: ToPrecision = "",
    block: BlockSides = "",
    scale_dtype: ScaleDtype = "",
    quant_method: QuantMethod = "",
    code: CodeDtype = "",
    pow2: PowersOfTwo = False,
    edge: Edge = "",
    keep: KeepHigh = None,
    include: Include = None,
    keep_preset: KeepPreset = "hf-default",
    max_shard_size: MaxShard = "",
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    sharding: Sharding = None,
    also: Also = None,
    from_: From = "",
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    replicate: Replicate = None,
    split: Split = None,
    remove_keys: RemoveKeys = None,
    keep_keys: KeepKeys = None,
    dry_run: DryRun = False,
    force: Force = False,
    resume: Resume = False,
    verify: Verify = False,
    workers: Workers = None,
    memory: Memory = "64MiB",
    manifest: Manifest = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write SRC with its weights quantised (FP8, MXFP4, NVFP4), or dequantised with --to."""
    from ckpttool import report
    from ckpttool.ops.fp8_cast import prepare
    from ckpttool.ops.recode import Recoding
    from ckpttool.ops.reshard import Selection, execute
    from ckpttool.quant.keep import Keep
    from ckpttool.quant.scheme import scheme

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
        sharding=sharding,
        also=also,
    )
    if to:
        said = [
            option
            for option, value in (
                ("--recipe", recipe),
                ("--block", block),
                ("--scale-dtype", scale_dtype),
                ("--quant-method", quant_method),
                ("--code", code),
                ("--pow2", pow2),
                ("--edge", edge),
                ("--keep", keep),
                ("--include", include),
                ("--keep-preset", keep_preset != "hf-default"),
            )
            if value
        ]
        if said:
            raise UsageError(
                f"{said[0]} says how to quantise, and --to {to} dequantises", hint="leave one of them away"
            )
        recoding = Recoding(None, _high(to, "--to"))
    else:
        wanted = scheme(
            recipe or "block",
            method=quant_method,
            block=_sides(block, "--block"),
            scale_dtype=scale_dtype,
            code=code,
            edge=edge,
            powers=pow2,
        )
        recoding = Recoding(wanted, keep=Keep(keep_preset, tuple(keep or ()), tuple(include or ())))
    run = _run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()))
    limit = parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None
    prepared = prepare(src, opened, recoding, selection, max_shard_size=limit)
    if dry_run:
        report.show_cast_plan(prepared, run, as_json=json)
        return
    result = execute(prepared, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_cast(result, as_json=json, quiet=quiet)


@app.command(name="fp8-size")
def fp8_size(
    src: Src,
    config: ConfigFile = None,
    recipe: SizeRecipe = "",
    block: BlockSides = "",
    scale_dtype: ScaleDtype = "",
    quant_method: QuantMethod = "",
    static_act: StaticAct = False,
    edge: Edge = "",
    keep: KeepHigh = None,
    include: Include = None,
    keep_preset: SizePreset = "",
    no_mtp: NoMtp = False,
    max_shard_size: MaxShard = "",
    tp_out: TpOut = None,
    pp_out: PpOut = None,
    ep_out: EpOut = None,
    etp_out: SizeEtpOut = None,
    pp_layout: PpLayout = "",
    vocab_pad: VocabPad = None,
    kv: KvDtype = "",
    tokens: Tokens = None,
    batch: Batch = None,
    max_model_len: MaxModelLen = None,
    train: Train = False,
    zero: Zero = None,
    dp: DataParallel = None,
    grad: Grad = "",
    master: Master = "",
    moment: Moment = "",
    fp8_transposed: Fp8Transposed = False,
    device_mem: DeviceMem = "",
    check_total_size: CheckTotalSize = False,
    by: By = "class",
    unit: Unit = "",
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    etp: Etp = None,
    from_: From = "",
    rank_pattern: RankPattern = "",
    family: FamilyName = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say how large SRC (a checkpoint or a config.json) is in FP8: stored, on each rank, and with its KV cache."""
    from ckpttool import report
    from ckpttool.ops.fp8_size import Question, answer
    from ckpttool.ops.fp8_size.answer import BY
    from ckpttool.ops.fp8_size.stored import Wanted

    opened = _open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=None,
        split=None,
    )
    by, unit = _one_of(by, "--by", *BY), _one_of(unit, "--unit", *report.UNITS)
    question = Question(
        Wanted(
            recipe,
            _sides(block, "--block"),
            scale_dtype,
            quant_method,
            static_act,
            tuple(keep or ()),
            tuple(include or ()),
            keep_preset,
            edge,
        ),
        config=config,
        mtp=not no_mtp,
        max_shard_size=parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None,
        tp=tp_out,
        pp=pp_out,
        ep=ep_out,
        etp=etp_out,
        pp_layout=_numbers(pp_layout, "--pp-layout") if pp_layout else (),
        vocab_pad=vocab_pad,
        kv=kv,
        tokens=tokens,
        batch=batch,
        max_model_len=max_model_len,
        train=train,
        zero=zero,
        dp=dp,
        grad=grad,
        master=master,
        moment=moment,
        fp8_transposed=fp8_transposed,
        device_mem=parse_size(device_mem, "--device-mem") if device_mem else None,
        check_total_size=check_total_size,
    )
    found = answer(src, opened, question)
    report.show_fp8_size(found, by=by or "class", unit=unit, as_json=json, quiet=quiet)
    if not found.ok:
        raise typer.Exit(3)


@cache
def _command() -> Callable[[], object]:
    """The commands with their options, which take 40 ms to make: once for a process that runs many."""
    from typer.main import get_command

    return get_command(app)


def main() -> NoReturn:
    """Run the command line."""
    # A plan is a million small objects without a cycle; collecting them costs a third of planning and frees nothing.
    gc.disable()
    # Work is shared out to processes; threads of a library below them would only get in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _command()()
    sys.exit(0)
