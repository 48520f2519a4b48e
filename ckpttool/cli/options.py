"""Options that several commands have, in groups: a command takes a group as one parameter, see `grouped`.

Options of a single command stand in its file. A group that defines an option again replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from ckpttool.cli import choices
from ckpttool.cli.help import first_help
from ckpttool.cli.process import interrupts
from ckpttool.cli.values import numbers
from ckpttool.core.words import either, one_of, parse_betas, parse_size
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


Src = Annotated[str, argument("SRC", "Directory, file or URL to read: hf://ORG/MODEL, s3://BUCKET/PREFIX, ...")]
Dst = Annotated[str, argument("DST", "Directory or URL to write; must not exist.")]
MaxShard = Annotated[
    str, value("--max-shard-size", "SIZE", "Largest file of --to hf, torch-bin and vllm; default: 5GB.")
]
On = Annotated[str, value("--on", "ENGINE", "Let a cluster do the work: ray, or ray=HOST:PORT.", choices.ENGINES)]
RemoveKeys = Annotated[list[str] | None, value("--remove-keys", "PATTERN", "Leave these tensors out.")]
KeepKeys = Annotated[list[str] | None, value("--keep-keys", "PATTERN", "Leave all other tensors out.")]
Only = Annotated[
    list[str] | None, value("--only", "COMPONENT", f"Only this: {either(choices.COMPONENTS)}.", choices.COMPONENTS)
]
KeepPreset = Annotated[
    str,
    value("--keep-preset", "NAME", f"Which layers stay in high precision: {either(choices.PRESETS)}.", choices.PRESETS),
]
Verbose = Annotated[bool, flag("-v --verbose", "Explain what was inferred.")]


def bytes_of(text: str, option: str = "--max-shard-size") -> int | None:
    """A size, or None where the option is not given."""
    return parse_size(text, option) if text else None


def _asks_for(name: str) -> Any:
    """What sets access of that name, before any place is looked at."""

    def ask(asked: bool) -> None:
        if asked:
            from ckpttool.storage.access import set_access

            set_access(**{name: True})

    return ask


@dataclass
class AccessFlags:
    """How places on other machines are reached."""

    anonymous: Annotated[
        bool,
        flag(
            "--anonymous",
            "Send no credentials: for public buckets and models.",
            callback=_asks_for("anonymous"),
            is_eager=True,
        ),
    ] = False
    offline: Annotated[
        bool,
        flag(
            "--offline",
            "Of the Hugging Face Hub read only the cache on this machine.",
            callback=_asks_for("offline"),
            is_eager=True,
        ),
    ] = False


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
            f"Format of SRC: {', '.join((*choices.FORMATS, *choices.READ_ONLY))}.",
            (*choices.FORMATS, *choices.READ_ONLY),
        ),
    ] = ""
    select: Annotated[str, value("--select", "PATH", "The dict of tensors in a file of torch.save: 'model.ema'.")] = ""
    rank_pattern: Annotated[
        str,
        value(
            "--rank-pattern",
            "PATTERN",
            "File-name pattern of others' rank files: 'model_{rank}.safetensors', 'tp{tp}/pp{pp}.safetensors'.",
        ),
    ] = ""
    family: Annotated[
        str,
        value(
            "--family",
            "NAME|FILE",
            "Layout rules, when config.json does not name them.",
            autocompletion=choices.families,
        ),
    ] = ""
    replicate: Annotated[
        list[str] | None, value("--replicate", "PATTERN", "These tensors are whole on every rank.")
    ] = None
    split: Annotated[list[str] | None, value("--split", "PATTERN=AXIS", "These tensors are cut evenly on AXIS.")] = None
    part: Annotated[
        list[str] | None,
        value("--part", "NAME", "Only this part of a pipeline, such as transformer; the others stay as they are."),
    ] = None
    sharding: Annotated[int | None, number("--sharding", "Ranks that share the optimizer state of SRC.")] = None
    also: Annotated[list[str] | None, value("--also", "DIR", "A further directory of SRC, saved by another node.")] = (
        None
    )

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
        return OpenOptions(self.from_, mesh, self.family, tuple(self.replicate or ()), tuple(self.split or ()))


SharedSource = Annotated[SourceOptions, without("part")]
"""How SRC is read by a command whose work can be shared out: --part stands among its ``RunFlags``."""


@dataclass
class MeshOptions:
    """How DST is cut, and into how large files."""

    tp_out: Annotated[int | None, number("--tp-out", "Tensor-parallel ranks of DST.")] = None
    pp_out: Annotated[int | None, number("--pp-out", "Pipeline stages of DST.")] = None
    ep_out: Annotated[int | None, number("--ep-out", "Expert-parallel ranks of DST.")] = None
    etp_out: Annotated[
        int | None, number("--etp-out", "Ranks that cut each expert; default: 1 with --ep-out, else tp.")
    ] = None
    pp_layout: Annotated[str, value("--pp-layout", "N,N,...", "Layers of each pipeline stage of DST.")] = ""
    max_shard_size: MaxShard = ""

    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return numbers(self.pp_layout, "--pp-layout") if self.pp_layout else ()


@dataclass
class TargetOptions(MeshOptions):
    """What DST holds, and how it is written."""

    to: Annotated[str, value("--to", "FORMAT", f"Format of DST: {', '.join(choices.FORMATS)}.", choices.FORMATS)] = ""
    keep_keys: KeepKeys = None
    rename: Annotated[list[str] | None, value("--rename", "OLD=NEW", "Rename; * on both sides, or re:OLD=NEW.")] = None
    dtype: Annotated[str, value("--dtype", "DTYPE", f"Cast floats to {either(choices.CASTS)}.", choices.CASTS)] = ""
    betas: Annotated[str, value("--betas", "B1,B2", "Betas of Adam, where SRC does not say them: 0.9,0.999.")] = ""

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
            betas=parse_betas(self.betas, "--betas") if self.betas else None,
        )

    def selection(self, remove: Sequence[str] | None) -> Selection:
        """Which tensors are left out, and under which names the others are written."""
        from ckpttool.targeting.select import Selection

        return Selection(tuple(remove or ()), tuple(self.keep_keys or ()), tuple(self.rename or ()))


@dataclass
class NewTargetOptions(TargetOptions):
    """What DST holds, where it is not SRC with a few files less."""

    ranks_out: Annotated[str, value("--ranks-out", "0-3,7", "Write only these ranks of DST.")] = ""
    version: Annotated[
        str,
        value(
            "--target",
            "VERSION",
            f"Software version that will load DST: {', '.join(choices.TARGETS)}.",
            choices.TARGETS,
        ),
    ] = ""
    vocab_multiple: Annotated[
        int | None,
        number(
            "--vocab-multiple",
            "Pad the vocabulary of cut embeddings to a multiple of this. Default: 1; megatron: 128 for each tp rank.",
        ),
    ] = None
    remove_keys: RemoveKeys = None
    dequant: Annotated[
        str,
        value("--dequant", "DTYPE", f"Quantized weights become {either(choices.PRECISIONS)}.", choices.PRECISIONS),
    ] = ""
    fuse: Annotated[bool, flag("--fuse", "Fuse what the family can fuse (qkv, gate_up).")] = False
    unfuse: Annotated[bool, flag("--unfuse", "Take fused tensors apart.")] = False

    def target(self) -> Target:
        """What they say together."""
        return replace(
            super().target(),
            ranks=numbers(self.ranks_out, "--ranks-out", runs=True) if self.ranks_out else None,
            version=self.version,
            vocab_multiple=self.vocab_multiple,
            fuse=self.fuse,
            unfuse=self.unfuse,
        )


@dataclass
class QuantOptions:
    """How weights are quantized."""

    recipe: Annotated[
        str,
        value("--recipe", "RECIPE", f"How to quantize: {either(choices.RECIPES)}; default: block.", choices.RECIPES),
    ] = ""
    block: Annotated[str, value("--block", "MxN", "Elements per scale; default: 128x128.")] = ""
    scale_dtype: Annotated[
        str, value("--scale-dtype", "DTYPE", "Scale dtype: f32, bf16 or e8m0 (powers of two).", choices.SCALES)
    ] = ""
    quant_method: Annotated[
        str,
        value(
            "--quant-method",
            "METHOD",
            f"Checkpoint convention to write: {either(choices.QUANT_METHODS)}.",
            choices.QUANT_METHODS,
        ),
    ] = ""
    edge: Annotated[
        str,
        value(
            "--edge",
            "ceil|skip|error",
            "Dimensions not divisible by the block: partly filled block, keep the weight, or refuse.",
            choices.EDGES,
        ),
    ] = ""
    keep: Annotated[list[str] | None, value("--keep", "PATTERN", "Weights that stay in high precision.")] = None
    include: Annotated[
        list[str] | None, value("--include", "PATTERN", "Weights that are quantized although others keep them.")
    ] = None
    keep_preset: KeepPreset = ""


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
            "Threads that move bytes (default: 2 to 4), or processes that compute (default: one a core).",
        ),
    ] = None
    memory: Annotated[str, value("--memory", "SIZE", "Memory for all buffers together.")] = "64MiB"
    connections: Annotated[
        int | None,
        number("--connections", "Requests at a time to other machines; default: as many as --memory allows."),
    ] = None
    create_pr: Annotated[bool, flag("--create-pr", "DST on the Hugging Face Hub: open a pull request.")] = False
    verify: Annotated[
        bool, flag("--verify", "Read the output back and compare every element; exit 3 if not equal.")
    ] = False
    manifest: Annotated[bool, flag("--manifest", "Write a checksum per tensor, for inspect --check.")] = False
    on: On = ""
    shares: Annotated[
        list[str] | None,
        value(
            "--part",
            "I/N|NAME",
            "Do part I of N, beside processes that do the others. auto: the part that Slurm, torchrun or MPI give this"
            " process; auto/N: Kubernetes. NAME: only this part of a pipeline, such as transformer.",
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
            connections=self.connections,
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
