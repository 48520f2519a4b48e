"""Write share/: what shells and `man` show of the command line: python scripts/make_share.py

    share/bash-completion/completions/ckpttool        words and values that complete without starting Python
    share/zsh/site-functions/_ckpttool
    share/fish/vendor_completions.d/ckpttool.fish
    share/man/man1/ckpttool.1, ckpttool-COMMAND.1     the text of `--help`

The wheel installs them below `share/` of the environment. They are checked in: a build then needs neither ckpttool's
dependencies nor a command that runs, and whoever packages it sees them. tests/test_share.py fails when they are not up
to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MADE = "made by scripts/make_share.py from the command line"
CHANGED = "2026-11-23"
"""The date of the manual pages. Of the day of the build it would differ from build to build."""
PATHS = {"SRC", "DST", "SOURCE...", "A", "B", "FILE", "DIR", "PATH", "OUT.json", "NAME|FILE"}
"""Metavariables in whose place a shell offers files."""
EXIT_STATUS = (
    ("0", "Done; with --check or --diff: nothing was found."),
    ("1", "Failed. Nothing is left where DST would have been."),
    ("2", "Invalid command line."),
    ("3", "The check failed, the checkpoints differ, or the model does not fit."),
    ("130", "Interrupted."),
)


@dataclass(frozen=True)
class Option:
    """An option as shells need it."""

    names: tuple[str, ...]
    about: str
    metavar: str
    values: tuple[str, ...]
    repeats: bool

    @property
    def files(self) -> bool:
        """Whether its value may be a file."""
        return self.metavar in PATHS


@dataclass(frozen=True)
class Command:
    """A command."""

    name: str
    about: str
    options: tuple[Option, ...]
    click: Any


def commands() -> list[Command]:
    """Every command, in the order of ``--help``, with its options in theirs."""
    from typer.main import get_command

    from ckpttool.cli.app import app

    found: dict[str, Any] = getattr(get_command(app), "commands", {})
    return [Command(n, short_help(c), tuple(options(c)), c) for n, c in found.items() if not c.hidden]


def short_help(command: Any) -> str:
    """What the command does, in a line."""
    return str(command.short_help or command.help or "").strip()


def options(command: Any) -> Iterator[Option]:
    """The options of a command, ``--help`` last."""
    from ckpttool.cli.help import HELP, described, is_option, sections

    context = command.make_context(command.name, [], resilient_parsing=True, help_option_names=["-h", "--help"])
    for parameters in sections(command.name, command.params).values():
        for p in filter(is_option, parameters):
            metavar = "" if p.is_flag else str(p.metavar)
            values = tuple(item.value for item in p.shell_complete(context, ""))
            yield Option((*p.opts, *p.secondary_opts), described(p), metavar, values, bool(p.multiple))
    yield Option(tuple(command.get_help_option_names(context)), HELP, "", (), repeats=False)


# -- bash


BASH = """\
# bash completion for ckpttool; {made}

_ckpttool() {{
    local IFS=$' \\t\\n' cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command='' word values=''
    # bash takes `--to=hf` for three words.
    if [[ $cur == '=' ]]; then
        cur=''
    elif [[ $prev == '=' ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ $word != -* ]]; then
            command=$word
            break
        fi
    done
    case "$command $prev" in
{values}
    esac
    if [[ -z $values ]]; then
        case $command in
        '') values='{commands}' ;;
{options}
        *) return ;;
        esac
        if [[ -n $command && $cur != -* ]]; then
            _ckpttool_files
            return
        fi
    fi
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
}}

_ckpttool_files() {{
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$cur"))
    compopt -o filenames 2>/dev/null
}}

