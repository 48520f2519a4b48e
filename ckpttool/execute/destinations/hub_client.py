"""The API of huggingface_hub for writing: with the user's token, and with its errors as ours."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.storage.hub_access import endpoint, may_pass, passing, token
from ckpttool.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
TRIES = 6
"""Tries, over about a minute."""


def api() -> HfApi:
    """The Hub, with the user's token."""
    from huggingface_hub import HfApi

    return HfApi(endpoint(), token() or False, library_name="ckpttool", library_version=__version__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Progress is shown by the run, and so is what comes of it."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, shown = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bars()


class PassingError(AccessError):
    """It may go better the next time; or it went well, and the answer was lost."""


@contextlib.contextmanager
def asking(where: str) -> Iterator[None]:
    """Raises AccessError for what the Hub refuses, and for a Hub that does not answer.

    Texts of huggingface_hub are not shown: they have URLs with signatures in them.
    """
    try:
        yield
    except (CkptError, KeyboardInterrupt):
        raise
    except Exception as e:  # noqa: BLE001 - of whatever library carries its requests
        raise _explained(e, where) from None


def patiently(where: str, action: Callable[[], T]) -> T:
    """Repeats an action that failed in passing. Raises as ``asking`` does."""
    for tried in range(TRIES):
        try:
            with asking(where):
                return action()
        except PassingError:
            if tried == TRIES - 1:
                raise
        pause(tried)
    raise AssertionError("the last try raises")


def pause(tried: int) -> None:
    """Wait before the next try; not as long as others, who would all come back at once."""
    time.sleep(random.uniform(0, 2 << tried))  # noqa: S311


def _explained(error: Exception, where: str) -> CkptError | Exception:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError) and not isinstance(error, GatedRepoError):
        hint = "check the name, and that your token may see it: `hf auth whoami`"
        return AccessError(
            "the Hub has no such repository or branch, or does not show it to you", where=where, hint=hint
        )
    if isinstance(error, OfflineModeIsEnabled):
        return AccessError(
            "cannot write to the Hub: HF_HUB_OFFLINE is set",
            where=where,
            hint="unset HF_HUB_OFFLINE",
        )
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, HfHubHTTPError) and status is not None:
            if may_pass(status):
                what, hint = passing(status, cause.response.headers)
                return PassingError(what, where=where, hint=hint)
            return _refused(status, f": {cause.server_message}" if cause.server_message else "", where)
        if type(cause).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            return PassingError(
                f"the Hub does not answer ({type(cause).__name__})", where=where, hint="check the network, then repeat"
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError) and error.filename:
        return OutputError(f"cannot read a file to upload: {error.strerror}", where=str(error.filename))
    if isinstance(error, OSError):
        return PassingError("the Hub cannot be reached", where=where, hint="check the network, then repeat")
    if isinstance(error, ValueError):
        return OutputError(f"the Hub rejected the upload: {error}", where=where)
    return error


def _refused(status: int, more: str, where: str) -> CkptError:
    if status in (401, 403):
        return AccessError(
            f"you may not write this on the Hub{more}",
            where=where,
            hint="log in with a token that may write there (hf auth login), or use --create-pr",
        )
    if status in {409, 412}:
        return OutputError(
            f"the destination was changed by somebody else during the run{more}", where=where, hint="repeat the command"
        )
    return OutputError(f"the Hub refuses this with {status}{more}", where=where)
