"""The pages name every command and option that there is, no other, and their links lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.main import get_command

from tests.docs.runner import ROOT, blocks, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

# Options of other programs, or of none, that the pages name between backticks.
MEGATRON = (
    "ckpt-format", "dist-ckpt-optim-fully-reshardable", "dist-ckpt-strictness", "finetune",
    "make-vocab-size-divisible-by", "moe-grouped-gemm", "no-load-optim", "no-load-rng", "overlap-grad-reduce",
    "override-opt-param-scheduler", "norm-epsilon", "qk-layernorm", "transformer-impl",
    "use-checkpoint-args", "use-distributed-optimizer",
)  # fmt: skip
FOREIGN_OPTIONS = {f"--{name}" for name in MEGATRON}

HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
SPAN = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def command_tree(command: object, name: str = "ckpttool") -> Iterator[tuple[str, object]]:
    """Each command that a user can call, with the words that call it; hidden ones and their children are not shown."""
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from command_tree(child, f"{name} {word}")


def options(command: object) -> list[str]:
    """What a command accepts, long and short, on and off."""
    return [
        option
        for parameter in getattr(command, "params", [])
        if not getattr(parameter, "hidden", False)
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    ]


@cache
def tool() -> list[tuple[str, object]]:
    """Each command of the tool."""
    from ckpttool.cli.app import app

    return list(command_tree(get_command(app)))


def mentions(text: str, words: str) -> bool:
    """Whether the text has these words, whole: `--tp-out` does not mention `--tp`."""
    # A pattern that begins with the words themselves is looked for much faster than one that begins with what precedes.
    literal = re.escape(words)
    return re.search(rf"{literal}(?<![\w-]{literal})(?![\w-])", text) is not None


def undocumented(commands: list[tuple[str, object]], text: str) -> list[str]:
    """Commands and options that the text does not mention."""
    names = [name for name, command in commands if not mentions(text, name)]
    return names + [
        f"{name} {option}" for name, command in commands for option in options(command) if not mentions(text, option)
    ]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    lines = text.splitlines()
    for block in blocks(text):
        for number in range(block.line - 2, min(block.line + len(block.lines), len(lines))):
            lines[number] = ""
    return "\n".join(lines)


def unknown_options(commands: list[tuple[str, object]], text: str) -> set[str]:
    """Options between backticks that no command accepts."""
    known = {option for _, command in commands for option in options(command)} | {"--help", "-h"}
    spans = (span for span in SPAN.findall(prose(text)) if span.startswith(("-", "ckpttool ")))
    return {option for span in spans for option in OPTION.findall(span)} - known - FOREIGN_OPTIONS


@cache
def anchors(text: str) -> set[str]:
    """What a link into a page can name: its headings, spelled the way code hosts do, and explicit anchors."""
    seen: Counter[str] = Counter()
    found = set(ANCHOR.findall(text))
    for heading in HEADING.findall(prose(text)):
        plain = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path, root: Path) -> list[str]:
    """Links of a page to files that are not there, or to headings that those do not have."""
    text = page.read_text(encoding="utf-8")
    # A link between backticks is an example of one.
    readable = SPAN.sub("", prose(text))
    broken = []
    for link in (*LINK.findall(readable), *DEFINITION.findall(readable)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_relative_to(root.resolve()) or not target.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(f"{link}: no such heading there")
    return broken


def reference_text() -> str:
    """All pages of docs/, where every command and option must stand."""
    return "\n".join(path.read_text(encoding="utf-8") for path in pages() if path.parent != ROOT)


def test_every_command_and_option_is_documented() -> None:
    assert undocumented(tool(), reference_text()) == []


@pytest.mark.product(one_in=20)  # `make docs-check` looks at every page
@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_options_exist(page: Path) -> None:
    assert unknown_options(tool(), page.read_text(encoding="utf-8")) == set()


LINKING = [*pages(), *(path for path in (ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md") if path.exists())]


@pytest.mark.product(one_in=20)  # `make docs-check` looks at every page
@pytest.mark.parametrize("page", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, ROOT) == []


class Parameter:
    """Stands for an option of a command."""

    def __init__(self, *opts: str, off: tuple[str, ...] = ()) -> None:
        self.opts = opts
        self.secondary_opts = off


class Tool:
    """Stands for a command, or a group of them."""

    hidden = False

    def __init__(self, *params: Parameter, **commands: Tool) -> None:
        self.params = params
        self.commands = commands


FAKE = Tool(
    reshard=Tool(Parameter("--tp"), Parameter("--dry-run", "-n"), Parameter("--verify", off=("--no-verify",))),
    extract=Tool(lora=Tool(Parameter("SRC"))),
)


def test_undocumented_can_fail() -> None:
    text = "`ckpttool reshard --tp 2 --dry-run -n --verify --no-verify`, `ckpttool extract lora`"
    commands = list(command_tree(FAKE))
    assert undocumented(commands, text) == []
    assert undocumented(commands, text.replace("--tp ", "--tp-out ")) == ["ckpttool reshard --tp"]
    assert undocumented(commands, text.replace(" -n", "")) == ["ckpttool reshard -n"]
    assert undocumented(commands, text.replace(" --no-verify", "")) == ["ckpttool reshard --no-verify"]
    assert undocumented(commands, text.replace("extract lora", "extract")) == ["ckpttool extract lora"]


def test_unknown_options_can_fail() -> None:
    commands = list(command_tree(FAKE))
    assert unknown_options(commands, "`--tp 2`, `-n` and a dash - `a -1`\n\n```sh\nls --color\n```\n") == set()
    assert unknown_options(commands, "`--tq 2`, `ckpttool reshard -x`") == {"--tq", "-x"}


def test_broken_links_can_fail(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`: three!\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n")
    good = "[a](other.md#one-two-three) [b](#here) [c](other.md#same-1) [d](https://x.example/y) [e](<other.md>)\n"
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n{good}\n```\n[not](a-link)\n```\n`[nor](this)`\n\n[ref]: other.md#same\n")
    assert broken_links(page, tmp_path) == []
    bad = ["gone.md", "other.md#no-heading", "#gone", "../outside.md"]
    page.write_text("# Here\n\n" + " ".join(f"[x]({link})" for link in bad) + "\n\n[ref]: gone-too.md\n")
    assert [problem.split(": ")[0] for problem in broken_links(page, tmp_path)] == [*bad, "gone-too.md"]
