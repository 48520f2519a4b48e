"""Who asks the Hugging Face Hub, where it is, and what it means when it refuses."""

from __future__ import annotations

import os
import re
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ckpttool.core.words import some
from ckpttool.errors import AccessError, CkptError, CorruptError, UsageError
from ckpttool.storage.access import anonymous, check_secret, offline
from ckpttool.storage.http import Answer, HttpError, client, shown

_LOGIN = "`hf auth login`, or HF_TOKEN"


def endpoint() -> str:
    """Where the Hub is (HF_ENDPOINT), without a slash at the end."""
    return str(_constants().ENDPOINT).rstrip("/")


def cache_home() -> str:
    """Where the Hub's cache is (HF_HUB_CACHE, HF_HOME)."""
    return str(_constants().HF_HUB_CACHE)


def token() -> str | None:
    """What the Hub knows the user by; None where nobody is logged in, or credentials are not to be sent.

    Raises AccessError where the way to it is broken.
    """
    if anonymous():
        return None
    if _constants().HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    from huggingface_hub import get_token

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):  # huggingface_hub drops line breaks, also in the middle
        check_secret(name, os.environ.get(name, "").strip(), endpoint())
    try:
        found = str(get_token() or "") or None
    except Exception as e:  # tokens of CI services are asked for, which fails in as many ways as there are services
        raise AccessError(
            f"the token for the Hub cannot be had: {type(e).__name__}",
            where=endpoint(),
            hint="hf auth login, or set HF_TOKEN; --anonymous goes without",
        ) from e
    check_secret("the token for the Hub", found or "", endpoint())
    return found


def is_offline() -> bool:
    """Whether only the cache is read."""
    return offline() or bool(_constants().HF_HUB_OFFLINE)


def _constants() -> Any:
    """What huggingface_hub makes of the environment. Raises UsageError."""
    try:
        from huggingface_hub import constants
    except ImportError as e:
        hint = "pip install huggingface_hub"
        raise UsageError(f"hf:// needs a package that is not installed: {e.name}", hint=hint) from None
    except ValueError as e:  # a number that is none, an address that is none
        raise UsageError(
            f"huggingface_hub cannot work with the environment: {e}",
            hint="correct HF_ENDPOINT, or what it names (HF_...)",
        ) from None
    return constants


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; nobody's for what is not a URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    except ValueError:
        return "", url, None
    return parts.scheme, (parts.hostname or "").lower(), port


def headers(url: str, hub: str) -> dict[str, str]:
    """The token, if the URL is of the Hub's own host."""
    known = token() if origin(url) == origin(hub) else None
    return {"Authorization": f"Bearer {known}"} if known else {}


class Asked(NamedTuple):
    """What an answer is about."""

    hub: str
    repo: str
    revision: str
    where: str
    """As it is shown."""


def refused(answer: Answer, asked: Asked) -> CkptError:
    """What an answer means that is not a success."""
    status, code = answer.status, answer.headers.get("X-Error-Code", "")
    said, page = answer.headers.get("X-Error-Message", ""), f"{asked.hub}/{asked.repo}"
    known = token() is not None
    if code == "RevisionNotFound":
        what = f"{asked.repo} has no revision {asked.revision or 'main'!r}"
        return UsageError(what, where=asked.where, hint=_revisions(asked, page))
    if code == "GatedRepo":
        return _gated(asked, page, known=known)
    if "Invalid credentials" in said:
        return AccessError("the Hub does not know the token", where=asked.where, hint=f"log in again: {_LOGIN}")
    if "disabled" in said:
        return AccessError(f"{asked.repo} was disabled on the Hub", where=[asked.where, page])
    if code == "EntryNotFound":
        what = "the Hub has listed a file that it does not have"
        return CorruptError(what, where=[asked.where, shown(answer.url)])
    if code == "RepoNotFound" or status in (401, 404):
        private = "it is private, and your token may not read it" if known else "it is private, and nobody is logged in"
        way = "a fine-grained token must be allowed to read it" if known else f"for a private model log in: {_LOGIN}"
        what = f"the Hub has no model {asked.repo}, or {private}"
        return AccessError(what, where=asked.where, hint=f"check the name at {page}; {way}")
    if status == 403:
        what = f"the Hub refuses the token{': ' + said if said else ''}"
        return AccessError(what, where=asked.where, hint="a fine-grained token must be allowed to read the model")
    if status == 429:
        hint = "wait, then run it again" + ("" if known else f"; who is logged in may ask more often: {_LOGIN}")
        what = f"the Hub allows no more requests for now{_rate(answer.headers)}"
        return AccessError(what, where=asked.where, hint=hint)
    if status >= 500:
        return AccessError(f"the Hub answers {status}", where=asked.where, hint="wait, then run it again")
    return stranger(answer, asked)


def stranger(answer: Answer, asked: Asked) -> CkptError:
    """The error for an answer that the Hub does not give."""
    return AccessError(
        f"this does not answer as the Hugging Face Hub does (status {answer.status})",
        where=[asked.where, shown(answer.url)],
        hint="check HF_ENDPOINT, and whether a proxy or a login page answers in the Hub's place",
    )


def _gated(asked: Asked, page: str, *, known: bool) -> CkptError:
    """401 for who is not logged in, 403 for who has no access: the Hub gives both the same code."""
    if known:
        who = "your account has not been given access"
        hint = "ask for it there; a fine-grained token must be allowed to read gated repositories"
    else:
        who, hint = "nobody is logged in", f"accept the conditions there, then log in: {_LOGIN}"
    return AccessError(f"{asked.repo} is gated, and {who}", where=[asked.where, page], hint=hint)


def _revisions(asked: Asked, page: str) -> str:
    """What there is, for who asked for something else."""
    url = f"{asked.hub}/api/models/{asked.repo}/refs"
    try:
        answer = client().request("GET", url, headers=headers(url, asked.hub))
        refs = answer.json() if answer.status == 200 else {}
        names = [str(r["name"]) for kind in ("branches", "tags") for r in refs.get(kind, ())]
    except (HttpError, AttributeError, KeyError, TypeError):
        names = []
    if not names:
        return f"its branches and tags are listed at {page}"
    slash = "; a slash in a name is written %2F" if any("/" in n for n in names) else ""
    return f"it has {some(names)}{slash}"


def _rate(headers: Message) -> str:
    """``RateLimit: "resolvers";r=0;t=55`` and ``RateLimit-Policy: "fixed window";"resolvers";q=3000;w=300``."""
    left = re.search(r'"(\w+)"\s*;\s*r\s*=\s*\d+\s*;\s*t\s*=\s*(\d{1,6})', headers.get("RateLimit", ""))
    most = re.search(r"q\s*=\s*(\d{1,9}).*?w\s*=\s*(\d{1,6})", headers.get("RateLimit-Policy", ""))
    window = f" ({int(most[1]):,} {left[1] if left else 'requests'} in {int(most[2])} s)" if most else ""
    return window + (f"; again in {left[2]} s" if left else "")
