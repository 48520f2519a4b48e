"""What Typer says of a command line that it cannot read, in the form of every other error, with a way out.

Its exceptions are told apart by their names and fields: their classes moved from click into Typer itself.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ckpttool.cli.help import is_option, usage_words
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_UNREADABLE: Any = typer.BadParameter.__base__
"""The base of all exceptions for an invalid command line."""

_INSTEAD = {
    ("drop-keys", "--remove-keys"): "patterns go after DST: ckpttool drop-keys SRC DST 'lm_head.*'",
    ("drop-keys", "-o"): "ckpttool drop-keys SRC DST 'lm_head.*'",
    ("merge", "--config"): "the recipe is the source: ckpttool merge recipe.yml -o DST",
    ("quantize", "--dtype"): "--to bf16 dequantizes, --scale-dtype is the dtype of scales, --code that of codes",
    ("size", "--dtype"): "--recipe sets the precision: bf16, block, nvfp4, ...",
    ("convert-json", "--verify"): "every conversion is verified",
    ("convert-json", "--dtype"): "bytes are converted as they are; ckpttool reshard --dtype casts",
    ("merge", "--html"): "--report FILE writes the report of a merge",
    (
        "merge",
        "--tokenizer-source",
    ): "set `tokenizer:` in a recipe; --vocab chooses the rows of embeddings",
    ("quantize", "--output"): "DST goes after SRC: ckpttool quantize SRC DST",
    ("quantize", "-o"): "DST goes after SRC: ckpttool quantize SRC DST",
    ("diff", "--dequantize"): "ckpttool quantize B MODEL --to bf16, then ckpttool diff A MODEL",
    ("inspect", "--tree"): "the tree is what inspect shows when no other view is asked for",
    ("reshard", "--output"): "DST goes after SRC: ckpttool reshard SRC DST",
    ("reshard", "-o"): "DST goes after SRC: ckpttool reshard SRC DST",
}
"""Options that another command has, or that people expect: what does it here."""

_MOVED = {
    "drop-keys": {
        "`ckpttool reshard SRC DST --remove-keys PATTERN {written}`": (
            "--to --tp-out --pp-out --ep-out --etp-out --pp-layout --rename --dtype --betas --max-shard-size"
            " --etp --sharding --also --select --rank-pattern --split"
        ),
        "`ckpttool reshard SRC DST --remove-keys PATTERN --split '{value}=none'`": "--replicate",
    },
    "merge": {
        "`ckpttool reshard MERGED DST {written}`, after the merge": "--betas --ranks-out --pp-layout --fuse --unfuse",
        "`ckpttool reshard SRC MODEL --to hf {written}`, before the merge": "--etp --rank-pattern --sharding --also",
    },
    "quantize": {
        "`ckpttool reshard SRC DST --requant RECIPE {written}`": (
            "--tp-out --pp-out --ep-out --etp-out --pp-layout --etp --sharding --also --rank-pattern --split --rename"
        ),
        "`ckpttool reshard SRC DST --requant RECIPE --split '{value}=none'`": "--replicate",
        "--scale-dtype f32:pow2": "--pow2",
    },
    "size": {
        "--gpu {value}": "--device-mem",
        "SRC is a model or its config.json; --pp-out, --ep-out and --etp-out are the ranks to plan": "--pp --ep --etp",
        "ckpttool reshard SRC MODEL {written} --to hf; or the config.json alone": "--select --rank-pattern --split",
    },
    "": {
        "--split '{value}=none'": "--replicate",
        "--sharding-out N:{value}": "--sharding-version",
        "set HF_HUB_OFFLINE=1": "--offline",
        "set CKPTTOOL_CONNECTIONS={value}; a smaller --memory makes fewer requests, too": "--connections",
    },
}
"""Former options, by what does it now; of every command under ""."""

_EVERYWHERE = {
    "--tp-out for the ranks of DST, --tp for those of SRC": "-tp --tensor-parallel-size --tp-size --tensor-parallel",
    "--pp-out for the stages of DST, --pp for those of SRC": "-pp --pipeline-parallel-size --pp-size",
    "--ep-out for the ranks of DST, --ep for those of SRC": "-ep --expert-parallel-size --ep-size",
    "leave it out: no GPU is used": "--cuda --gpu --device --low-cpu-memory --read-to-gpu --multi-gpu",
    "leave it out: tokenizers are copied with the model": "--copy-tokenizer --copy-files",
    "leave it out: files are read a piece at a time, and no code in them is run": (
        "--lazy-unpickle --lazy-loader --trust-remote-code --low-memory --safe-serialization --clone-tensors"
    ),
    "--missing base or --missing skip, when the models do not have the same tensors": "--allow-crimes",
    "use --max-shard-size": "--out-shard-size",
    "use --seed": "--random-seed",
    "use --card": "--write-model-card",
    "use --html": "--report",
    "use --requant RECIPE": "--quantize --quantization --quant --recipe",
    "use --dequant bf16": "--dequantize",
    "use --only": "--component --components --model-only",
    "use --filter": "--match --grep --pattern --include --name",
    "--tokens 32k for one sequence, --batch for several": "--context --context-length --ctx --seq-len --max-tokens",
    "the base model is a part of SOURCE: MODEL+ADAPTER": "--lora --adapter --lora-path",
}
"""Options of other tools, by what does it here."""
_OPTIONS_OF_OTHERS = {option: hint for hint, options in _EVERYWHERE.items() for option in options.split()}

_HERE = {
    "`ckpttool help`, or `ckpttool help COMMAND`": "usage man commands options",
    "`ckpttool --version`": "version",
    "`ckpttool inspect SRC`": "info show-info describe summary summarize tree view open print list-tensors",
    "`ckpttool inspect SRC --list`": "ls list tensors keys",
    "`ckpttool inspect SRC --show NAME[INDEX]`": "show cat dump head",
    "`ckpttool check SRC`": "validate validation lint fsck test audit scan sanity",
    "`ckpttool diff A B`": "compare comparison cmp equal difference delta",
    "`ckpttool check SRC`, `ckpttool diff A B`; reshard, merge and quantize check what they write with --verify": (
        "verify verification"
    ),
    "`ckpttool inspect SRC --stats`": "stat stats hist histogram",
    "`ckpttool inspect SRC --hash`": "hash checksum digest md5 sha256",
    "`ckpttool quantize SRC DST --recipe block`": (
        "quantise quant quantization fp8 fp8-quantize to-fp8 fp4 nvfp4 mxfp4 mxfp8"
    ),
    "`ckpttool quantize SRC DST --to bf16`": "dequantize dequantise dequant",
    "`ckpttool size SRC`": "sizes memory mem vram estimate du fit fits params fp8-mem",
    "`ckpttool reshard SRC DST --to FORMAT`; Paddle programs: `ckpttool convert-json`": "convert export translate save",
    "`ckpttool reshard SRC DST --tp-out N`": "split shard cut slice partition tp pp ep",
    "`ckpttool reshard SRC DST --dtype bf16`; to FP8: `ckpttool quantize SRC DST`": "cast dtype to-bf16 to-fp16 half",
    "`ckpttool reshard SRC DST --rename OLD=NEW`": "rename mv map",
    "`ckpttool merge RECIPE.yml -o DST`": "mergekit-yaml mergekit mergekit-multi mergekit-legacy run-recipe",
    "`ckpttool merge SRC -o DST` for shards of one model, `ckpttool merge A B -o DST` for several models": (
        "join unshard consolidate combine gather average soup merge-shards merge-lora lora"
    ),
    "`ckpttool drop-keys SRC DST PATTERN`": "drop remove delete rm prune strip filter",
    "`ckpttool inspect DIR --write-index`": "index reindex",
    "`ckpttool inspect FILE --header`": "header metadata",
}
"""Commands that other tools have, or that people expect, by the command that does it here."""
_COMMANDS_OF_OTHERS = {word: hint for hint, words in _HERE.items() for word in words.split()}


@contextmanager
def reworded() -> Iterator[None]:
    """Raise UsageError for what Typer refuses."""
    try:
        yield
    except _UNREADABLE as e:
        if type(e).__name__ == "NoArgsIsHelpError":  # that is the help itself
            raise
        raise _usage_error(e) from None


def _usage_error(e: Any) -> UsageError:
    """Typer's exception as one of ours."""
    kind, ctx = type(e).__name__, e.ctx
    command = ctx.command if ctx else None
    path = ctx.command_path if ctx else "ckpttool"
    name = path.rpartition(" ")[2]
    usage = " ".join((path, *usage_words(command)))
    if kind == "NoSuchOption":
        return _no_such_option(e.option_name, command, path, name)
    if kind == "BadOptionUsage" and "requires an argument" in e.message:
        return UsageError(f"{e.option_name} needs a value", hint=f"{e.option_name} VALUE; see `--help`")
    if kind == "MissingParameter" and e.param is not None:
        missing = e.param.opts[-1] if is_option(e.param) else e.param.metavar.removesuffix("...")
        return UsageError(f"{missing} is missing", hint=_with_output(name) if missing == "--output" else usage)
    if kind == "BadParameter" and e.param is not None:
        option = max(e.param.opts, key=len)
        return UsageError(f"{option} {_wrong(e.message, e.param.opts)}", hint=f"see `{path} --help`")
    if "unexpected extra argument" in e.message:
        words = e.message.rpartition("(")[2].removesuffix(")").split()
        shown = " ".join(words[:3]) + (" ..." if len(words) > 3 else "")
        return UsageError(
            f"there is more than {path} takes: {shown}",
            hint=f"{usage}; a checkpoint of several files is given by its directory, and patterns are"
            " quoted, or the shell puts file names in their place",
        )
    if "o such command" in e.message:
        return no_such_command(e.message.split("'")[1], command)
    return UsageError(e.format_message().rstrip("."), hint=f"see `{path} --help`")


