"""How mkdocs reads this repository: the pages, their navigation, their links and their Markdown.

The pages are written for a code host, where most people read them. Here they become a site without being changed:
README.md is the home page, links to files beside docs/ still lead somewhere, and lists, tables and headings mean what
they mean there. Nothing of this is a copy in the tree, so there is nothing to keep up to date.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from markdown import Markdown
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

ABOVE_DOCS = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "LICENSE": "license.md"}
"""Files of the repository that are pages of the site, too, and what they are called there."""

FILES = "files"
"""Folder of the site with the other files that pages link to."""

FENCE = re.compile(r" *(```+|~~~+)")
SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^)\s>]+)>?((?:\s+\"[^\"]*\")?)\s*\)")
ATTRIBUTE = re.compile(r"\b(src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^# (.+?)\s*#*$", re.MULTILINE)
GROUP = re.compile(
    r'(<nav class="md-nav" data-md-level="(\d+)" )aria-labelledby="\w+" aria-expanded="\w+"'
    r'(>\s*<label class="md-nav__title" for="\w+">\s*<span class="md-nav__icon md-icon"></span>\s*([^<]+?)\s*</label>)'
)
"""A group of the navigation in what the theme writes: its start, its title, and the words of that."""
ITEM = re.compile(r" *([-*+]|\d+\.) ")


# ---- pages -----------------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read Markdown as code hosts do."""
    config.markdown_extensions.insert(0, CodeHost())  # first: it makes the parser anew
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand above docs/, what pages link to outside of it, and the navigation."""
    for name, page in ABOVE_DOCS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        if name == "LICENSE":
            text = f"# License\n\n```text\n{text.strip()}\n```\n"
        files.append(File.generated(config, page, content=text))
    for path in sorted({path for page in files.documentation_pages() for path in outside(page)}):
        files.append(File.generated(config, f"{FILES}/{path}", abs_src_path=str(ROOT / path)))
    config.nav = navigation({file.src_uri: file.content_string for file in files.documentation_pages()}, config)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Make links lead to what they name, as seen from the page's place in the site."""
    place = page.file.src_uri
    return replaced(markdown, lambda target: site_target(place, target))


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Make the entry of a folder the page of its section; the theme knows it by the name `index`."""
    for page in nav.pages:
        if page.parent and page.parent.children and page.parent.children[0] is page and len(page.parent.children) > 1:
            folder = page.file.src_uri.removesuffix(".md")
            if any(p.file.src_uri.startswith(f"{folder}/") for p in nav.pages):
                page.file.name = "index"
    return nav


def on_post_page(output: str, **_: Any) -> str:
    """Name what the theme leaves without a name for a screen reader: the search, and the groups of the navigation."""
    search = 'data-md-component="search" role="dialog"'
    output = output.replace(search, f'{search} aria-label="Search"')
    return GROUP.sub(lambda m: f'{m[1]}aria-label="{"Section: " if m[2] == "1" else ""}{m[4]}"{m[3]}', output)


# ---- navigation ------------------------------------------------------------------------------------------------------


def navigation(pages: dict[str, str], config: MkDocsConfig) -> list[Any]:
    """The navigation: home, then each section with its pages; a folder's pages stand below the page of its name.

    `pages` has the text of each page by its place. Raises PluginError for a page that is in no section.
    """
    sections: dict[str, list[str]] = config.extra["sections"]
    names = {name: (title, at) for title, listed in sections.items() for at, name in enumerate(listed)}
    found: dict[str, dict[str, list[str]]] = {title: {} for title in sections}
    for page in pages:
        if page == "index.md":
            continue
        fitting = [name for name in names if within(page, name)]
        if not fitting:
            raise PluginError(f"{page} is in no section of the navigation: name it in mkdocs.yml under `sections`")
        name = max(fitting, key=len)
        found[names[name][0]].setdefault(name, []).append(page)
    nav: list[Any] = [{"Home": "index.md"}]
    for title, listed in sections.items():
        nav.append({title: [x for n in listed if n in found[title] for x in group(n, found[title][n], pages)]})
    return nav


def within(page: str, name: str) -> bool:
    """Whether a page is the one of this name or lies in the folder of this name."""
    return page == f"{name}.md" or page.startswith(f"{name}/")


def group(name: str, found: list[str], pages: dict[str, str]) -> list[Any]:
    """The entries of the navigation for the pages of one name: a page, or a group below the page of that name."""
    entry = f"{name}.md"
    if entry not in found:
        return sorted(found)
    linked = [site_target(entry, link.partition("#")[0]) for link in links(pages[entry])]
    below = sorted(set(found) - {entry}, key=lambda p: (linked.index(p) if p in linked else len(linked), p))
    return [{title_of(pages[entry]): [entry, *below]}] if below else [entry]


def title_of(text: str) -> str:
    """What the heading of a page says, without marks."""
    heading = HEADING.search(text)
    return re.sub(r"[`*]", "", heading[1]) if heading else "?"


# ---- links -----------------------------------------------------------------------------------------------------------


def replaced(text: str, target_of: Callable[[str], str | None]) -> str:
    """The text with each target of a link or picture replaced; a link that has none becomes what it says."""

    def link(match: re.Match[str]) -> str:
        mark, words, target, title = match.groups()
        words = LINK.sub(link, words)  # a picture that is a link
        to = target_of(target)
        return words if to is None else f"{mark}[{words}]({to}{title})"

    def attribute(match: re.Match[str]) -> str:
        return f'{match[1]}="{target_of(match[2]) or match[2]}"'

    return outside_code(text, lambda plain: ATTRIBUTE.sub(attribute, LINK.sub(link, plain)))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is no code changed: neither blocks nor spans between backticks."""
    parts: list[str] = []
    plain: list[str] = []
    fence = ""

    def flush() -> None:
        joined, spans = "".join(plain), list[str]()
        plain.clear()

        def keep(span: re.Match[str]) -> str:
            spans.append(span[0])
            return f"\0{len(spans) - 1}\0"

        changed = change(SPAN.sub(keep, joined))
        parts.append(re.sub(r"\0(\d+)\0", lambda m: spans[int(m[1])], changed))

    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if fence or mark:
            if not fence and mark:
                flush()
                fence = mark[1]
            elif mark and mark[1].startswith(fence):
                fence = ""
            parts.append(line)
        else:
            plain.append(line)
    flush()
    return "".join(parts)


