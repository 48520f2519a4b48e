"""``--help`` of a command: its own options, then those that others have too, by what they are about, and examples."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_ABOUT = (
    ("What is read", "tp pp ep etp sharding also from_ rank_pattern family replicate split"),
    (
        "What is written",
        """tp_out pp_out ep_out etp_out pp_layout sharding_out sharding_version ranks_out to version native_names
        max_shard_size vocab_multiple""",
    ),
    ("Which tensors", "only ema remove_keys keep_keys rename aoa dtype dequant requant fuse unfuse"),
    ("The run", "dry_run force resume verify workers memory manifest json quiet verbose help"),
)
"""Headings, and the options below them by the names of their parameters."""
_OWN = {"inspect": ("only", "dtype"), "fp8-cast": ("to", "max_shard_size"), "convert-json": ("max_shard_size",)}
"""Options that mean something of their own to a command."""


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
        "ckpttool convert-json llama --index --check",
    ),
    "inspect": (
        "ckpttool inspect llama_tp8",
        "ckpttool inspect llama_tp8 --check",
        "ckpttool inspect llama_tp8 --diff llama_hf --values",
    ),
    "fp8-cast": (
        "ckpttool fp8-cast llama llama_fp8 --recipe block",
        "ckpttool fp8-cast llama_fp8 llama_bf16 --to bf16",
    ),
    "fp8-size": (
        "ckpttool fp8-size llama/config.json",
        "ckpttool fp8-size llama --tp-out 8 --kv fp8 --tokens 32768 --device-mem 80GB",
    ),
}
"""Command lines to begin with."""


class Command(TyperCommand):
    """A command whose help a terminal of 80 columns shows in sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*usage_words(self), "[OPTIONS]"]

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return sorted(super().get_help_option_names(ctx), key=len)  # they come out of a set, in any order

    def format_options(self, ctx: Any, formatter: Any) -> None:
        own = _OWN.get(self.name or "", ())
        heading = {n: about for about, names in _ABOUT for n in names.split() if n not in own}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        sections |= {about: [] for about, _ in _ABOUT}
        parameters: list[Any] = self.get_params(ctx)
        for p in parameters:
            if getattr(p, "hidden", False):
                continue
            if is_option(p):
                value = "" if p.is_flag else f" {p.metavar}"
                sections[heading.get(p.name, "Options")].append((", ".join(p.opts) + value, described(p)))
            else:
                sections["Arguments"].append((p.metavar, p.help or ""))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for line in EXAMPLES.get(self.name or "", ()):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


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
    notes = [(option.help or "").removesuffix(".")]
    if option.multiple:
        notes.append("can be repeated")
    if option.default not in (None, False, "", ()) and option.show_default:
        notes.append(f"default: {option.default}")
    return "; ".join(notes) + "."
