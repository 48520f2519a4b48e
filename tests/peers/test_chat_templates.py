"""The builtin chat templates against those of mergekit 0.1.5, rendered as transformers renders them.

chatml and mistral render the same text. mergekit's alpaca, exaone and llama3 break lines and indent where their file
does, which the formats of these models do not: but for white space, the texts are equal.
"""

from __future__ import annotations

import importlib.resources
from itertools import product
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ckpttool.vocabulary.chat import BUILTIN

ROLES = ("system", "user", "assistant", "user_context", "tool")
TALKS = [
    [{"role": role, "content": f" {role[0]}{i}\n{i} "} for i, role in enumerate(roles)]
    for n in range(1, 5)
    for roles in product(ROLES, repeat=n)
]
SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
EXACT = ("chatml", "mistral")


def theirs(name: str) -> str:
    return (importlib.resources.files("mergekit._data.chat_templates") / f"{name}.jinja").read_text(encoding="utf-8")


def rendered(template: str, talk: list[dict[str, Any]], *, more: bool) -> str | None:
    """None where the template refuses the talk."""
    try:
        texts, _ = render_jinja_template([talk], chat_template=template, add_generation_prompt=more, **SPECIAL)
    except jinja2.TemplateError:
        return None
    return str(texts[0])


def test_the_names_are_those_of_mergekit() -> None:
    files = importlib.resources.files("mergekit._data.chat_templates").iterdir()
    assert {f.name.removesuffix(".jinja") for f in files if f.name.endswith(".jinja")} == set(BUILTIN)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_templates_render_as_mergekits(name: str, more: bool) -> None:
    for talk in TALKS:
        ours, wanted = (rendered(t, talk, more=more) for t in (BUILTIN[name], theirs(name)))
        if name not in EXACT and ours is not None and wanted is not None:
            ours, wanted = ("".join(text.split()) for text in (ours, wanted))
        assert ours == wanted, talk