complete -F _ckpttool ckpttool
"""


def bash(found: list[Command]) -> str:
    """Words by command and by the option in front."""
    cases: dict[str, list[str]] = {}
    for c in found:
        for o in c.options:
            if o.metavar:
                files = "_ckpttool_files; " if o.files else ""
                # Where both are possible, names come first, and files where no name begins so.
                words = f"values='{' '.join(o.values)}'"
                both = f'{words}; [[ -n $(compgen -W "$values" -- "$cur") ]] || {{ {files}return; }}'
                action = (both if files else words) if o.values else f"{files}return"
                cases.setdefault(action, []).extend(f"'{c.name} {name}'" for name in o.names)
    values = "\n".join(f"    {' | '.join(names)}) {action} ;;" for action, names in cases.items())
    words = "\n".join(f"        {c.name}) values='{' '.join(n for o in c.options for n in o.names)}' ;;" for c in found)
    first = " ".join([*(c.name for c in found), "--help", "--version"])
    return BASH.format(made=MADE, values=values, options=words, commands=first)


# -- zsh


def zsh(found: list[Command]) -> str:
    """Arguments of ``_arguments``, for each command."""
    lines = ["#compdef ckpttool", f"# zsh completion for ckpttool; {MADE}", "", "_ckpttool() {"]
    lines += [
        "  local curcontext=$curcontext state line",
        "  typeset -A opt_args",
        "  local -a commands",
        "  commands=(",
    ]
    lines += [f"    {quoted(f'{c.name}:{c.about}')}" for c in found]
    lines += ["  )", "  _arguments -C \\"]
    lines += ["    '(- *)'{-h,--help}'[Show the options.]' '(- *)'{-V,--version}'[Print the version.]' \\"]
    lines += ["    '1:command:->command' '*::argument:->arguments' && return", "  case $state in"]
    lines += ["  command) _describe -t commands command commands ;;", "  arguments)", "    case $words[1] in"]
    for c in found:
        specs = [zsh_option(o, name) for o in c.options for name in o.names]
        specs += ["'*:file:_files'"]
        lines += [
            f"    {c.name})",
            "      _arguments -S \\",
            *(f"        {s} \\" for s in specs[:-1]),
            f"        {specs[-1]}",
        ]
        lines += ["      ;;"]
    lines += ["    esac", "    ;;", "  esac", "}", ""]
    lines += ["# The first completion loads this file as the function itself."]
    lines += [
        "if [[ $funcstack[1] == _ckpttool ]]; then",
        '  _ckpttool "$@"',
        "else",
        "  compdef _ckpttool ckpttool",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Text as a word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def zsh_option(o: Option, name: str) -> str:
    """An option under one of its names."""
    about = re.sub(r"([\[\]:\\])", r"\\\1", o.about)
    others = f"({' '.join(o.names)})" if len(o.names) > 1 and not o.repeats else ""
    value = ""
    if o.metavar:
        name += "=" if name.startswith("--") else "+"
        message = o.metavar.replace(":", "\\:")
        words = f"({' '.join(o.values)})" if o.values else ""
        both = f"_alternative 'names\\:name\\:{words}' 'files\\:file\\:_files'"
        value = f":{message}:" + (both if words and o.files else "_files" if o.files else words or " ")
    return quoted(f"{'*' if o.repeats else others}{name}[{about}]{value}")


# -- fish


def fish(found: list[Command]) -> str:
    """A line for each option of each command."""
    start = "complete -c ckpttool"
    lines = [f"# fish completion for ckpttool; {MADE}", "", f"{start} -f"]
    lines += [f"{start} -n __fish_use_subcommand -s h -l help -d 'Show the options.'"]
    lines += [f"{start} -n __fish_use_subcommand -s V -l version -d 'Print the version.'"]
    for c in found:
        when = f"{start} -n '__fish_seen_subcommand_from {c.name}'"
        lines += ["", f"{start} -n __fish_use_subcommand -a {c.name} -d {fish_quoted(c.about)}", f"{when} -F"]
        for o in c.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in o.names)
            kind = (" -r -F" if o.files else " -x") if o.metavar else ""
            words = f" -a '{' '.join(o.values)}'" if o.values else ""
            lines.append(f"{when} {names}{kind}{words} -d {fish_quoted(o.about)}")
    return "\n".join(lines) + "\n"


def fish_quoted(text: str) -> str:
    """Text in fish's single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# -- man


