"""The HTTP client that all storages share: whole answers or errors, never other bytes.

``get_range`` reads into the caller's memory and checks every answer against what was asked for; ``request`` is for
small things. Both repeat what failed in passing, wait as long as the server asks for, and end in bounded time whatever
the server does. Redirects are followed with care: see ``Client``.

Sources: RFC 9110 (ranges, conditions, Retry-After), RFC 9112 (messages), draft-ietf-httpapi-ratelimit-headers
(RateLimit).
"""

from __future__ import annotations

import email.utils
import errno
import json
import random
import re
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.message import Message
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urljoin

from urllib3.connection import HTTPException

from ckpttool.core.words import count
from ckpttool.storage import access
from ckpttool.storage.network import (
    GRACE_SECONDS,
    PUBLIC,
    AddressError,
    Clock,
    Connections,
    Host,
    UnknownHostError,
    shown,
    split,
)
from ckpttool.version import __version__

__all__ = [
    "REDIRECTS",
    "Answer",
    "ChangedError",
    "Client",
    "Clock",
    "HttpError",
    "NoRangesError",
    "RefusedRedirectError",
    "client",
    "led",
    "shown",
    "using",
]

TRIES, PATIENCE, TIMEOUT = 10, 120.0, 30.0
"""Tries of a request; seconds that fruitless tries and the waits between them may take; seconds without a byte."""
FIRST_TRIES = 4
"""Tries for a host that was never there: its name or port may be wrong."""
ODD_TRIES = 3
"""Tries where the answer breaks the protocol: some caches do that once."""
LONGEST_WAIT = 330.0
"""Seconds of waiting that a server may ask for in all; the Hub counts requests in windows of five minutes."""
FIRST_WAIT, MAX_WAIT = 0.5, 20.0
LONG, SILENT = 10.0, 30.0
"""Seconds of waiting that somebody hears of, and seconds before the next time."""
MAXREDIRECTS = 5
MAX_BODY = 16 << 20
"""Bytes of an answer to ``request``."""
MAX_REASON = 64 << 10
"""Bytes kept of an answer that is an error."""
STEP = 1 << 20
"""Bytes that are read at a time. What came of a range before a connection broke is not asked for again."""

_AGAIN = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529}
REDIRECTS = {301, 302, 303, 307, 308}
_REPEATABLE = {"GET", "HEAD", "PUT", "DELETE", "OPTIONS"}
_FOR_OTHERS = {"accept", "accept-encoding", "user-agent", "range", "if-match", "if-unmodified-since"}
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_OF = re.compile(r"bytes \*/(\d{1,19})")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_RESET_IN = re.compile(r"(?:^|[;,\s])t=(\d{1,9})")


