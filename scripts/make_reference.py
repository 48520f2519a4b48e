"""Write what follows from the code in docs/: python scripts/make_reference.py

    docs/formats.md                             the formats, and what each can hold, from their capabilities
    docs/reference.md                           the commands, and every option once, from the command line itself
    docs/errors.md, docs/findings.md            what `ckpttool explain` prints, from ckpttool/report/explained/
    docs/layouts/namings.md, docs/layouts.md    the families of each naming; those as transformers cuts

A table stands between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of a page is left as it is.
tests/docs/test_reference.py fails when a page is not up to date. Completion files and manual pages, which say the same
of the command line, come from make_share.py, which is run, too.
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


def option_row(option: Any) -> str:
    """An option with all of its spellings, and what it does."""
    from ckpttool.cli.help import described

    names = sorted((*option.opts, *option.secondary_opts), key=lambda o: (not o.startswith("--"), len(o)))
    shown = ", ".join(f"`{o}{value_of(option)}`" if i == 0 else f"`{o}`" for i, o in enumerate(names))
    return f"| {shown} | {cell(described(option))} |"


def visible() -> list[tuple[str, Any]]:
    """Each command that can be called, without `ckpttool` itself."""
    from typer.main import get_command

    from ckpttool.cli.app import app

    return command_tree(get_command(app))[1:]


def guide_of(word: str) -> str:
    """The guide to a command, below docs/; it may have a former name. "" where there is none."""
    from ckpttool.cli.help import ALIASES

    docs = ROOT / "docs"
    names = [word, *(old for old, new in ALIASES.items() if new == word)]
    found = [
        path for name in names for path in (docs / f"{name}.md", *sorted(docs.glob(f"*/{name}.md"))) if path.exists()
    ]
    return str(found[0].relative_to(docs)) if found else ""


def commands() -> str:
    """The commands, with their guides and what a command line cannot do without."""
    from ckpttool.cli.help import usage_words

    lines = ["| command | what it does |", "| --- | --- |"]
    for name, command in visible():
        guide = guide_of(name.removeprefix("ckpttool "))
        called = f"[`{name}`]({guide})" if guide else f"`{name}`"
        words = " ".join(usage_words(command)).replace("|", "\\|")
        lines.append(f"| {called} `{words}` | {cell(command.help or '')} |")
    return "\n".join(lines)


def options() -> str:
    """Every option once, by the headings of ``--help``, with the commands that have it."""
    from ckpttool.cli.help import is_option, sections, titles

    rows: dict[str, dict[str, list[str]]] = {}
    every = [name.removeprefix("ckpttool ") for name, command in visible() if len(command.params) > 7]
    for name, command in visible():
        word = name.removeprefix("ckpttool ")
        for title, parameters in sections(word, command.params, common=False).items():
            for p in filter(is_option, parameters):
                rows.setdefault(title, {}).setdefault(option_row(p), []).append(word)
    lines = []
    for title in sorted(rows, key=[*titles()].index):
        lines += ["", f"### {title}", "", "| option | meaning | commands |", "| --- | --- | --- |"]
        lines += [f"{row} {having(words, every)} |" for row, words in rows[title].items()]
    return "\n".join(lines[1:])


def having(words: list[str], every: list[str]) -> str:
    """The commands that have an option, as few words as say it: "all", "all but x", or their names."""
    lacking = [word for word in every if word not in words]
    if not lacking:
        return "all"
    return f"all but {', '.join(lacking)}" if len(lacking) <= 3 and {*words} <= {*every} else ", ".join(words)


def families() -> str:
    """A row for each naming: the built-in families that have it."""
    import yaml

    having: dict[str, list[str]] = {}
    for path in sorted((ROOT / "ckpttool" / "layout" / "families").glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        taken = data.get("extends", {}).get("namings", [])
        for naming in dict.fromkeys([*taken, *data.get("namings", {})]):
            having.setdefault(naming, []).append(data["family"])
    rows = [f"| `{name}` | {', '.join(f'`{f}`' for f in having[name])} |" for name in sorted(having)]
    return "\n".join(["| naming | families |", "| --- | --- |", *rows])


def generated() -> str:
    """The families as transformers cuts: those of models that have no other one, and the others."""
    from ckpttool.layout.files import builtin

    by_hand = {m for f in builtin().values() if "/" not in f.name for m in f.chosen_by["model_types"]}
    found = {f.name: not f.chosen_by["model_types"].isdisjoint(by_hand) for f in builtin().values() if "/" in f.name}
    rows = ["| | `--family` |", "| --- | --- |"]
    for words, other in (("chosen by config.json", False), ("with `--family` only", True)):
        rows.append(f"| {words} | " + ", ".join(f"`{n}`" for n, has in sorted(found.items()) if has == other) + " |")
    return "\n".join(rows)


SOFTWARE = {
    "hf": "Hugging Face: safetensors, shards and an index",
    "ranks": "one safetensors file for each rank; other software's, too",
    "deepseek": "DeepSeek's inference code",
    "vllm": "vLLM's sharded state",
    "trtllm": "TensorRT-LLM",
    "unified": "PaddleNLP, PaddleFormers",
    "hybrid": "PaddleNLP, PaddleFormers",
    "zcc": "PaddleFormers, PaddleNLP: zero-cost checkpoints",
    "flex": "PaddleFormers, Paddle",
    "pdparams": "one file of `paddle.save`",
    "program": "Paddle's exports for inference",
    "torch-bin": "PyTorch: `.bin`, `.pt`, `.pth`, `.ckpt`",
    "meta": "Llama and Mistral as published",
    "dcp": "torch.distributed.checkpoint: FSDP2, HSDP, torchtitan, accelerate",
    "fsdp": "FSDP's DTensors: verl and others",
    "bytecheckpoint": "ByteCheckpoint",
    "deepspeed": "DeepSpeed: ZeRO 1, 2 and 3",
    "universal": "DeepSpeed's universal checkpoints",
    "gguf": "llama.cpp: F32, F16, BF16, Q8_0",
    "megatron-dist": "Megatron Core: dist checkpoints, NeMo",
    "megatron": "Megatron Core: a folder for each rank",
    "diffusers": "pipelines of several models",
    "sentence-transformers": "directories of several models",
}
"""Whose a format is: all else that the table says of it, the code knows."""
STATES = {"optimizer": "yes", "ema": "EMA", "adapter": "adapters"}


def formats() -> str:
    """A row for each format: whether it is read and written, and what it can hold."""
    from ckpttool.formats.parts import MultiPart
    from ckpttool.formats.registry import READERS, WRITERS

    rows = ["| format | of | read | written | optimizer | ranks |", "| --- | --- | --- | --- | --- | --- |"]
    for name, format_ in READERS.items():
        of = format_.capabilities
        states = [word for component, word in STATES.items() if component in of.components]
        if of.optimizer_beside:
            states.append("`optimizer.pt`")
        cut = of.meshes or ("whole tensors" if name in WRITERS else "as saved")
        if of.optimizer_shards:
            cut += "; sharded optimizer" if of.meshes else ", in any number of shards"
        written = "yes" if name in WRITERS else "as it was" if isinstance(format_, MultiPart) else ""
        rows.append(f"| `{name}` | {SOFTWARE[name]} | yes | {written} | {', '.join(states)} | {cut} |")
    return "\n".join(rows)


def explained(page: str, *, examples: bool = True) -> str:
    """The texts of `ckpttool explain` that a page has, as its sections; without their examples where it has none."""
    from ckpttool.report.explained import PAGES
    from ckpttool.report.explained import page as text_of

    texts = [text_of(name).partition("\n**Next:**")[0] for name, where in PAGES.items() if where == page]
    if not examples:
        texts = [without_examples(text) for text in texts]
    return "\n\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE).strip() for text in texts)


def without_examples(text: str) -> str:
    """A text without its fenced blocks, the colons in front of them, and headings that nothing is left under."""
    prose = re.sub(r":?\n\n```.*?\n```", lambda m: "." if m[0].startswith(":") else "", text, flags=re.DOTALL)
    return re.sub(r"^## .*\n+(?=##|\Z)", "", prose, flags=re.MULTILINE)


TABLES = {
    "formats": ("docs/formats.md", formats),
    "errors": ("docs/errors.md", lambda: explained("docs/errors.md", examples=False)),
    "all findings": ("docs/findings.md", lambda: explained("docs/findings.md")),
    "commands": ("docs/reference.md", commands),
    "options": ("docs/reference.md", options),
    "families": ("docs/layouts/namings.md", families),
    "generated families": ("docs/layouts.md", generated),
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


def pages() -> dict[str, str]:
    """All pages that are generated, or have something generated in them, as they should be."""
    return {page: page_text(page) for page in sorted({where for where, _ in TABLES.values()})}


def main() -> None:
    """Bring the pages up to date."""
    for page, text in pages().items():
        path = ROOT / page
        changed = not path.exists() or text != path.read_text(encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{page}: {'changed' if changed else 'unchanged'}")
    from scripts import make_share

    make_share.main()


if __name__ == "__main__":
    main()
