"""Choosing tensors by name: globs, or regular expressions behind ``re:``.

In a glob ``*`` crosses dots, ``?`` is one character, ``[...]`` a set, ``{a,b}`` alternatives; the whole name must
match. ``re:`` patterns search. A pattern that matches nothing is an error with the nearest name, because a typo in
``--remove-keys`` would otherwise remove nothing and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from ckpttool.errors import UsageError


def glob_regex(pattern: str) -> str:
    """The regular expression (unanchored source) that a glob means. Raises UsageError for unbalanced braces."""
    out: list[str] = []
    depth = 0
    i = 0
    while i < len(pattern):
        c = pattern[i]
        if c == "*":
            out.append(".*")
        elif c == "?":
            out.append(".")
        elif c == "[" and (end := pattern.find("]", i + 2)) > 0:
            body = pattern[i + 1 : end].replace("\\", "\\\\")
            out.append("[" + ("^" + body[1:] if body[0] in "!^" else body) + "]")
            i = end
        elif c == "{":
            depth += 1
            out.append("(?:")
        elif c == "}" and depth:
            depth -= 1
            out.append(")")
        elif c == "," and depth:
            out.append("|")
        else:
            out.append(re.escape(c))
        i += 1
    if depth:
        raise UsageError(f"pattern `{pattern}` has an unclosed {{")
    return "".join(out)


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A compiled pattern whose ``search`` decides. Raises UsageError when it is empty or not valid."""
    if not pattern or pattern == "re:":
        raise UsageError("an empty pattern matches nothing", hint="quote the pattern so that the shell leaves it alone")
    try:
        if pattern.startswith("re:"):
            return re.compile(pattern[3:])
        return re.compile(rf"\A(?:{glob_regex(pattern)})\Z", re.DOTALL)
    except re.error as e:
        raise UsageError(f"pattern `{pattern}` is not valid: {e}") from None


def matching(patterns: Iterable[str], names: Collection[str], *, option: str) -> set[str]:
    """All names that any pattern matches. Raises UsageError when one pattern matches none, with the nearest name."""
    found: set[str] = set()
    for pattern in patterns:
        rx = compile_pattern(pattern)
        hits = {n for n in names if rx.search(n)}
        if not hits:
            raise UsageError(f"{option} `{pattern}` matches no tensor", hint=nearest_hint(pattern, names))
        found |= hits
    return found


def nearest_hint(pattern: str, names: Collection[str]) -> str:
    """``did you mean `...`?`` with the name most like the pattern."""
    import difflib

    plain = re.sub(r"[*?\[\]{}\\^$]|\Are:", "", pattern)
    sample = list(names)[:20000]
    close = difflib.get_close_matches(plain, sample, n=1, cutoff=0.0)
    if not close:
        return "the checkpoint has no tensors"
    return f"did you mean `{close[0]}`? `ckpttool inspect --list` shows every name; * crosses dots"


def renamer(rules: Iterable[str]) -> list[tuple[re.Pattern[str], str, str]]:
    """Compile ``OLD=NEW`` rules; in a glob rule each ``*`` of NEW takes what the same ``*`` of OLD matched.

    Returns (pattern, replacement, rule text). ``re:OLD=NEW`` is a regular-expression substitution with ``\\1``.
    """
    out = []
    for rule in rules:
        regex = rule.startswith("re:")
        old, eq, new = rule.removeprefix("re:").partition("=")
        if not eq or not old or not new:
            raise UsageError(f"--rename `{rule}` is not OLD=NEW")
        if regex:
            try:
                regex_of_rule = re.compile(old)
                regex_of_rule.sub(new, "")  # a group that does not exist shows here
                out.append((regex_of_rule, new, rule))
            except (re.error, IndexError) as e:
                raise UsageError(f"--rename `{rule}` is not valid: {e}") from None
            continue
        if old.count("*") != new.count("*"):
            raise UsageError(
                f"--rename `{rule}`: both sides need the same number of *",
                hint="for anything else use re:OLD=NEW with \\1",
            )
        source = glob_regex(old).replace(".*", "(.*)")
        parts = new.split("*")
        target = "".join(
            part.replace("\\", "\\\\") + (f"\\g<{i + 1}>" if i < len(parts) - 1 else "") for i, part in enumerate(parts)
        )
        out.append((re.compile(rf"\A{source}\Z", re.DOTALL), target, rule))
    return out
