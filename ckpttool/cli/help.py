"""``-h`` of a command: examples, and the options that most people use. ``--help``: all options, by topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer import Context, Exit, echo
from typer.core import TyperCommand

from ckpttool.cli.choices import FORMATS, METHODS, READ_ONLY, TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST = {
    "reshard": "to tp_out pp_out ep_out dtype only remove_keys verify dry_run",
    "merge": "output method weights base param to dtype verify dry_run",
    "drop-keys": "keep_keys link verify dry_run force",
    "convert-json": "params names program check fix verify force dry_run",
    "inspect": "list_ filter_ stats show files ranks html json",
    "diff": "headers_only atol rtol filter_ only html json",
    "check": "values findings html only json",
    "quantize": "recipe to keep keep_preset verify dry_run force",
    "size": "recipe tp_out kv tokens batch gpu train json",
}
"""The options that most people use, by the names of their parameters."""

_GROUPS = (
    (
        "What to show",
        """list_ files ranks svg stats histogram digest total show metadata header checkpoints imports suggest_family
        check diff html depth""",
    ),
    ("Comparison and check", "headers_only values atol rtol findings check_total_size"),
    ("Repair", "set_header copy write_index"),
    ("Paddle programs", "params names program fix"),
    ("How to merge", "output method weights base param seed rng missing vocab allow_nonfinite report card"),
    ("How to quantize", "recipe block scale_dtype quant_method code static_act edge keep include keep_preset no_mtp"),
    ("KV cache and devices", "kv tokens max_model_len batch gpu utilization"),
    ("Training", "train zero dp grad master moment fp8_transposed"),
    ("Source", "config from_ tp pp ep etp sharding family split rank_pattern select part also"),
    (
        "Target",
        """to version native_names tp_out pp_out ep_out etp_out pp_layout sharding_out ranks_out max_shard_size
        vocab_multiple vocab_pad""",
    ),
    (
        "Tensors",
        "filter_ min_size sort only masters ema remove_keys keep_keys rename aoa dtype dequant requant fuse betas",
    ),
    ("Run", "link dry_run force resume verify workers memory manifest"),
    ("Many machines", "on shares"),
    ("Other machines", "anonymous create_pr"),
    ("Output", "by unit json quiet verbose short_help help"),
)
"""Headings of all other options, and both in their order; what is listed nowhere comes before them under "Options"."""

COMMON = "Common options"
HELP = "Show all options."
_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken, while lines are: names of options and values are copied as a whole."""

TASKS = (
    ("Convert", ("reshard", "merge", "convert-json")),
    ("Quantize", ("quantize", "size")),
    ("Look", ("inspect", "diff", "check")),
    ("Edit", ("drop-keys",)),
    ("Help", ("doctor", "explain", "help")),
)
"""The commands by task, as ``ckpttool`` alone lists them."""

ALIASES = {"fp8-cast": "quantize", "fp8-size": "size --recipe block"}
"""Former names of commands, which go on working and are not listed: a command, and options that were its defaults."""

EXAMPLES = {
    "reshard": (
        "ckpttool reshard llama_tp8 llama_tp2 --tp-out 2 --verify",
        "ckpttool reshard llama_tp8 llama_hf --to hf",
    ),
    "merge": (
        "ckpttool merge model_a model_b --weights 0.6,0.4 -o merged",
        "ckpttool merge recipe.yml -o merged",
        "ckpttool merge llama_tp8 -o llama_hf",
    ),
    "drop-keys": ("ckpttool drop-keys llama smaller 'lm_head.*' --link",),
    "convert-json": (
        "ckpttool convert-json model.json model.safetensors",
        "ckpttool convert-json model.json --check",
    ),
    "inspect": (
        "ckpttool inspect llama_tp8",
        "ckpttool inspect llama_tp8 --list --filter '*.q_proj.*'",
        "ckpttool inspect llama_tp8 --stats --html report.html",
    ),
    "diff": (
        "ckpttool diff llama_tp8 llama_hf",
        "ckpttool diff run/step-1000 run/step-2000 --html changes.html",
    ),
    "check": (
        "ckpttool check llama_tp8",
        "ckpttool check llama_tp8 --values --findings sarif=findings.sarif",
    ),
    "quantize": (
        "ckpttool quantize llama llama_fp8 --recipe block",
        "ckpttool quantize llama_fp8 llama_bf16 --to bf16",
    ),
    "size": (
        "ckpttool size llama/config.json",
        "ckpttool size llama --tp-out 8 --kv fp8 --tokens 32k --gpu h100",
    ),
    "explain": ("ckpttool explain layout", "ckpttool explain shard-missing"),
    "doctor": ("ckpttool doctor", "ckpttool doctor /mnt/models", "ckpttool doctor s3://bucket/models --online"),
    "help": ("ckpttool help reshard",),
}
"""Command lines to begin with."""
_METHODS = f"{', '.join(METHODS)}. What they do: ckpttool explain methods."
_FORMATS = f"{', '.join(FORMATS)}; read only: {', '.join(READ_ONLY)}"
_READ = {"Formats": _FORMATS.replace("-", _UNBROKEN)}
_WRITTEN = _READ | {"Targets": ", ".join(TARGETS).replace("-", _UNBROKEN)}
NOTES = {
    "reshard": _WRITTEN,
    "merge": {"Methods": _METHODS.replace("-", _UNBROKEN)} | _WRITTEN,
    **dict.fromkeys(("drop-keys", "inspect", "diff", "check", "quantize", "size"), _READ),
}
"""Values that are many: what a command's help ends with, by its heading."""


