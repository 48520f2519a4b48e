"""Options that several commands have, in groups: a command takes a group as one parameter, see `grouped`.

Options of a single command stand in its file. A group that defines an option again replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from ckpttool.cli import choices
from ckpttool.cli.help import first_help
from ckpttool.cli.process import interrupts
from ckpttool.cli.values import numbers
from ckpttool.core.words import either, one_of, parse_size
from ckpttool.errors import UsageError
from ckpttool.storage import access

if TYPE_CHECKING:
    from ckpttool.execute import Progress, RunOptions
    from ckpttool.execute.parts.launchers import Membership
    from ckpttool.formats.base import OpenOptions
    from ckpttool.targeting.select import Selection
    from ckpttool.targeting.target import Target


def value(name: str, metavar: str, about: str, values: Sequence[str] = (), **more: Any) -> Any:
    """An option with a value; a shell completes it to one of ``values``."""
    if values:
        more["autocompletion"] = choices.completes(*values)
    return typer.Option(*name.split(), metavar=metavar, help=about, **more)


def number(name: str, about: str) -> Any:
    """An option with a number of at least 1."""
    return typer.Option(name, metavar="N", min=1, help=about)


def flag(name: str, about: str, **more: Any) -> Any:
    """An option without a value."""
    return typer.Option(*name.split(), help=about, **more)


def argument(metavar: str, about: str) -> Any:
    """A positional argument."""
    return typer.Argument(metavar=metavar, help=about)


def without(*names: str) -> frozenset[str]:
    """Options of a group that a command does not have; they keep their defaults."""
    return frozenset(names)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer takes it: with the options of its groups (dataclasses) in place of the groups."""
    parameters: dict[str, Parameter] = {}
    groups: dict[str, tuple[Any, list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        group, *more = get_args(hint) or (hint,)
        options = {parameter.name: (hint, parameter.default)}
        if is_dataclass(group):
            annotations = get_type_hints(group, include_extras=True)
            omitted = more[0] if more else ()
            options = {f.name: (annotations[f.name], f.default) for f in fields(group) if f.name not in omitted}
            groups[parameter.name] = group, list(options)
        for name, (annotation, default) in options.items():
            parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    @wraps(command)
    def run(**given: Any) -> None:
        filled = {n: group(**{name: given.pop(name) for name in names}) for n, (group, names) in groups.items()}
        command(**given, **filled)

    run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    run.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return run


Src = Annotated[str, argument("SRC", "Directory, file or URL (hf://, s3://, gs://, ...) to read.")]
Dst = Annotated[str, argument("DST", "Directory or URL to write; must not exist.")]
MaxShard = Annotated[str, value("--max-shard-size", "SIZE", "Largest file (hf, torch-bin, vllm); default: 5GB.")]
On = Annotated[str, value("--on", "ENGINE", "Work on a cluster: ray, or ray=HOST:PORT.", choices.ENGINES)]
RemoveKeys = Annotated[list[str] | None, value("--remove-keys", "PATTERN", "Omit these tensors.")]
KeepKeys = Annotated[list[str] | None, value("--keep-keys", "PATTERN", "Keep only these tensors.")]
Only = Annotated[
    list[str] | None,
    value("--only", "COMPONENT", "Only model, adapter, master_weights, optimizer or ema.", choices.COMPONENTS),
]
KeepPreset = Annotated[
    str,
    value("--keep-preset", "NAME", f"Layers in high precision: {', '.join(choices.PRESETS)}.", choices.PRESETS),
]
Verbose = Annotated[bool, flag("-v --verbose", "Explain what was inferred.")]


def bytes_of(text: str, option: str = "--max-shard-size") -> int | None:
    """A size, or None where the option is not given."""
    return parse_size(text, option) if text else None


def _anonymous(asked: bool) -> None:
    """Go without credentials, before any place is looked at."""
    if asked:
        access.set_access(anonymous=True)


@dataclass
class AccessFlags:
    """How places on other machines are reached."""

    anonymous: Annotated[
        bool,
        flag(
            "--anonymous",
            "Send no credentials (public buckets and models).",
            callback=_anonymous,
            is_eager=True,
        ),
    ] = False


def whole_and_cut(split: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of --split that end in ``=none``, without it: whole on every rank; and the others, as they are."""
    whole = tuple(text.removesuffix("=none") for text in split if text.endswith("=none"))
    return whole, tuple(text for text in split if not text.endswith("=none"))


@dataclass
class SourceOptions(AccessFlags):
    """How SRC is read."""

    tp: Annotated[int | None, number("--tp", "Tensor-parallel ranks of SRC.")] = None
    pp: Annotated[int | None, number("--pp", "Pipeline stages of SRC.")] = None
    ep: Annotated[int | None, number("--ep", "Expert-parallel ranks of SRC.")] = None
    etp: Annotated[int | None, number("--etp", "Expert-tensor-parallel ranks of SRC.")] = None
    from_: Annotated[
        str,
        value(
            "--from",
            "FORMAT",
            "Format of SRC, see Formats; default: detected.",
            (*choices.FORMATS, *choices.READ_ONLY),
        ),
    ] = ""
    select: Annotated[str, value("--select", "PATH", "Dict of tensors in a torch.save file: model.ema")] = ""
    rank_pattern: Annotated[
        str,
        value(
            "--rank-pattern",
            "PATTERN",
            "Names of rank files: 'tp{tp}/pp{pp}.safetensors'",
        ),
    ] = ""
    family: Annotated[
        str,
        value(
            "--family",
            "NAME|FILE",
            "Layout rules, if config.json does not name them.",
            autocompletion=choices.families,
        ),
    ] = ""
    split: Annotated[
        list[str] | None, value("--split", "PATTERN=AXIS", "Axis on which to cut; none: whole on every rank.")
    ] = None
    part: Annotated[
        list[str] | None,
        value("--part", "NAME", "Only this part of a pipeline: transformer, vae, ..."),
    ] = None
    sharding: Annotated[int | None, number("--sharding", "Shards of SRC's optimizer state.")] = None
    also: Annotated[list[str] | None, value("--also", "DIR", "Another directory of SRC, saved by another node.")] = None

    def open_options(self, parts: Sequence[str] = ()) -> OpenOptions:
        """What they say together; ``parts`` of a pipeline where --part has another meaning, too."""
        from ckpttool.formats.base import OpenOptions, ReadOptions
        from ckpttool.storage.place import parse_place

        mesh = ReadOptions(
            self.tp,
            self.pp,
            self.ep,
            self.etp,
            rank_pattern=self.rank_pattern,
            sharding=self.sharding,
            more=tuple([parse_place(p) for p in self.also or ()]),
            select=self.select,
            parts=(*(self.part or ()), *parts),
        )
        return OpenOptions(self.from_, mesh, self.family, *whole_and_cut(self.split or ()))


SharedSource = Annotated[SourceOptions, without("part")]
"""How SRC is read by a command whose work can be shared out: --part stands among its ``RunFlags``."""


@dataclass
class MeshOptions:
    """How DST is cut, and into how large files."""

    tp_out: Annotated[int | None, number("--tp-out", "Tensor-parallel ranks of DST.")] = None
    pp_out: Annotated[int | None, number("--pp-out", "Pipeline stages of DST.")] = None
    ep_out: Annotated[int | None, number("--ep-out", "Expert-parallel ranks of DST.")] = None
    etp_out: Annotated[int | None, number("--etp-out", "Ranks per expert; default: 1 with --ep-out, else tp.")] = None
    pp_layout: Annotated[str, value("--pp-layout", "N,N,...", "Layers of each pipeline stage of DST.")] = ""
    max_shard_size: MaxShard = ""

    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return numbers(self.pp_layout, "--pp-layout") if self.pp_layout else ()


@dataclass
class TargetOptions(MeshOptions):
    """What DST holds, and how it is written."""

    to: Annotated[str, value("--to", "FORMAT", "Format of DST: hf, vllm, dcp, megatron-dist, ...", choices.FORMATS)] = (
        ""
    )
    version: Annotated[
        str, value("--target", "VERSION", "Software that will load DST, see Targets.", choices.TARGETS)
    ] = ""
    vocab_multiple: Annotated[int | None, number("--vocab-multiple", "Pad the vocabulary to a multiple of N.")] = None
    remove_keys: RemoveKeys = None
    keep_keys: KeepKeys = None
    rename: Annotated[list[str] | None, value("--rename", "OLD=NEW", "New names; * on both sides, or re:OLD=NEW.")] = (
        None
    )
    dtype: Annotated[str, value("--dtype", "DTYPE", f"Cast floats to {either(choices.CASTS)}.", choices.CASTS)] = ""
    dequant: Annotated[
        str, value("--dequant", "DTYPE", f"Dequantize to {either(choices.PRECISIONS)}.", choices.PRECISIONS)
    ] = ""

    def target(self) -> Target:
        """What they say together."""
        from ckpttool.targeting.target import Target

        return Target(
            format=self.to,
            tp=self.tp_out,
            pp=self.pp_out,
            ep=self.ep_out,
            etp=self.etp_out,
            pp_layout=self.layers(),
            max_shard_size=bytes_of(self.max_shard_size),
            dtype=self.dtype,
            version=self.version,
            vocab_multiple=self.vocab_multiple,
        )

    def selection(self) -> Selection:
        """Which tensors are left out, and under which names the others are written."""
        from ckpttool.targeting.select import Selection

        return Selection(tuple(self.remove_keys or ()), tuple(self.keep_keys or ()), tuple(self.rename or ()))


@dataclass
class QuantOptions:
    """How weights are quantized."""

    recipe: Annotated[
        str,
        value("--recipe", "RECIPE", f"How to quantize: {either(choices.RECIPES)}; default: block.", choices.RECIPES),
    ] = ""
    block: Annotated[str, value("--block", "MxN", "Elements per scale; default: 128x128.")] = ""
    scale_dtype: Annotated[
        str, value("--scale-dtype", "DTYPE", "f32, bf16, e8m0; f32:pow2 for powers of two.", choices.SCALES)
    ] = ""
    quant_method: Annotated[
        str,
        value(
            "--quant-method",
            "METHOD",
            f"Convention: {', '.join(choices.QUANT_METHODS)}.",
            choices.QUANT_METHODS,
        ),
    ] = ""
    edge: Annotated[
        str,
        value(
            "--edge",
            "ceil|skip|error",
            "Partial blocks: fill, keep the weight, refuse.",
            choices.EDGES,
        ),
    ] = ""
    keep: Annotated[list[str] | None, value("--keep", "PATTERN", "Weights to keep in high precision.")] = None
    include: Annotated[
        list[str] | None, value("--include", "PATTERN", "Weights to quantize despite --keep and presets.")
    ] = None
    keep_preset: KeepPreset = ""


CONNECTIONS = "CKPTTOOL_CONNECTIONS"
"""The variable that limits requests at a time to other machines; by default --memory does."""


def _connections() -> int | None:
    """Requests at a time to other machines. Raises UsageError for a variable that is not a number of at least 1."""
    text = os.environ.get(CONNECTIONS, "")
    if text and (not text.isdigit() or int(text) < 1):
        raise UsageError(f"{CONNECTIONS} is `{text}`, and must be a whole number of at least 1")
    return int(text) if text else None


@dataclass
class RunFlags:
    """How a run goes."""

    dry_run: Annotated[bool, flag("-n --dry-run", "Print the plan and write nothing.")] = False
    force: Annotated[bool, flag("-f --force", "Replace DST when it exists.")] = False
    resume: Annotated[bool, flag("--resume", "Continue an interrupted run.")] = False
    workers: Annotated[
        int | None,
        number(
            "--workers",
            "Threads or processes; default: by the task and cores.",
        ),
    ] = None
    memory: Annotated[str, value("--memory", "SIZE", "Memory for all buffers.")] = "64MiB"
    create_pr: Annotated[bool, flag("--create-pr", "Open a pull request (DST on the Hugging Face Hub).")] = False
    verify: Annotated[bool, flag("--verify", "Read DST back and compare every element.")] = False
    manifest: Annotated[bool, flag("--manifest", "Write a checksum per tensor, for ckpttool check.")] = False
    on: On = ""
    shares: Annotated[
        list[str] | None,
        value(
            "--part",
            "I/N|NAME",
            "Do part I of N; auto: by Slurm, torchrun or MPI. NAME: this part of a pipeline.",
            ("auto",),
        ),
    ] = None

    def pipeline_parts(self) -> list[str]:
        """The values of --part that name a part of a pipeline."""
        if not self.shares:
            return []
        from ckpttool.execute.parts.launchers import is_membership

        return [said for said in self.shares if not is_membership(said)]

    def membership(self) -> Membership | None:
        """Which of several processes this is; None where it does all. Raises UsageError where it is not certain."""
        if not self.shares:
            return None
        from ckpttool.execute.parts.launchers import is_membership, membership

        said = [said for said in self.shares if is_membership(said)]
        if len(said) > 1:
            raise UsageError(f"--part {said[0]} and --part {said[1]}: a process does one part", hint="drop one")
        return membership(said[0], os.environ) if said else None

    def options(self) -> RunOptions:
        """What they say together."""
        from ckpttool.execute import RunOptions

        joined = self.membership()
        if self.on:
            one_of(self.on.partition("=")[0], "--on", *choices.ENGINES)
        if self.on and joined:
            raise UsageError(
                "--on and --part exclude each other",
                hint="--on lets a cluster do the parts; --part does one of them in a process that you start",
            )
        size = parse_size(self.memory, "--memory")
        if size < 4 << 20:
            raise UsageError(f"--memory {self.memory} is too small", hint="4MiB is the least, 64MiB the default")
        return RunOptions(
            memory=size,
            workers=self.workers,
            connections=_connections(),
            force=self.force,
            resume=self.resume,
            manifest=self.manifest,
            create_pr=self.create_pr,
            on=self.on,
            member=joined.member if joined else None,
        )


def _silenced(asked: bool) -> bool:
    if asked:
        access.on_wait = None
        interrupts.tick = None
    return asked


@dataclass
class OutputFlags:
    """What is said."""

    json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False
    quiet: Annotated[bool, flag("-q --quiet", "Suppress progress and notes.", callback=_silenced)] = False
    short_help: Annotated[bool, flag("-h", "Show the common options.", callback=first_help, is_eager=True)] = False

    def progress(self, flags: RunFlags | None = None) -> Progress:
        """What shows how far a run is. Says before which part this is, where the launcher was asked."""
        from ckpttool.report.bars import progress
        from ckpttool.report.text import message

        quiet = self.quiet or self.json
        joined = flags.membership() if flags else None
        if joined and joined.source and not quiet:
            message(f"note: {joined.member}, as the launcher says ({joined.source})")
        return progress(quiet=quiet, notes=False, label=str(joined.member) if joined else "")
