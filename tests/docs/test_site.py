"""What makes the pages a site: every page is in the navigation, and a page means there what it means on a code host."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.docs.runner import ROOT, pages

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[site]'")

import markdown
from mkdocs.exceptions import PluginError

from scripts.site import hooks

DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """mkdocs.yml as plain data."""


CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # noqa: S506  # a SafeLoader
SECTIONS: dict[str, list[str]] = CONFIG["extra"]["sections"]
FOUND = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in pages() if path.is_relative_to(DOCS)}


def leaves(nav: object) -> list[str]:
    if isinstance(nav, dict):
        return [leaf for below in nav.values() for leaf in leaves(below)]
    return [leaf for one in nav for leaf in leaves(one)] if isinstance(nav, list) else [str(nav)]


def made(found: dict[str, str], sections: dict[str, list[str]] = SECTIONS) -> list[Any]:
    return hooks.navigation(found, SimpleNamespace(extra={"sections": sections}))


def test_every_page_is_in_the_navigation_once() -> None:
    named = leaves(made(FOUND))
    assert sorted(named) == sorted(["index.md", *FOUND])


def test_every_name_of_a_section_has_a_page() -> None:
    known = [*FOUND, *hooks.ABOVE_DOCS.values()]
    names = [name for listed in SECTIONS.values() for name in listed]
    assert [name for name in names if not any(hooks.within(page, name) for page in known)] == []


def test_navigation_follows_folders_and_links() -> None:
    found = {"a.md": "# A `b`\n\n[z](a/z.md) [y](a/y.md)\n", "a/y.md": "", "a/z.md": "", "a/x.md": "", "r.md": ""}
    assert made(found, {"How": ["a"], "Reference": ["r", "a/x"]}) == [
        {"Home": "index.md"},
        {"How": [{"A b": ["a.md", "a/z.md", "a/y.md"]}]},
        {"Reference": ["r.md", "a/x.md"]},
    ]
    with pytest.raises(PluginError, match=r"new\.md is in no section"):
        made(found | {"new.md": ""}, {"How": ["a"], "Reference": ["r"]})


@pytest.mark.parametrize(
    ("place", "target", "site"),
    [
        ("index.md", "docs/merge.md#methods", "merge.md#methods"),
        ("index.md", "LICENSE", "license.md"),
        ("index.md", "#start", "#start"),
        ("merge/methods.md", "../reshard.md", "../reshard.md"),
        ("merge/methods.md", "../../README.md#start", "../index.md#start"),
        ("ci.md", "../action.yml", "files/action.yml"),
        ("robustness/crashes.md", "../../tests/torture", None),
        ("ci.md", "https://example.org/x", "https://example.org/x"),
    ],
)
def test_links(place: str, target: str, site: str | None) -> None:
    assert hooks.site_target(place, target) == site


def test_links_in_code_stay() -> None:
    text = '[a](docs/merge.md) `[b](docs/reshard.md)`\n\n```text\n[c](docs/formats.md)\n```\n<img src="docs/images">\n'
    want = text.replace("(docs/merge.md)", "(merge.md)").replace('"docs/images"', '"images"')
    assert hooks.replaced(text, lambda target: hooks.site_target("index.md", target)) == want


def skeleton(html: str) -> list[str]:
    """The tags of what carries meaning, in their order; and the words."""
    html = re.sub(r"<a class=\"headerlink\".*?</a>|<!--.*?-->", "", html, flags=re.DOTALL)
    kept = re.findall(
        r"<(/?(?:ul|ol|li|table|tr|pre|h[1-6]|blockquote|a|em|strong|img)\b)[^<>]*>|([^<>]+)|<[^>]*>", html
    )
    return [word for tag, text in kept for word in ([tag] if tag else unescape(text).split())]


def both(text: str) -> tuple[list[str], list[str]]:
    host = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    ours = markdown.markdown(
        text,
        extensions=[hooks.CodeHost(), "attr_list", "md_in_html", "tables", "fenced_code", "toc"],
        extension_configs={"toc": {"slugify": hooks.slug}},
    )
    return skeleton(ours), skeleton(host)


@pytest.mark.thorough
@pytest.mark.parametrize("page", [*FOUND, "../README.md", "../CHANGELOG.md"])
def test_a_page_is_what_a_code_host_shows(page: str) -> None:
    ours, host = both((DOCS / page).read_text(encoding="utf-8"))
    assert ours == host


def test_what_differs_between_the_two_is_seen() -> None:
    nested = "- a\n  - b\n- d\n\ntext\n- e\n\n| a | b |\n| --- | --- |\n| `x\\|y` | z |\n"
    ours, host = both(nested)
    assert ours == host
    plain = skeleton(markdown.markdown(nested, extensions=["tables"]))
    assert plain != host
