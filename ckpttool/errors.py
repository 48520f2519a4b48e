"""Every error a user can meet: what went wrong, where, and what to do about it.

One class per remedy, so that a caller can act on the class and a script on the exit code:

=================  ====  ==========================================================
class              exit  the remedy
=================  ====  ==========================================================
UsageError         2     change the command line
CorruptError       1     the source's bytes are wrong: fetch or write it again
IncompleteError    1     a part of the source is not there: find it
ConflictError      1     two statements contradict each other: drop one
LayoutError        1     the model cannot be cut that way: other sizes, or a rule
UnsupportedError   1     ckpttool does not know this (dtype, family, format)
AccessError        1     bytes elsewhere are out of reach: log in, wait, check the network
OutputError        1     the destination: free space, permissions, ``--force``
VerifyError        3     the output was checked and is not equal to the source
=================  ====  ==========================================================
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

UNSEEN = "\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff"
"""Characters of a regular expression's set: what steers a terminal (with ASCII's own), turns the order of reading, ends
a line or cannot be seen. Joiners are not among them: Persian and emoji need them."""
_UNSEEN = re.compile(f"[\x00-\x1f{UNSEEN}]")


def plain(text: str) -> str:
    """Text in which nothing steers a terminal, ends a line or column, or looks like something else: escapes instead.

    Names come from other people's files, and whatever is printed of them goes through this.
    """
    if text.isprintable():
        return text
    return _UNSEEN.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


_CLOSED = (errno.EINVAL, errno.ENXIO)
"""What a write to the stand-in for a closed stdout fails with, on Linux and macOS (``cli.process``)."""


def unprinted(e: OSError) -> str:
    """Why stdout cannot be written, in a sentence; "" where its reader is gone (`| head`): that is no failure."""
    if isinstance(e, BrokenPipeError):
        return ""
    return f"cannot write to stdout: {'it is closed' if e.errno in _CLOSED else e.strerror}"


class CkptError(Exception):
    """Base of all expected failures; never raised itself.

    ``what`` is one sentence, ``where`` names files, rules and byte ranges from near to far,
    ``hint`` says what would work. ``finding`` is what a check calls it, where its class says too little.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | Iterable[str] = (), hint: str | None = None, finding: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = tuple(place for place in ((where,) if isinstance(where, str) else where) if place)
        self.hint = hint
        self.finding = finding

    def render(self) -> str:
        """The text shown on stderr; readable without colour."""
        lines = [f"error: {plain(self.what)}"]
        for i, place in enumerate(self.where):
            lines.append(f"  --> {plain(place)}" if i == 0 else f"      {plain(place)}")
        if self.hint:
            lines += ["", f"hint: {plain(self.hint)}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render().removeprefix("error: ")


@contextmanager
def found_as(**findings: str) -> Iterator[None]:
    """What a check calls the errors that come out of the block, by the name of their class without ``Error``."""
    try:
        yield
    except CkptError as e:
        e.finding = e.finding or findings.get(type(e).__name__.removesuffix("Error").lower(), "")
        raise


class UsageError(CkptError):
    """An invalid command line, whatever the data is."""

    exit_code = 2


def not_installed(what: str, package: str | None, extra: str) -> UsageError:
    """The error for ``what`` when it needs a package that only an extra of ckpttool brings along."""
    hint = f"pip install 'ckpttool[{extra}]'"
    return UsageError(f"{what} needs a package that is not installed: {package}", hint=hint)


class CorruptError(CkptError):
    """A source file breaks its format, or two copies of one tensor differ."""


class IncompleteError(CkptError):
    """A file, a rank or a tensor that must exist is missing."""


class ConflictError(CkptError):
    """Flags, config and files say different things."""


class LayoutError(CkptError):
    """A tensor cannot be cut as asked, or no rule names it."""


class UnsupportedError(CkptError):
    """A dtype, family, format or feature that ckpttool does not know."""


class AccessError(CkptError):
    """Bytes on another machine that cannot be reached: no permission, no network, too many requests."""


class OutputError(CkptError):
    """The destination cannot be written."""


class VerifyError(CkptError):
    """A finished output was read back and differs from its source."""

    exit_code = 3