def _options(command: Any) -> list[Any]:
    """The options of a command."""
    return [p for p in getattr(command, "params", ()) if is_option(p)]


def _no_such_option(option: str, command: Any, path: str, name: str) -> UsageError:
    known = [o for p in _options(command) for o in p.opts if o.startswith("--")]
    # Of `-tp 2` Typer sees `-t`.
    written = next((a for a in sys.argv if a.startswith(option) and not a.startswith("--")), option)
    wrong = written.partition("=")[0]
    long = "--" + written.lstrip("-").partition("=")[0].replace("_", "-").lower()
    if instead := _INSTEAD.get((name, wrong)) or _moved(name, wrong) or _repair(name, wrong):
        return UsageError(f"{name} has no option {wrong}", hint=instead)
    if name == "merge" and _is_method_parameter(long.removeprefix("--").replace("-", "_")):
        return UsageError(
            f"merge has no option {wrong}: it is a parameter of methods",
            hint=f"--param {long.removeprefix('--').replace('-', '_')}=VALUE",
        )
    if (hint := _OPTIONS_OF_OTHERS.get(long if wrong.startswith("--") else wrong)) and all(
        o in known for o in re.findall(r"--[a-z-]+", hint)
    ):
        return UsageError(f"{path} has no option {wrong}", hint=hint)
    close = [long] if long in known else _closest(long, known) if len(long) > 3 else []
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return UsageError(f"{path} has no option {wrong}", hint=f"{meant}`{path} --help` lists them")


