"""Settings of this process for places on other machines.

They are variables of the environment, so the processes that compute have them, too, and other programs can set them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from ckpttool.errors import AccessError

ANONYMOUS = "CKPTTOOL_ANONYMOUS"
OFFLINE = "HF_HUB_OFFLINE"
"""Read by huggingface_hub, too, when it is imported: so it is set before."""

_NEVER = re.compile(r"[^\x20-\x7e]")

QUERIES: dict[str, str] = {}
"""What stood behind the question mark of URLs that the user gave, by what stood before it: signatures are secrets, so
texts of places do without. The processes that compute get them with their job."""

on_wait: Callable[[str], None] | None = None
"""Hears, in a sentence, why a request takes long: a server asks to wait, or does not answer."""


def anonymous() -> bool:
    """Whether requests go without credentials: to public buckets and repositories."""
    return _is_set(ANONYMOUS)


def offline() -> bool:
    """Whether of the Hub only the cache on this machine is read."""
    return _is_set(OFFLINE)


def set_access(*, anonymous: bool = False) -> None:
    """The access options of a command line; the environment decides what they leave open."""
    if anonymous:
        os.environ[ANONYMOUS] = "1"


def settings() -> dict[str, str]:
    """Settings that another machine needs to act like this one: no secrets."""
    return {name: os.environ[name] for name in (ANONYMOUS, OFFLINE) if name in os.environ}


def use_settings(said: Mapping[str, str]) -> None:
    """Act as the machine whose ``settings`` these are."""
    os.environ.update(said)


def check_secret(name: str, value: str, where: str) -> None:
    """Raises AccessError for a secret that no server can have given out, without showing it: the libraries of the
    clouds try to send it for half a minute, and say that nobody answers."""
    found = _NEVER.search(value)
    if found is None:
        return
    kind = "a line break" if found[0] in "\r\n" else "a control character"
    kind = kind if found[0].isascii() else "a character that is not ASCII"
    at = "at its end" if found.end() == len(value) else f"at position {found.start() + 1} of {len(value)}"
    hint = f"set {name} again, exactly as issued" if name.isupper() else "write it again, exactly as issued"
    raise AccessError(
        f"{name} has {kind} {at}", where=where, hint=f"{hint}; `$(cat FILE)` drops a line break at the end"
    )


def _is_set(name: str) -> bool:
    """Whether a variable's value means yes, as huggingface_hub decides it."""
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