def roff(text: str) -> str:
    """Text in which nothing is a request or an escape."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text)


def page(name: str, about: str, body: Iterable[str], others: Iterable[str]) -> str:
    """A manual page."""
    from ckpttool.version import __version__

    head = [f'.\\" {MADE}', f'.TH {roff(name.upper())} 1 {CHANGED} "ckpttool {__version__}" "User Commands"']
    head += [".nh", ".ad l"]  # words are copied from here: no hyphens in them, and no wide gaps between them
    head += [".SH NAME", f"{roff(name)} \\- {roff(about.rstrip('.'))}"]
    status = [".SH EXIT STATUS", *(line for code, text in EXIT_STATUS for line in (".TP", f".B {code}", roff(text)))]
    listed = sorted(others)
    see = [".SH SEE ALSO", *(f".BR {roff(n)} (1){',' if n != listed[-1] else ''}" for n in listed)]
    return "\n".join([*head, *body, *status, *see]) + "\n"


def synopsis(words: str) -> list[str]:
    """What is written."""
    return [".SH SYNOPSIS", f".B {roff(words)}"]


def examples(lines: Iterable[str]) -> list[str]:
    """Command lines, as they are."""
    return [".SH EXAMPLES", ".EX", *(roff(line) for line in lines), ".EE"]


def option_lines(p: Any) -> tuple[str, str]:
    """An option and what it does."""
    from ckpttool.cli.help import described

    names = ", ".join(f"\\fB{roff(n)}\\fR" for n in (*p.opts, *p.secondary_opts))
    return names + ("" if p.is_flag else f" \\fI{roff(p.metavar)}\\fR"), roff(described(p))


def command_page(c: Command, names: list[str]) -> str:
    """The page of a command: the sections of its ``--help``."""
    from ckpttool.cli.help import EXAMPLES, NOTES, is_option, sections, usage_words

    body = synopsis(" ".join(["ckpttool", c.name, *usage_words(c.click), "[OPTIONS]"]))
    body += [".SH DESCRIPTION", roff(c.click.help or c.about)]
    for title, parameters in sections(c.name, c.click.params).items():
        if title == "Arguments":
            body.append(".SH ARGUMENTS")
        else:
            body += [".SH OPTIONS"] * (".SH OPTIONS" not in body) + [f".SS {roff(title)}"]
        for p in parameters:
            body += [".TP", *(option_lines(p) if is_option(p) else (f"\\fI{roff(p.metavar)}\\fR", roff(p.help or "")))]
    for title, text in NOTES.get(c.name, {}).items():
        body += [f".SH {roff(title.upper())}", roff(text.replace("\u2011", "-"))]
    body += examples(EXAMPLES.get(c.name, ()))
    return page(f"ckpttool-{c.name}", c.about, body, (n for n in names if n != f"ckpttool-{c.name}"))


def main_page(found: list[Command], names: list[str]) -> str:
    """The page of the tool: its commands by task."""
    from ckpttool.cli.app import app
    from ckpttool.cli.help import EXAMPLES, TASKS

    body = [*synopsis("ckpttool COMMAND [ARGUMENTS] [OPTIONS]"), ".SH DESCRIPTION", roff(str(app.info.help))]
    about = {c.name: c.about for c in found}
    body.append(".SH COMMANDS")
    for task, some in TASKS:
        body.append(f".SS {roff(task)}")
        for name in some:
            body += [".TP", f".BR ckpttool\\-{roff(name)} (1)", roff(about[name])]
    body += [".SH OPTIONS", ".TP", "\\fB\\-h\\fR, \\fB\\-\\-help\\fR", "Show the commands; of a command its options."]
    body += [".TP", "\\fB\\-V\\fR, \\fB\\-\\-version\\fR", "Print the version."]
    body += examples(lines[0] for name in about if (lines := EXAMPLES.get(name)))
    return page("ckpttool", "reshard, merge and inspect checkpoints of large models", body, names[1:])


def generated() -> dict[str, str]:
    """Path below share/ -> text."""
    found = commands()
    names = ["ckpttool", *(f"ckpttool-{c.name}" for c in found)]
    pages = {f"man/man1/ckpttool-{c.name}.1": command_page(c, names) for c in found}
    return {
        "bash-completion/completions/ckpttool": bash(found),
        "zsh/site-functions/_ckpttool": zsh(found),
        "fish/vendor_completions.d/ckpttool.fish": fish(found),
        "man/man1/ckpttool.1": main_page(found, names),
        **pages,
    }


def main() -> None:
    """Bring share/ up to date."""
    files = generated()
    for path in sorted(p for p in (ROOT / "share").rglob("*") if p.is_file()):
        if str(path.relative_to(ROOT / "share")) not in files:
            path.unlink()
            print(f"share/{path.relative_to(ROOT / 'share')}: removed")
    for name, text in files.items():
        path = ROOT / "share" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        path.write_text(text, encoding="utf-8")
        print(f"share/{name}: {'changed' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