def _moved(name: str, option: str) -> str:
    """The way to a former option of a command; "" where it had none of this name."""
    for group in (name, ""):
        for hint, options in _MOVED.get(group, {}).items():
            if option in options.split():
                written, given = _as_written(option)
                return hint.format(written=written, value=given or "VALUE")
    return ""


def _repair(name: str, option: str) -> str:
    """The command line for what convert-json did with headers and indexes; "" for another option."""
    if name != "convert-json" or option not in ("--header", "--index", "-o", "--output"):
        return ""
    words = iter(sys.argv[sys.argv.index(name) + 1 :])
    files: list[str] = []
    copy = dry = ""
    for word in words:
        if word in ("-o", "--output"):
            copy = f" -o {shlex.quote(next(words, 'NEW'))}"
        elif word in ("-n", "--dry-run"):
            dry = " --dry-run"
        elif not word.startswith("-"):
            files.append(shlex.quote(word))
    if "--index" in sys.argv:
        where = "".join(files[:1]) or "DIR"
        return (
            f"`ckpttool check {where}`" if "--check" in sys.argv else f"`ckpttool inspect {where} --write-index{dry}`"
        )
    first, second = (*files, "", "")[:2]
    if second.endswith(".json") and not first.endswith(".json"):
        return f"`ckpttool inspect {first} --header > {second}`"
    if second or first.endswith(".json"):
        return f"`ckpttool inspect {second or 'FILE.safetensors'} --set-header {first}{copy}{dry}`"
    return f"`ckpttool inspect {first or 'FILE'} --header`"


