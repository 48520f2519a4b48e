"""Choosing tensors by name: globs, or regular expressions behind ``re:``.

In a glob ``*`` crosses dots, ``?`` is one character, ``[...]`` a set, ``{a,b}`` alternatives; the whole name must
match. ``re:`` patterns search. A pattern that matches nothing is an error with the nearest name, because a typo in
``--remove-keys`` would otherwise remove nothing and say nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import NoReturn

from ckpttool.errors import UsageError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

PATIENCE = 10.0
"""Seconds of the processor for one pattern, or for those of one config; a hundred thousand names take a tenth."""


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


@contextlib.contextmanager
def bounded(where: str, names: int = 0) -> Iterator[None]:
    """Matching patterns that other people wrote: configs and recipes have some. UsageError after PATIENCE.

    Where many patterns are compared with each of ``names`` in one go, they have as much again for every 10,000.

    A regular expression may take longer than the age of the universe. Python looks for signals while it searches, but
    only its main thread does; elsewhere nothing is bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    patience = PATIENCE * (1 + names // 10_000)

    def give_up(_number: int, _frame: FrameType | None) -> NoReturn:
        raise UsageError(
            f"a pattern takes more than {patience:g} s to compare with the names",
            where=where,
            hint="repetitions within repetitions, as in (a+)+, take forever: write the pattern without them",
        )

    old = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, patience)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A compiled pattern whose ``search`` decides. Raises UsageError when it is empty or not valid."""
    if not pattern or pattern == "re:":
        raise UsageError("an empty pattern matches nothing", hint="quote the pattern to protect it from the shell")
    if pattern.startswith("re:"):
        return _regex(pattern[3:], f"pattern `{pattern[:200]}`")
    glob = glob_regex(re.sub(r"\*+", "*", pattern))  # each further star would multiply the time of a search
    return _regex(rf"\A(?:{glob})\Z", f"pattern `{pattern[:200]}`", re.DOTALL)


def _regex(source: str, shown: str, flags: int = 0) -> re.Pattern[str]:
    """A compiled regular expression. Raises UsageError, with ``shown`` for what somebody wrote."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets that a later Python may read otherwise
            return re.compile(source, flags)
    except (re.error, RecursionError, OverflowError) as e:
        raise UsageError(
            f"{shown} is not valid: {e}",
            hint="in a regular expression, a backslash takes the meaning from the [ ( . * + ? behind it",
        ) from None


def matching(patterns: Iterable[str], names: Collection[str], *, option: str) -> set[str]:
    """All names that any pattern matches. Raises UsageError when one pattern matches none, with the nearest name."""
    found: set[str] = set()
    for pattern in patterns:
        rx = compile_pattern(pattern)
        with bounded(f"{option} {pattern}"):
            hits = {n for n in names if rx.search(n)}
        if not hits:
            raise UsageError(f"{option} `{pattern}` matches no tensor", hint=pattern_hint(pattern, names))
        found |= hits
    return found


def exactly(chosen: Mapping[str, bool]) -> tuple[str, ...]:
    """Patterns that match the names that map to true and none of the others; one for all layers where they agree."""
    kinds: dict[str, list[str]] = {}
    for name in chosen:
        kinds.setdefault(_NUMBER.sub("#", name), []).append(name)
    out = []
    for kind, names in kinds.items():
        if all(chosen[n] for n in names):
            out.append(r"re:\A" + re.escape(kind).replace(re.escape("#"), r"\d+") + r"\Z")
        else:
            out += [rf"re:\A{re.escape(n)}\Z" for n in names if chosen[n]]
    return tuple(out)


def pattern_hint(pattern: str, names: Collection[str]) -> str:
    """A part of names is what people write first: the glob that has it in the middle; else the nearest name."""
    if re.fullmatch(r"[\w.]{2,}", pattern) and sum(pattern in n for n in names) > 1:
        return f"a pattern matches the whole name: did you mean '*{pattern}*'?"
    return nearest_hint(pattern, names)


def nearest_hint(pattern: str, names: Collection[str]) -> str:
    """``did you mean `...`?`` with the name most like the pattern."""
    import difflib

    with contextlib.suppress(UsageError, re.error, OverflowError, RecursionError), bounded(pattern):
        if len(pattern) <= 200 and (other := _other_syntax(pattern, names)):
            return other
    plain = re.sub(r"[*?\[\]{}\\^$]|\Are:", "", pattern)[:200]
    sample = [n for n in islice(names, 20000) if len(n) <= 200]  # comparing takes time that grows with the square
    close = difflib.get_close_matches(plain, sample, n=1, cutoff=0.0)
    if names and not close:
        return "`ckpttool inspect --list` shows every name; * crosses dots"
    if not close:
        return "the checkpoint has no tensors"
    return f"did you mean `{close[0]}`? `ckpttool inspect --list` shows every name; * crosses dots"


def _other_syntax(pattern: str, names: Collection[str]) -> str:
    """A hint when the pattern would match in another syntax, or is what a shell made of it; "" when it is neither.

    Raises what a pattern raises that is not valid in the other syntax.
    """
    if os.path.lexists(pattern):
        return f"{pattern} is a file here: quote patterns, or the shell replaces them with file names"
    several = [p for p in re.split(r"[,|\s]+", pattern) if p]
    if len(several) > 1 and "{" not in pattern and all(any(map(compile_pattern(p).search, names)) for p in several):
        return "one pattern each: " + " ".join(f"'{p}'" for p in several)
    if run := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        numbers = ",".join(map(str, range(int(run[1]), min(int(run[2]), int(run[1]) + 9) + 1)))
        return f"write ranges out: '{pattern.replace(run[0], '{' + numbers + '}')}'"
    regular = re.search(r"[\^$|\\+()]", pattern) and not pattern.startswith("re:")
    if regular and any(map(_regex(pattern, pattern).search, names)):
        return f"for a regular expression: 're:{pattern}'"
    return ""


def renamer(rules: Iterable[str]) -> list[tuple[re.Pattern[str], str, str]]:
    """Compile ``OLD=NEW`` rules; in a glob rule each ``*`` of NEW takes what the same ``*`` of OLD matched.

    Returns (pattern, replacement, rule text). ``re:OLD=NEW`` is a regular-expression substitution with ``\\1``.
    """
    out = []
    for rule in rules:
        regex = rule.startswith("re:")
        old, eq, new = rule.removeprefix("re:").partition("=")
        if not eq or not old or not new:
            raise UsageError(f"--rename `{rule}` is not OLD=NEW", hint="for example --rename 'model.*=backbone.*'")
        if regex:
            regex_of_rule = _regex(old, f"--rename `{rule[:200]}`")
            try:
                with warnings.catch_warnings(action="error"):  # what newer Pythons refuse
                    regex_of_rule.sub(new, "")  # a group that does not exist shows here
                out.append((regex_of_rule, new, rule))
            except (re.error, IndexError, Warning) as e:
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
        out.append((_regex(rf"\A{source}\Z", f"--rename `{rule[:200]}`", re.DOTALL), target, rule))
    return out
