"""Write the tables of docs/ that follow from the code: python scripts/make_reference.py

    docs/reference.md   every command, argument and option, from the command line itself
    docs/layouts/families.md, two-ways.md    the built-in families, from their files; those as transformers cuts

A table stands between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of a page is left as it is.
tests/docs/test_reference.py fails when a page is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"


def command_tree(command: Any, name: str = "ckpttool") -> list[tuple[str, Any]]:
    """Each command that a user can call, with the words that call it."""
    found = [(name, command)]
    for word, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            found += command_tree(child, f"{name} {word}")
    return found


def cell(text: str) -> str:
    """Text for a cell of a Markdown table; `<` would begin HTML and `*` emphasis."""
    return re.sub(r"([|<*])", r"\\\1", " ".join(text.split()))


def value_of(parameter: Any) -> str:
    """What stands behind an option: ` N`, ` SIZE`, or nothing for a switch."""
    if getattr(parameter, "is_flag", False):
        return ""
    if parameter.metavar:
        return " " + str(parameter.metavar).replace("|", "\\|")
    kind = parameter.type_descriptor.annotation
    return " N" if kind is int else " X" if kind is float else " PATH" if kind is Path else " TEXT"


def option_rows(command: Any) -> list[str]:
    """A row for each option of a command."""
    from ckpttool.cli.help import described

    rows = []
    for p in command.params:
        if getattr(p, "hidden", False) or not p.opts[0].startswith("-"):
            continue
        names = sorted((*p.opts, *p.secondary_opts), key=lambda o: (not o.startswith("--"), len(o)))
        shown = ", ".join(f"`{o}{value_of(p)}`" if i == 0 else f"`{o}`" for i, o in enumerate(names))
        text = cell(described(p))
        rows.append(f"| {shown} | {text} |")
    return rows


def commands() -> str:
    """Usage, arguments and options of every command."""
    from typer.main import get_command

    from ckpttool.cli.app import app
    from ckpttool.cli.help import usage_words

    blocks = []
    for name, command in command_tree(get_command(app)):
        group = hasattr(command, "commands")
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        words = [name, *(["COMMAND"] if group else []), *usage_words(command), "[OPTIONS]"]
        lines = [f"### {name}", "", "```", " ".join(words), "```", "", cell(command.help or ""), ""]
        if group:
            lines += ["| command | |", "| --- | --- |"]
            for word, child in command.commands.items():
                if not child.hidden:
                    anchor = f"{name}-{word}".replace(" ", "-")
                    lines.append(f"| [`{word}`](#{anchor}) | {cell(child.help or '')} |")
            lines.append("")
        if arguments:
            lines += ["| argument | |", "| --- | --- |"]
            lines += [f"| `{p.metavar or p.name.upper()}` | {cell(p.help or '')} |" for p in arguments]
            lines.append("")
        lines += ["| option | |", "| --- | --- |", *option_rows(command), "| `--help`, `-h` | Show the options. |"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def families() -> str:
    """A row for each built-in family: what chooses it, and which namings it has."""
    import yaml

    rows = ["| family | `model_type` | `architectures` | namings |", "| --- | --- | --- | --- |"]
    for path in sorted((ROOT / "ckpttool" / "layout" / "families").glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        taken = data.get("extends", {}).get("namings", [])
        namings = dict.fromkeys(["hf", *taken, *data.get("namings", {})])
        lists = (data.get("model_types", []), data.get("architectures", []), namings)
        rows.append(f"| `{data['family']}` | " + " | ".join(", ".join(f"`{x}`" for x in part) for part in lists) + " |")
    return "\n".join(rows)


def generated() -> str:
    """The families as transformers cuts: those of models that have no other one, and the others."""
    from ckpttool.layout.files import builtin

    by_hand = {m for f in builtin().values() if "/" not in f.name for m in f.chosen_by["model_types"]}
    found = {f.name: not f.chosen_by["model_types"].isdisjoint(by_hand) for f in builtin().values() if "/" in f.name}
    rows = ["| | `--family` |", "| --- | --- |"]
    for words, other in (("chosen by config.json", False), ("with `--family` only", True)):
        rows.append(f"| {words} | " + ", ".join(f"`{n}`" for n, has in sorted(found.items()) if has == other) + " |")
    return "\n".join(rows)


TABLES = {
    "commands": ("docs/reference.md", commands),
    "families": ("docs/layouts/families.md", families),
    "generated families": ("docs/layouts/two-ways.md", generated),
}


def with_table(text: str, name: str, table: str) -> str:
    """The page with one table replaced. Exits when the page has no place for it."""
    begin, end = BEGIN.format(name), END.format(name)
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        sys.exit(f"error: the page has no `{begin}` ... `{end}`")
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


def page_text(page: str, root: Path = ROOT) -> str:
    """A page with its tables as they should be."""
    text = (root / page).read_text(encoding="utf-8")
    for name, (where, table) in TABLES.items():
        if where == page:
            text = with_table(text, name, table())
    return text


def main() -> None:
    """Bring the pages up to date."""
    for page in sorted({where for where, _ in TABLES.values()}):
        path, text = ROOT / page, page_text(page)
        changed = text != path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        print(f"{page}: {'changed' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
