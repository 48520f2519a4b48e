"""Requests to the Hugging Face Hub: where it is, who asks, and what its refusals mean.

Reading does not go through ``HfApi``. Its requests send the token to the host of any "next page" (0.34 to 2.4), follow
redirects to addresses of an inner network, wait for a silent server without end, hold an answer of any size in memory,
and are not stopped with the run; ``storage.http`` promises none of that happens. Its import takes 0.1 s more.
Writing does (``destinations.hub``): it is huggingface_hub that knows how files are uploaded and committed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from ckpttool.core.words import some
from ckpttool.errors import AccessError, CkptError, CorruptError, UsageError
from ckpttool.storage.access import anonymous, check_secret, offline
from ckpttool.storage.http import Answer, HttpError, RefusedRedirectError, client, shown

_LOGIN = "`hf auth login`, or HF_TOKEN"
MAX_ANSWER = 64 << 20
"""Bytes of an answer: the files of a repository take about 250 each."""
OWN_REF = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)(?=/|\Z)")
"""Revisions with slashes that need not be escaped."""


def endpoint() -> str:
    """The URL of the Hub (HF_ENDPOINT), without a slash at the end."""
    return str(_constants().ENDPOINT).rstrip("/")


def cache_home() -> str:
    """The directory of the Hub's cache (HF_HUB_CACHE, HF_HOME)."""
    return str(_constants().HF_HUB_CACHE)


def token() -> str | None:
    """The user's token; None where you are not logged in, or no credentials may be sent.

    Raises AccessError where the way to it is broken.
    """
    if anonymous() or _constants().HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    from huggingface_hub import get_token

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):  # huggingface_hub drops line breaks, also in the middle
        check_secret(name, os.environ.get(name, "").strip(), endpoint())
    try:
        found = str(get_token() or "") or None
    except Exception as e:  # tokens of CI services are asked for, which fails in as many ways as there are services
        raise AccessError(
            f"cannot get the token for the Hub: {type(e).__name__}",
            where=endpoint(),
            hint="hf auth login, or set HF_TOKEN; --anonymous sends none",
        ) from e
    check_secret("the token for the Hub", found or "", endpoint())
    return found


def is_offline() -> bool:
    """Whether only the cache is read."""
    return offline() or bool(_constants().HF_HUB_OFFLINE)