def links(text: str) -> list[str]:
    """The targets of a text's links and pictures."""
    found: list[str] = []

    def collect(target: str) -> str:
        found.append(target)
        return target

    replaced(text, collect)
    return found


def in_repository(place: str, target: str) -> str | None:
    """The path in the repository of what a link of a page names; None for what is elsewhere or on the same page."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("#"):
        return None
    above = next((name for name, page in ABOVE_DOCS.items() if page == place), None)
    folder = "" if above else posixpath.join("docs", posixpath.dirname(place))
    return posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))


def site_target(place: str, target: str) -> str | None:
    """The same link on the site, relative to the page; None for a folder of the repository, which the site lacks."""
    path = in_repository(place, target)
    if path is None:
        return target
    _, sharp, anchor = target.partition("#")
    if path in ABOVE_DOCS:
        to = ABOVE_DOCS[path]
    elif path.startswith("docs/"):
        to = path.removeprefix("docs/")
    elif (ROOT / path).is_dir():
        return None
    else:
        to = f"{FILES}/{path}"
    return posixpath.relpath(to, posixpath.dirname(place) or ".") + sharp + anchor


def outside(page: File) -> set[str]:
    """The files beside docs/ that a page links to and that are no pages of the site."""
    paths = {in_repository(page.src_uri, target) for target in links(page.content_string)}
    return {p for p in paths if p and p not in ABOVE_DOCS and not p.startswith("docs/") and (ROOT / p).is_file()}


# ---- Markdown --------------------------------------------------------------------------------------------------------


def slug(text: str, separator: str) -> str:
    """The id of a heading, as code hosts make it."""
    plain = re.sub(r"<[^>]+>", "", unicodedata.normalize("NFC", text)).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


class CodeHost(Extension):  # type: ignore[misc]  # Python-Markdown has no types
    """Markdown as code hosts read it, where Python-Markdown differs and the pages make use of it."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # the name is Python-Markdown's
        """Lists nest by two columns; a list may follow a line; a table's cell may hold `a\\|b`."""
        md.tab_length = 2
        md.build_parser()  # its patterns know the width
        md.block_level_elements.append("picture")  # kept as it is, or backticks in an `alt` would be read as code
        md.preprocessors.register(Lines(md), "code-host", 27)  # before fenced blocks are taken out, at 25
        md.treeprocessors.register(Cells(md), "code-host", 15)


class Lines(Preprocessor):  # type: ignore[misc]  # Python-Markdown has no types
    """Puts the blank line in front of a list that follows a line of text."""

    def run(self, lines: list[str]) -> list[str]:
        found: list[str] = []
        fence = ""
        for line in lines:
            mark = FENCE.match(line)
            if mark and (not fence or mark[1].startswith(fence)):
                fence = "" if fence else mark[1]
            before = found[-1] if found else ""
            if not fence and ITEM.match(line) and before.strip() and not ITEM.match(before) and before[0] != " ":
                found.append("")
            found.append(line)
        return found


class Cells(Treeprocessor):  # type: ignore[misc]  # Python-Markdown has no types
    """Takes the backslash from `a\\|b` in a table's cell; a heading that says nothing becomes a cell that is empty."""

    def run(self, root: ET.Element) -> None:
        for head in root.iter("th"):
            if not head.text and not len(head):
                head.tag = "td"
        for tag in ("td", "th"):
            for code in (code for cell in root.iter(tag) for code in cell.iter("code")):
                code.text = AtomicString((code.text or "").replace("\\|", "|"))