def in_order(names: Iterable[str]) -> list[str]:
    """Names of one option, which come out of a set: the short one first."""
    return sorted(names, key=len)


def first_help(context: Context, asked: bool) -> None:
    """Answer ``-h``: print what fits a screen, and end."""
    if asked and not context.resilient_parsing:
        echo(context.command.first_help(context))  # type: ignore[attr-defined]
        raise Exit


class Command(TyperCommand):
    """A command whose help a terminal of 80 columns shows in sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*usage_words(self), "[OPTIONS]"]

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return in_order(super().get_help_option_names(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = HELP
        return option

    def get_help(self, ctx: Any) -> str:
        return str(super().get_help(ctx)).replace(_UNBROKEN, "-")

    def first_help(self, ctx: Any) -> str:
        """Usage, examples and the options that most people use: about twenty lines."""
        found = sections(self.name or "", self.get_params(ctx))
        if COMMON not in found:
            return self.get_help(ctx)
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self._format_examples(formatter)
        with formatter.section(COMMON):
            formatter.write_dl([_row(p) for p in found[COMMON]])
        options = [p for some in found.values() for p in some if is_option(p)]
        formatter.write_paragraph()
        formatter.write_text(
            f"{ctx.command_path} --help shows all {len(options)} options, in groups.".replace("-", _UNBROKEN)
        )
        return str(formatter.getvalue()).replace(_UNBROKEN, "-").rstrip("\n")

    def _format_examples(self, formatter: Any) -> None:
        with formatter.section("Examples"):
            for line in EXAMPLES.get(self.name or "", ()):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self._format_examples(formatter)
        for title, parameters in sections(self.name or "", self.get_params(ctx)).items():
            with formatter.section(title):
                formatter.write_dl([_row(p) for p in parameters])
        for title, text in NOTES.get(self.name or "", {}).items():
            with formatter.section(title):
                formatter.write_text(text)


def titles() -> list[str]:
    """The headings of options, in their order."""
    return ["Options", *(about for about, _ in _GROUPS)]


def sections(command: str, parameters: Iterable[Any], *, common: bool = True) -> dict[str, list[Any]]:
    """A command's parameters by the headings of its help, in their order there, without hidden ones.

    Without ``common``, the options that most people use are below the heading of their topic, too.
    """
    first = _FIRST.get(command, "").split() if common else []
    heading = {n: about for about, names in _GROUPS for n in names.split()} | dict.fromkeys(first, COMMON)
    order = [*first, *heading]
    found: dict[str, list[Any]] = {"Arguments": [], COMMON: [], "Options": [], **{about: [] for about, _ in _GROUPS}}
    for p in sorted(parameters, key=lambda p: order.index(p.name) if p.name in order else len(order)):
        if not getattr(p, "hidden", False):
            found[heading.get(p.name, "Options") if is_option(p) else "Arguments"].append(p)
    return {title: some for title, some in found.items() if some}


def _row(parameter: Any) -> tuple[str, str]:
    """A parameter as help lists it."""
    if not is_option(parameter):
        return parameter.metavar, parameter.help or ""
    value = "" if parameter.is_flag else f" {parameter.metavar}"
    names = "/".join([", ".join(parameter.opts), *parameter.secondary_opts])
    return names + value, described(parameter).replace("-", _UNBROKEN)


def is_option(parameter: Any) -> bool:
    """Whether a parameter of a command is an option, not an argument."""
    return bool(parameter.opts[0].startswith("-"))


def usage_words(command: Any) -> list[str]:
    """What a command line cannot do without: ``SOURCE... -o DST``."""
    words = []
    for p in getattr(command, "params", ()):
        if not is_option(p):
            words.append(p.metavar if p.required else f"[{p.metavar}]")
        elif p.required:
            words.append(f"{p.opts[0]} {p.metavar}")
    return words


def described(option: Any) -> str:
    """An option's help, with what is the same to say of many: that it can be repeated, and its default."""
    text = option.help or ""
    notes = [text if text.endswith("...") else text.removesuffix(".")]
    if option.multiple:
        notes[0] += " (repeatable)"
    if option.default not in (None, False, "", ()) and option.show_default:
        notes.append(f"default: {option.default}")
    said = "; ".join(notes)
    return said if said.endswith("...") else f"{said}."