def _constants() -> Any:
    """The settings that huggingface_hub reads from the environment. Raises UsageError."""
    try:
        from huggingface_hub import constants
    except ImportError as e:
        hint = "pip install huggingface_hub"
        raise UsageError(f"hf:// needs a package that is not installed: {e.name}", hint=hint) from None
    except ValueError as e:  # not a number, not a URL
        raise UsageError(
            f"huggingface_hub rejects the environment: {e}",
            hint="correct HF_ENDPOINT or the variable that it names (HF_...)",
        ) from None
    return constants


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; those of no server for what is not a URL."""
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


class HubRepo(NamedTuple):
    """A model repository, the Hub that it is on and the cache of that Hub."""

    repo: str
    """ORG/NAME."""
    hub: str
    home: str
    """The directory of the cache."""

    def text(self, revision: str) -> str:
        """The text of a place: ``hf://ORG/NAME@REVISION``."""
        shown_as = revision if OWN_REF.fullmatch(revision) else quote(revision, safe="+=,@")
        return f"hf://{self.repo}" + (f"@{shown_as}" if revision else "")

    def download(self, revision: str, which: Sequence[str] = ()) -> str:
        """The command that brings files into the cache, as a hint has it."""
        words = [self.repo, *which, *(["--revision", revision] if revision else [])]
        return f"`hf download {shlex.join(words)}` fetches it"

    def ask(self, method: str, url: str, revision: str, *, follow: bool = True, limit: int = MAX_ANSWER) -> Answer:
        """A request with the token. Raises AccessError, CorruptError, UsageError unless the answer is a success."""
        where = [self.text(revision), shown(url)]
        try:
            answer = client().request(method, url, headers=headers(url, self.hub), follow=follow, limit=limit)
        except RefusedRedirectError as e:
            raise AccessError(f"cannot reach the Hub: {e.strerror}", where=where, hint=e.hint) from None
        except HttpError as e:
            raise AccessError(
                f"the Hub did not answer: {e.strerror}",
                where=where,
                hint="check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1 the Hub's cache is read",
            ) from None
        if answer.status >= 400 or answer.status < 200:
            raise self.refused(answer, revision)
        return answer

    def refused(self, answer: Answer, revision: str) -> CkptError:
        """The error for an answer that is not a success."""
        status, code = answer.status, answer.headers.get("X-Error-Code", "")
        said, where = answer.headers.get("X-Error-Message", ""), self.text(revision)
        page, known = f"{self.hub}/{self.repo}", token() is not None
        if code == "RevisionNotFound":
            what = f"{self.repo} has no revision {revision or 'main'!r}"
            return UsageError(what, where=where, hint=self._revisions(page))
        if code == "GatedRepo":  # 401 for who is not logged in, 403 for who has no access
            who = "your account has not been given access" if known else "you are not logged in"
            hint = "ask for it there; a fine-grained token must be allowed to read gated repositories"
            hint = hint if known else f"accept the conditions there, then log in: {_LOGIN}"
            return AccessError(f"{self.repo} is gated, and {who}", where=[where, page], hint=hint)
        if "disabled" in said:
            return AccessError(f"{self.repo} was disabled on the Hub", where=[where, page])
        if code == "EntryNotFound":
            return CorruptError("the Hub lists a file that it does not have", where=[where, shown(answer.url)])
        if "Invalid credentials" in said:
            what, hint = "the Hub does not recognize the token", f"log in again: {_LOGIN}"
        elif code == "RepoNotFound" or status in (401, 404):
            who = "your token may not read it" if known else "you are not logged in"
            what = f"the Hub has no model {self.repo}, or it is private, and {who}"
            way = (
                "a fine-grained token must be allowed to read it" if known else f"for a private model log in: {_LOGIN}"
            )
            hint = f"check the name at {page}; {way}"
        elif status == 403:
            what = f"the Hub refuses the token{': ' + said if said else ''}"
            hint = "a fine-grained token must be allowed to read the model"
        elif may_pass(status):
            what, hint = passing(status, answer.headers)
            hint += "" if known or status != 429 else f"; logged-in users may send more requests: {_LOGIN}"
        else:
            return self.not_the_hub(answer, revision)
        return AccessError(what, where=where, hint=hint)

    def not_the_hub(self, answer: Answer, revision: str) -> CkptError:
        """The error for an answer that the Hub does not give."""
        return AccessError(
            f"the answer does not come from the Hugging Face Hub (status {answer.status})",
            where=[self.text(revision), shown(answer.url)],
            hint="check HF_ENDPOINT; a proxy or a login page may have answered",
        )

    def _revisions(self, page: str) -> str:
        """A hint that names the branches and tags."""
        url = f"{self.hub}/api/models/{self.repo}/refs"
        try:
            refs = client().request("GET", url, headers=headers(url, self.hub)).json()
            names = [str(r["name"]) for kind in ("branches", "tags") for r in refs.get(kind, ())]
        except (HttpError, AttributeError, KeyError, TypeError):
            names = []
        if not names:
            return f"its branches and tags are listed at {page}"
        slash = "; a slash in a name is written %2F" if any("/" in n for n in names) else ""
        return f"it has {some(names)}{slash}"


def may_pass(status: int) -> bool:
    """Whether the same request may go better later."""
    return status == 429 or status >= 500


def passing(status: int, headers: Message | Mapping[str, str]) -> tuple[str, str]:
    """The meaning of such an answer, and a hint."""
    what = f"the Hub allows no more requests for now{_rate(headers)}" if status == 429 else f"the Hub answers {status}"
    return what, "wait, then run it again"


def _rate(headers: Message | Mapping[str, str]) -> str:
    """``RateLimit: "resolvers";r=0;t=55`` and ``RateLimit-Policy: "fixed window";"resolvers";q=3000;w=300``."""
    left = re.search(r'"(\w+)"\s*;\s*r\s*=\s*\d+\s*;\s*t\s*=\s*(\d{1,6})', headers.get("RateLimit", ""))
    most = re.search(r"q\s*=\s*(\d{1,9}).*?w\s*=\s*(\d{1,6})", headers.get("RateLimit-Policy", ""))
    window = f" ({int(most[1]):,} {left[1] if left else 'requests'} in {int(most[2])} s)" if most else ""
    return window + (f"; again in {left[2]} s" if left else "")