class Answer(NamedTuple):
    """The final answer of a server."""

    status: int
    headers: Message
    """``headers.get("ETag")``: case does not count."""
    body: bytes
    """Empty for a range, whose bytes are where they were asked to be."""
    url: str
    """The URL that answered, after all redirects."""
    total: int | None
    """Bytes of the whole file, where the server said."""

    @property
    def named(self) -> str:
        """``404 Not Found``."""
        with suppress(ValueError):
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        return str(self.status)

    def json(self) -> Any:
        """The body as JSON. Raises HttpError."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise HttpError("the answer is not JSON", self.url, self) from None


class HttpError(OSError):
    """No answer, or none that can be used. ``strerror`` is a sentence, without secrets."""

    hint = ""
    """A way out, where the kind of error alone tells one."""

    def __init__(self, sentence: str, url: str, answer: Answer | None = None, *, number: int = errno.EIO) -> None:
        super().__init__(number, sentence, shown(url))
        self.answer = answer

    @property
    def status(self) -> int:
        """The status of the answer; 0 where there was none."""
        return self.answer.status if self.answer else 0


class ChangedError(HttpError):
    """The file is not the one that was asked for: it has changed."""


class RefusedRedirectError(HttpError):
    """An answer led to where nobody should be led. It says from where, to where, and why that is refused."""

    hint = (
        "if you trust it, give the address that it leads to, or download the file and give its path;"
        " a proxy or a login page that answers in the server's place redirects, too"
    )


class NoRangesError(HttpError):
    """The server sends no ranges of this file: always all of it, or compressed."""


class WrongAnswerError(HttpError):
    """Each answer broke the protocol, or was about other bytes than were asked for."""

    hint = "the server, or a proxy before it, answers wrongly: download the file and give its path"


class _OddError(Exception):
    """The answer breaks the protocol."""


class _WholeError(_OddError):
    """The answer is the whole file."""


class _ShortError(Exception):
    """The answer ended early."""


@dataclass(slots=True)
class _Call:
    """A request, and how far it is."""

    method: str
    url: str
    headers: dict[str, str]
    body: memoryview | None = None
    limit: int = MAX_BODY
    follow: bool = True
    origin: str | None = None
    repeat: bool = True
    into: memoryview | None = None
    start: int = 0
    if_match: str | None = None
    modified: str | None = None
    total: int | None = None
    got: int = 0
    """Bytes of ``into`` that are there."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def sent(self) -> dict[str, str]:
        """Its headers for the next try."""
        headers = {"User-Agent": f"ckpttool/{__version__}", "Accept-Encoding": "identity", **self.headers}
        if bad := next((n for n, v in headers.items() if not _VALUE.fullmatch(v)), None):
            raise HttpError(
                f"the value of {bad} has characters that HTTP does not allow", self.url
            )  # Python's error would show it
        if self.into is None:
            if self.body is not None:
                headers["Content-Length"] = str(self.body.nbytes)
            return headers
        if not _is_strong(self.if_match):
            self.got = 0  # the rest might be of another file
        headers["Range"] = f"bytes={self.start + self.got}-{self.start + len(self.into) - 1}"
        if _is_strong(self.if_match):
            headers["If-Match"] = self.if_match or ""
        elif self.modified and not self.if_match:
            headers["If-Unmodified-Since"] = self.modified
        return headers