def _as_written(option: str) -> tuple[str, str]:
    """An option with the value that the command line gives it, and this value; "" for none."""
    for i, word in enumerate(sys.argv):
        name, equals, text = word.partition("=")
        if name == option:
            behind = sys.argv[i + 1] if i + 1 < len(sys.argv) else ""
            given = text if equals else "" if behind.startswith("-") else behind
            return f"{option} {shlex.quote(given)}" if given else option, given
    return option, ""


def _closest(option: str, known: Sequence[str]) -> list[str]:
    """Options like this one, the most alike first; those with the same letters before all others."""
    letters = option.replace("-", "")
    same = [o for o in known if o.replace("-", "") == letters] or [o for o in known if o.startswith(option)]
    return same[:3] or difflib.get_close_matches(option, known, n=2, cutoff=0.75)


def _with_output(name: str) -> str:
    """The command line as it was meant, when the last of several words is the one thing that is not there."""
    words = [w for w in sys.argv[sys.argv.index(name) + 1 :] if w] if name in sys.argv else []
    if len(words) > 1 and not any(w.startswith("-") for w in words) and not os.path.lexists(words[-1]):
        return f"did you mean `ckpttool {name} {shlex.join(words[:-1])} -o {shlex.quote(words[-1])}`?"
    return f"ckpttool {name} SOURCE... -o DST"


def _is_method_parameter(name: str) -> bool:
    from ckpttool.kernels.merge import METHODS

    return any(name in m.per_model or name in m.whole for m in METHODS.values())


def no_such_command(word: str, group: Any) -> UsageError:
    """The error for a word that is not a command, with the command that was meant."""
    names = list(group.commands)
    if hint := _COMMANDS_OF_OTHERS.get(word.replace("_", "-").lower()):
        return UsageError(f"there is no command `{word}`", hint=f"use {hint}")
    if os.path.lexists(word):
        return UsageError(
            f"there is no command `{word}`", hint=f"a command comes first: `ckpttool inspect {shlex.quote(word)}`"
        )
    close = difflib.get_close_matches(word.replace("_", "-").lower(), names, n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
    return UsageError(f"there is no command `{word}`", hint=f"{meant}commands: {', '.join(names)}")


def _wrong(message: str, options: Sequence[str]) -> str:
    """What is wrong with an option's value, in other words than the validator's."""
    words = iter(sys.argv)
    said = ""
    for word in words:
        name, equals, text = word.partition("=")
        if name in options:
            said = text if equals else next(words, "")
    if not message.startswith("Input should be "):  # older versions of Typer say it in other words
        return f"is `{said}`: {message.rstrip('.')}"
    what = message.removeprefix("Input should be ").partition(",")[0]
    for theirs, ours in (
        ("a valid integer", "a whole number"),
        ("a valid number", "a number"),
        ("greater than or equal to", "at least"),
        ("less than or equal to", "at most"),
    ):
        what = what.replace(theirs, ours)
    return f"is `{said}`, and must be {what}"