class Client:
    """Requests over connections that are kept. Safe to use from several threads; a fork begins with none.

    - 408, 429, 5xx, refused and broken connections, and answers that end early or do not come are tried again, with
      exponentially growing random waits, or those that the server asks for.
    - At most five redirects, never from https to http. One to another host takes no header along that could be a
      secret. One to an address that is link-local, loopback or private is refused, before there is a connection,
      unless the host that the user named is there, too.
    """

    def __init__(
        self,
        *,
        tries: int = TRIES,
        patience: float = PATIENCE,
        timeout: float = TIMEOUT,
        grace: float = GRACE_SECONDS,
        clock: Clock | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tries, self.patience = tries, patience
        self._silent_until = 0.0
        self._clock = clock or Clock()
        self._connections = Connections(timeout, grace, self._clock, tls)
        self._stopped = threading.Event()
        self._random = random.SystemRandom()  # forked processes would draw the same waits of another one

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray | memoryview | None = None,
        limit: int = MAX_BODY,
        follow: bool = True,
        origin: str | None = None,
        repeat: bool | None = None,
    ) -> Answer:
        """A small request; its answer, whatever its status is.

        ``origin``: the URL that the user named, where ``url`` comes out of an answer of it: it is treated like a
        redirect. ``repeat``: whether it does no harm to do it twice; POST and PATCH are not repeated by default.
        Redirects of GET and HEAD are followed. Raises HttpError, for an answer of more than ``limit`` bytes, too.
        """
        repeat = method in _REPEATABLE if repeat is None else repeat
        data = None if body is None else memoryview(body).cast("B")
        call = _Call(method, url, dict(headers or {}), data, limit, follow, origin, repeat, stopped=self._stopped)
        return self._tried(call)

    def get_range(
        self,
        url: str,
        start: int,
        stop: int,
        into: memoryview,
        *,
        headers: Mapping[str, str] | None = None,
        if_match: str | None = None,
        modified: str | None = None,
        total: int | None = None,
        origin: str | None = None,
    ) -> Answer:
        """Read bytes [start, stop) of a file into memory: all of them, or an error.

        What is known of the file must hold for every answer: ``if_match`` is its ETag, with the quotes, ``modified``
        its Last-Modified, ``total`` its size in bytes. ``origin``: see ``request``. Raises ChangedError where it does
        not hold, and HttpError, with the answer where its status is neither 206 nor 200.
        """
        into = into.cast("B")
        if len(into) != stop - start or start < 0:
            raise ValueError(f"{len(into)} bytes of memory for bytes {start} to {stop}")
        call = _Call(
            "GET", url, dict(headers or {}), origin=origin, into=into, start=start,
            if_match=if_match, modified=modified, total=total, stopped=self._stopped,
        )  # fmt: skip
        if not into:
            raise ValueError("no bytes to read")
        return self._tried(call)

    def stop(self) -> None:
        """End all requests, those that wait too: each raises HttpError. Later ones are not concerned."""
        stopped, self._stopped = self._stopped, threading.Event()
        stopped.set()
        self._connections.stop()

    def _tried(self, call: _Call) -> Answer:
        began, tries, spent, asked_for, odd = self._clock.now(), 0, 0.0, 0.0, 0
        while True:
            tries += 1
            at, got = self._clock.now(), call.got
            answer, limit = None, self.tries
            try:
                answer = self._exchange(call)
                if answer.status not in _AGAIN:
                    return _accepted(call, answer)
                failure = HttpError(f"{_host(call)} answers {answer.named}", call.url, answer)
            except (_OddError, HTTPException, ssl.SSLError, ValueError) as e:
                failure = _broken(call, e)
                odd += not _is_cut(e)
                limit = self.tries if odd < ODD_TRIES else 0
            except HttpError:
                raise
            except (_ShortError, OSError) as e:
                failure = _broken(call, e)
                limit = self.tries if self._connections.has_met(split(call.url)[0]) else FIRST_TRIES
            if call.stopped.is_set():
                raise HttpError("the request was stopped", call.url, number=errno.EINTR) from None
            spent += self._clock.now() - at if call.got < got + STEP else 0
            asked = _asked_wait(answer)
            wait = self._random.uniform(0, min(MAX_WAIT, FIRST_WAIT * 2 ** (tries - 1)))
            if asked:
                wait = asked + wait / 10
                asked_for += wait
            else:
                spent += wait
            again = call.repeat or (answer is not None and answer.status == 429)
            if not again or tries >= limit or spent > self.patience or asked_for > LONGEST_WAIT:
                break
            if wait > LONG or spent > LONG:
                self._tell(f"{failure.strerror}; trying again in {wait:.0f} s")
            self._clock.sleep(wait, call.stopped)
        if answer is not None and call.into is None:
            return answer
        return _gave_up(failure, tries, self._clock.now() - began, asked)

    def _tell(self, why: str) -> None:
        """Say why it takes long, from time to time: many threads wait for the same server."""
        now = self._clock.now()
        if access.on_wait and now >= self._silent_until:
            self._silent_until = now + SILENT
            access.on_wait(why)

    def _exchange(self, call: _Call) -> Answer:
        """One try, with its redirects. Raises what goes wrong."""
        url, headers, allowed = call.url, call.sent(), None
        named = _parsed(call.origin or url, call.url)[0]
        if call.origin is not None:
            allowed = self._may_lead(call, named, url)
        for _ in range(MAXREDIRECTS + 1):
            answer = self._send(call, url, headers, allowed)
            if answer.status not in REDIRECTS or not call.follow or call.method not in ("GET", "HEAD"):
                return answer
            if not (to := answer.headers.get("Location")):
                return answer
            here, url = split(url)[0], _location(url, to)
            allowed = self._may_lead(call, named, url, here)
            if not _is_home(here, split(url)[0]):
                headers = {k: v for k, v in headers.items() if k.lower() in _FOR_OTHERS}
        what = f"more than {MAXREDIRECTS} redirects, from {named}, the last one to {_address(url)}"
        raise RefusedRedirectError(what, call.url)

    def _may_lead(self, call: _Call, named: Host, url: str, here: Host | None = None) -> Collection[str]:
        """How near the host of a URL may be that an answer named. Raises RefusedRedirectError for other reasons."""
        try:
            host = split(url)[0]
        except ValueError as e:
            raise RefusedRedirectError(f"{named} redirects, but {e}", call.url) from None
        if "https" in (named.scheme, here.scheme if here else "") and host.scheme != "https":
            what = f"{here or named} redirects from https to http ({_address(url)}), which is refused"
            raise RefusedRedirectError(what, call.url)
        return {PUBLIC, self._connections.home(named)}

    def _send(self, call: _Call, url: str, headers: dict[str, str], allowed: Collection[str] | None) -> Answer:
        most = call.limit if call.into is None else len(call.into)
        try:
            with self._connections.ask(call.method, url, headers, call.body, allowed, repeat=call.repeat) as got:
                response, pace = got
                pace.expect(most)
                return _received(call, response, url)
        except AddressError as e:
            named = _parsed(call.origin or call.url, call.url)[0]
            what = f"a redirect from {named} to {_address(url)} is refused: {e}"
            raise RefusedRedirectError(what, call.url) from None


_shared: Client | None = None
_lock = threading.Lock()


def client() -> Client:
    """The client of this process."""
    global _shared  # noqa: PLW0603
    with _lock:
        if _shared is None:
            _shared = Client()
        return _shared


@contextmanager
def using(other: Client) -> Iterator[Client]:
    """Let another client be that of this process. For tests."""
    global _shared  # noqa: PLW0603
    before, _shared = _shared, other
    try:
        yield other
    finally:
        _shared = before


def _received(call: _Call, response: Any, url: str) -> Answer:
    """Read an answer. Raises ``_OddError``, ``_ShortError``, ChangedError, and what reading raises."""
    headers, status = response.headers, response.status
    if status < 200:  # the answer comes behind it, and must not be that of the next request
        raise _OddError(f"answers {status}, which is not a final status")
    length = _length(headers)
    if call.into is not None and status in (200, 206):
        return _range(call, response, length, url)
    total = length if call.method == "HEAD" or status == 200 else None
    if status == 416 and (m := _OF.fullmatch(headers.get("Content-Range", "").strip())):
        total = int(m[1])
    limit = call.limit if status < 300 else MAX_REASON
    if call.method != "HEAD" and status < 300 and length is not None and length > limit:
        raise HttpError(f"the answer has {count(length, 'byte')}, more than {limit}", url)
    body = bytearray()
    while len(body) <= limit and (piece := response.read(min(STEP, limit + 1 - len(body)))):
        body += piece
    if len(body) > limit and status < 300:
        raise HttpError(f"the answer has more than {count(limit, 'byte')}", url)
    if length is not None and len(body) < min(length, limit + 1) and call.method != "HEAD" and status not in (204, 304):
        raise _ShortError
    if body and headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
        if status < 300:
            raise HttpError("the server sends a compressed answer where none was asked for", url)
        body.clear()
    return Answer(status, headers, bytes(body[:limit]), url, total)


def _range(call: _Call, response: Any, length: int | None, url: str) -> Answer:
    assert call.into is not None  # noqa: S101
    headers, start, stop = response.headers, call.start + call.got, call.start + len(call.into)
    if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise NoRangesError("the server compresses the file, so ranges of it cannot be read", url)
    total = _checked_range(headers, start, stop, length) if response.status == 206 else length
    if response.status == 200:
        total = call.total if length is None else length
        if start or total != stop:
            raise _WholeError("sends the whole file where a range was asked for")
    answer = Answer(response.status, headers, b"", url, total)
    _check_same(call, answer)
    while call.got < len(call.into):
        n = response.readinto(call.into[call.got : call.got + STEP])
        if not n:
            raise _ShortError
        call.got += n
    if not response.isclosed() and response.read(1):
        call.got = 0
        raise _OddError("sends more bytes than were asked for")
    return answer


def _checked_range(headers: Message, start: int, stop: int, length: int | None) -> int | None:
    """The size of the file that a 206 is about. Raises ``_OddError`` unless it is about this range."""
    said = headers.get_all("Content-Range") or []
    m = _RANGE.fullmatch(said[0].strip()) if len(said) == 1 else None
    if not m or headers.get("Content-Type", "").lower().startswith("multipart/byteranges"):
        raise _OddError("does not say which range it sends")
    total = None if m[3] == "*" else int(m[3])
    if (int(m[1]), int(m[2]) + 1) != (start, stop):
        raise _OddError(f"sends bytes {m[1]} to {m[2]} where {start} to {stop - 1} were asked for")
    if length is not None and length != stop - start:
        raise _OddError(f"sends {count(length, 'byte')} where {stop - start:,} were asked for")
    if total is not None and total < stop:
        raise _OddError(f"sends bytes {start} to {stop - 1} and says that the file has {count(total, 'byte')}")
    return total


def _check_same(call: _Call, answer: Answer) -> None:
    """Raises ChangedError unless the answer is about the file that was asked for."""
    tag, modified = answer.headers.get("ETag"), answer.headers.get("Last-Modified")
    if call.if_match is not None and (tag is None or _opaque(tag) != _opaque(call.if_match)):
        what = f"its ETag is {tag}" if tag else "the answer has no ETag"
        raise ChangedError(f"the file has changed: {what}, not {call.if_match}", call.url, answer)
    if call.if_match is None and call.modified is not None and modified != call.modified:
        raise ChangedError(f"the file has changed: on {modified}, not {call.modified}", call.url, answer)
    if call.total is not None and answer.total is not None and answer.total != call.total:
        what = f"it has {count(answer.total, 'byte')}, not {call.total:,}"
        raise ChangedError(f"the file has changed: {what}", call.url, answer)


def _accepted(call: _Call, answer: Answer) -> Answer:
    if call.into is None or answer.status in (200, 206):
        return answer
    if answer.status in (412, 416):
        if answer.total is not None:
            _check_same(replace(call, if_match=None, modified=None), answer)
        raise ChangedError(f"the file has changed: {_host(call)} answers {answer.named}", call.url, answer)
    raise HttpError(f"{_host(call)} answers {answer.named}", call.url, answer)


def _gave_up(failure: HttpError, tries: int, seconds: float, asked: float) -> Answer:
    how = f" ({count(tries, 'try', 'tries')} in {seconds:.0f} s)" if tries > 1 else ""
    later = f"; it asks to wait {asked:.0f} s" if asked else ""
    number = failure.errno or errno.EIO
    what = f"{failure.strerror}{later}{how}"
    raise type(failure)(what, failure.filename, failure.answer, number=number) from None


def _broken(call: _Call, e: BaseException) -> HttpError:
    """What went wrong, in a sentence. Raises HttpError where it stays wrong."""
    host, number = _host(call), errno.EIO
    if isinstance(e, ssl.SSLCertVerificationError):
        text = f"the certificate of {host} is not trusted: {e.verify_message}"
        raise HttpError(text, call.url, number=errno.EACCES) from None
    if isinstance(e, UnicodeError):
        raise HttpError(f"{host} is not a host name", call.url) from None
    if isinstance(e, UnknownHostError):
        what = f"no address found for {host}: check the name and the network"
    elif isinstance(e, _OddError):
        what = f"{host} {e}"
    elif _is_cut(e):
        what = f"{host} closed the connection before the end of its answer"
    elif isinstance(e, HTTPException | ValueError):  # a size of a chunk that is none, say
        what = f"{host} does not answer in HTTP"
    elif isinstance(e, ConnectionRefusedError):
        what, number = f"{host} refuses connections", errno.ECONNREFUSED
    elif isinstance(e, TimeoutError):
        what, number = f"{host} does not answer in time", errno.ETIMEDOUT
    elif isinstance(e, ssl.SSLError):
        what = f"TLS connection to {host} failed: {e.reason or 'it was closed'}"
    else:
        what = f"{host} cannot be reached: {e.strerror if isinstance(e, OSError) and e.strerror else e}"
    error = NoRangesError if isinstance(e, _WholeError) else WrongAnswerError if isinstance(e, _OddError) else HttpError
    return error(what, call.url, number=number)


def _is_cut(e: BaseException) -> bool:
    """Whether a connection ended too early, however that shows."""
    kinds = (_ShortError, ConnectionResetError, BrokenPipeError, ConnectionAbortedError)
    is_chunk = isinstance(e, HTTPException) and hasattr(e, "partial")  # IncompleteRead
    return is_chunk or isinstance(e, (*kinds, ssl.SSLEOFError, ssl.SSLZeroReturnError))


def _asked_wait(answer: Answer | None) -> float:
    """Seconds that a server asks to wait; 0 where it does not."""
    if answer is None:
        return 0
    said = (answer.headers.get("Retry-After") or "").strip()
    if said.isascii() and said.isdigit():
        return float(said[:9])
    if said:
        try:
            at = email.utils.parsedate_to_datetime(said)
            return max(0.0, ((at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds())
        except (ValueError, OverflowError):
            return 0
    m = _RESET_IN.search(answer.headers.get("RateLimit") or "") if answer.status == 429 else None
    return float(m[1]) if m else 0


def _length(headers: Message) -> int | None:
    """Content-Length. Raises ``_OddError`` where it is none."""
    said = {v.strip() for v in headers.get_all("Content-Length") or []}
    codings = [v.strip().lower() for v in headers.get_all("Transfer-Encoding") or []]
    if codings not in ([], ["chunked"]):  # Python's client would take its framing for bytes of the file
        raise _OddError("sends its answer in a transfer encoding that was not asked for")
    if not said or codings:
        return None
    (text, *more) = said
    if more or not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise _OddError("does not say how long its answer is")
    return int(text)


def _parsed(url: str, about: str) -> tuple[Host, str]:
    try:
        return split(url)
    except ValueError as e:
        raise HttpError(str(e), about, number=errno.EINVAL) from None


def _location(url: str, to: str) -> str:
    with suppress(UnicodeError):
        to = to.encode("latin-1").decode()  # most that are not ASCII are UTF-8
    try:
        return urljoin(url, to.strip().replace(" ", "%20")).partition("#")[0]
    except ValueError:
        return ""


def _address(url: str) -> str:
    """Where a redirect leads, as messages show it: what stands behind the host may be a secret."""
    host = split(url)[0]
    return f"{host.scheme}://{host}"


def led(location: str) -> str:
    """``" to https://HOST"``, of a redirect that another library did not follow; "" where it does not say."""
    try:
        return f" to {_address(location)}"
    except ValueError:
        return ""


def _is_home(here: Host, there: Host) -> bool:
    """Whether what is for one host may be sent to the other: it is the same, or the same by TLS."""
    return here == there or (here == ("http", there.name, 80) and there == ("https", there.name, 443))


def _host(call: _Call) -> str:
    return str(split(call.url)[0])


def _is_strong(tag: str | None) -> bool:
    return tag is not None and not tag.startswith("W/")


def _opaque(tag: str) -> str:
    return tag.strip().removeprefix("W/")
