"""Addresses, proxies and TLS of ``storage/http.py``, above the connections and pools of ``urllib3``.

A host that an answer named, not the user, must not be on this machine or its network: see ``nearness``. Connections go
to the very address that was checked, so a name server that answers differently the second time changes nothing.
"""

from __future__ import annotations

import io
import ipaddress
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from socket import getaddrinfo  # urllib3 has no hook between the look-up of a name and the connection to its address
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

from urllib3 import HTTPConnectionPool, PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPException, HTTPSConnection
from urllib3.util import make_headers
from urllib3.util.connection import create_connection

CONNECT_SECONDS, NEXT_SECONDS, MAX_ADDRESSES = 10.0, 3.0, 8
"""Seconds for the last address of a host, and for the others; how many addresses are tried."""
GRACE_SECONDS, SLOWEST = 60.0, 16 << 10
"""An answer may take so many seconds, and one more for each so many bytes: a slow drip is as good as no answer."""
OVERHEAD, CHUNKED = 1 << 20, 8
"""Bytes of headers, of trailers and of interim answers; how many times as large chunks of a byte make a body."""
IDLE_SECONDS = 50.0
"""A connection that waited longer is not used again: servers and firewalls close those, some without a word."""
MAX_IDLE = 64
"""Connections kept for each host."""
PIECE = 1 << 18
"""Bytes of a body that are sent at a time: the timeout of a connection is that of one piece."""
PORTS = {"https": 443, "http": 80}

PUBLIC = ""
_WIRE_SERVER = ipaddress.ip_address("168.63.129.16")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OWN = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10")))
"""Of one's own network, whatever the ``ipaddress`` of this Python knows; clouds have had services there."""
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")
_BOTH_WAYS = 2
"""Errors that POSIX allows ``shutdown`` to raise."""


class Clock:
    """Time as the client takes it; tests have one of their own."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        """Wait, but not longer than until the event is set."""
        stopped.wait(seconds)


class AddressError(OSError):
    """A host that an answer named is on this machine or its network."""


class UnknownHostError(OSError):
    """No address is known for the name of a host."""


class Host(NamedTuple):
    """The other end of a connection."""

    scheme: str
    name: str
    port: int

    def __str__(self) -> str:
        return self.bracketed if self.port == PORTS[self.scheme] else f"{self.bracketed}:{self.port}"

    @property
    def bracketed(self) -> str:
        """The name as URLs have it."""
        return f"[{self.name}]" if ":" in self.name else self.name


@lru_cache(maxsize=256)
def split(url: str) -> tuple[Host, str]:
    """The host of a URL, and what of it is sent: path and query. Raises ValueError with a sentence."""
    if _UNSAFE.search(url):
        raise ValueError("the URL has spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the URL's host is invalid") from None  # urlsplit's words have it, with a password
    if parts.scheme not in PORTS:
        raise ValueError(f"the URL has the scheme {parts.scheme or '(none)'}, not https or http")
    if "@" in parts.netloc:
        raise ValueError("the URL has a user name or password")
    try:
        name, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the URL's port is not a number") from None
    if not name:
        raise ValueError("the URL has no host")
    host = Host(parts.scheme, name, PORTS[parts.scheme] if port is None else port)
    # Characters beyond ASCII go as the bytes of UTF-8; what is escaped stays as it is.
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (f"?{parts.query}" if parts.query else "")
    return host, target if target.isascii() else quote(target, safe="/%:@!$&'()*+,;=~-._?[]|^`{}\"<>")


def shown(url: str) -> str:
    """A URL as messages show it: without its query, which may be a signature, and without a user name and password."""
    head, slashes, rest = url.partition("://")
    if not slashes:
        return re.split(r"[?#]", url, maxsplit=1)[0].rpartition("@")[2]
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    if at and re.search(r"[?#]", user):  # a password with a question mark? Then what is before it is of the password
        return f"{head}://..."
    return re.split(r"[?#]", f"{head}://{host}{slash}{path}", maxsplit=1)[0]


_SIGNED = re.compile(r"[?&](sig|signature|x-(amz|goog)-(signature|credential)|(access_)?token)=", re.IGNORECASE)


def is_signed(text: str) -> bool:
    """Whether a text ends in a query with a signature or a token."""
    return _SIGNED.search(text) is not None


def nearness(address: str) -> str:
    """How near an address is: "" for those of the internet; "loopback", "link-local" or "private" for others."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is None and int(ip) >> 32 == 0 and int(ip) > 1:  # ::a.b.c.d, as it was once written
            inner = ipaddress.IPv4Address(int(ip))
        if inner is not None:
            return nearness(str(inner))
    if ip.is_loopback or ip.is_unspecified:
        return "loopback"
    if ip.is_link_local or ip == _WIRE_SERVER:  # the second is where Azure's machines ask for what others find there
        return "link-local"
    own = ip.is_multicast or not ip.is_global or any(ip in network for network in _OWN)
    return "private" if own else PUBLIC


def proxy_for(host: Host) -> str | None:
    """The URL of the proxy that ``HTTPS_PROXY``, ``HTTP_PROXY`` or ``ALL_PROXY`` names, with its login.

    None where ``NO_PROXY`` has the host. Raises OSError for a kind of proxy that is not known.
    """
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    text = proxies.get(host.scheme) or proxies.get("all")
    if not text or proxy_bypass(f"{host.name}:{host.port}") or _is_in_networks(host.name, proxies.get("no", "")):
        return None
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        known = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise OSError(f"the proxy in the environment is not http://HOST:PORT: {shown(text)}")
    return url


def _is_in_networks(name: str, no_proxy: str) -> bool:
    """Whether a host that is an address is in a network (``10.0.0.0/8``), or is an address in brackets, of NO_PROXY."""
    with suppress(ValueError):
        address = ipaddress.ip_address(name)
        for text in no_proxy.split(","):
            with suppress(ValueError):
                if address in ipaddress.ip_network(text.strip().strip("[]"), strict=False):
                    return True
    return False


class Pace:
    """The time and the bytes that the answer on a connection may still take; an error as soon as they are used up."""

    def __init__(self, clock: Clock, grace: float) -> None:
        self._clock, self._grace = clock, grace
        self.is_stopped = False
        self.begin()

    def begin(self) -> None:
        """Wait for status line and headers."""
        self.at = self._clock.now()
        self._until, self._left, self._is_body = self.at + self._grace, OVERHEAD, False

    def expect(self, n: int) -> None:
        """Wait for a body of at most so many bytes, which may take longer the more of it there is."""
        self._left += CHUNKED * n
        self._is_body = True

    def count(self, n: int) -> None:
        """Raises HTTPException, TimeoutError, and ConnectionError for the end of a connection within the headers."""
        if self.is_stopped:  # a TLS connection that is being shut down has bytes that nobody decrypts
            raise ConnectionAbortedError
        if not n and not self._is_body:  # Python takes what came for all of them: a length or a tag cut off, too
            raise ConnectionResetError
        self._left -= n
        if self._left < 0:
            raise HTTPException("the answer does not end")
        self._until += n / SLOWEST if self._is_body else 0
        self.at = self._clock.now()
        if self.at > self._until:
            raise TimeoutError("the answer is too slow")


class _PacedFile(io.RawIOBase):
    """The bytes of an answer as they come from a socket, which stays open as long as this does."""

    def __init__(self, sock: Any, pace: Pace) -> None:
        self._held, self._receive, self._count = sock.makefile("rb", buffering=0), sock.recv_into, pace.count

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n: int = self._receive(buffer)
        self._count(n)
        return n

    def close(self) -> None:
        self._held.close()
        super().close()


class _CheckedConnection(HTTPConnection):
    """A connection to an address that was checked, whose answers come in time. ``allowed``: see ``Connections.ask``."""

    def __init__(self, *args: Any, owner: Connections, allowed: Collection[str] | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._owner, self._allowed = owner, allowed
        self.pace = Pace(owner.clock, owner.grace)
        owner.add(self)

    def _new_conn(self) -> Any:
        self.pace = Pace(self._owner.clock, self._owner.grace)
        return self._owner.connect(self._dns_host, self.port, None if self.proxy else self._allowed)

    def response_class(self, sock: Any, **options: Any) -> Any:  # type: ignore[override]  # it is only called
        return HTTPConnection.response_class(cast("Any", _PacedFile(sock, self.pace)), **options)

    def ask(self, method: str, target: str, headers: Mapping[str, str], body: memoryview | None) -> Any:
        """Python's own answer: what urllib3 makes of it copies each byte twice, and costs more than a small one."""
        pieces: Any = None if body is None else (body[at : at + PIECE] for at in range(0, len(body), PIECE))
        plain: Any = super(HTTPConnection, self)
        with suppress(BrokenPipeError, ConnectionResetError):  # there may be an answer: it wants no more of the body
            plain.request(method, target, pieces, headers)
        self.pace.begin()
        return plain.getresponse()

    @property
    def is_connected(self) -> bool:
        """Whether the next request may use it: nothing waits to be read, neither its end nor bytes nobody asked for."""
        pending = getattr(self.sock, "pending", int)()
        is_old = self._owner.clock.now() - self.pace.at > IDLE_SECONDS
        return not (pending or is_old or self.pace.is_stopped) and super().is_connected

    def abort(self) -> None:
        """End what another thread does with it."""
        self.pace.is_stopped = True
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(_BOTH_WAYS)


class _CheckedTlsConnection(_CheckedConnection, HTTPSConnection):
    pass


_clients: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """Pools of connections. Safe to use from several threads, and after a fork, when there are none."""

    def __init__(self, timeout: float, grace: float, clock: Clock, tls: ssl.SSLContext | None = None) -> None:
        self.clock, self.grace = clock, grace
        self._timeout, self._tls = timeout, tls
        self._inherited: list[object] = []
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[Host, str | None, Collection[str] | None], HTTPConnectionPool] = {}
        self._proxies: dict[Host, str | None] = {}
        self._open: weakref.WeakSet[_CheckedConnection] = weakref.WeakSet()
        self._near: dict[tuple[str, int], str] = {}
        self._is_v6: dict[tuple[str, int], bool] = {}
        """The kind of addresses that worked."""
        self._stops = 0

    @contextmanager
    def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: memoryview | None,
        allowed: Collection[str] | None,
        *,
        repeat: bool,
    ) -> Iterator[tuple[Any, Pace]]:
        """The answer to one request, of Python's own kind, and its pace. A redirect is an answer.

        ``allowed`` are the values of ``nearness`` that the other end may have; None for any. Without ``repeat`` the
        connection is new: one that was used may be closed, and nobody knows whether the request has arrived. Raises
        OSError, with AddressError where there is no other address, and HTTPException for what is not HTTP.
        """
        host, target = split(url)
        if host not in self._proxies:
            self._proxies[host] = proxy_for(host)  # goes through the whole environment
        proxy = self._proxies[host]
        if proxy and allowed is not None:  # the proxy looks the name up; what this machine knows is all there is
            _check(host.name, self._look_up(host) - {*allowed})
        pool = self._pool(host, proxy, allowed)
        is_tunnel = proxy is not None and host.scheme == "https"
        if proxy and not is_tunnel:
            target, headers = url, {**headers, **pool.proxy_headers}
        while True:
            conn = cast("_CheckedConnection", pool._get_conn())  # noqa: SLF001 - urlopen costs more than the answer
            if not repeat:
                conn.close()
            response, was_used = None, not conn.is_closed
            try:
                try:
                    if conn.is_closed:
                        _open(conn, pool, host, is_tunnel=is_tunnel)
                    response = conn.ask(method, target, headers, body)
                except ConnectionError:
                    if not was_used or conn.pace.is_stopped:
                        raise
                    continue  # it was closed while it was idle: the request has reached nobody
                yield response, conn.pace
                return
            finally:
                if response is None or not response.isclosed():
                    conn.close()
                if response is not None:
                    response.close()  # one that ends with its connection holds the socket, and nobody else does
                pool._put_conn(conn)  # noqa: SLF001

    def connect(self, name: str, port: int, allowed: Collection[str] | None) -> Any:
        """A socket that is connected to an address that is allowed. Raises OSError, and AddressError for none."""
        stops, found = self._stops, _addresses(name, port)
        # Where IPv6 leads nowhere, one connection finds out, and not all.
        found.sort(key=lambda a: (":" in a) != self._is_v6.get((name, port), ":" in a))
        refused = {nearness(a) for a in found} - ({*allowed} if allowed is not None else {*map(nearness, found)})
        tried = [a for a in found if nearness(a) not in refused][:MAX_ADDRESSES]
        if not tried:
            _check(name, refused)
        error: OSError = UnknownHostError()
        for address in tried:
            seconds = CONNECT_SECONDS if address == tried[-1] else NEXT_SECONDS
            try:
                options = HTTPConnection.default_socket_options
                sock = create_connection((address, port), min(self._timeout, seconds), socket_options=options)
            except OSError as e:
                error = e
                continue
            if stops != self._stops:
                sock.close()
                raise ConnectionAbortedError
            sock.settimeout(self._timeout)
            with self._lock:
                self._is_v6[name, port] = ":" in address
                near = nearness(address)
                self._near[name, port] = near if self._near.get((name, port), near) == near else PUBLIC
            return sock
        raise error

    def home(self, host: Host) -> str:
        """How near a host is that the user named."""
        near = self._near.get(host[1:])
        if near is None:
            found = self._look_up(host)
            near = PUBLIC if PUBLIC in found else min(found, default=PUBLIC)
        return near

    def has_met(self, host: Host) -> bool:
        """Whether there was a connection to a host, or to its proxy."""
        return host[1:] in self._near

    def add(self, conn: _CheckedConnection) -> None:
        with self._lock:
            self._open.add(conn)

    def stop(self) -> None:
        """End all connections, whoever waits for them."""
        with self._lock:
            self._stops += 1
            open_now = list(self._open)
        for conn in open_now:
            conn.abort()

    def forget(self) -> None:
        """In a child after a fork: the connections are its parent's, and locks may be held by threads that are not."""
        self._inherited += [self._pools, self._open]
        for conn in list(self._open):
            if conn.sock is not None and (fd := conn.sock.detach()) >= 0:
                os.close(fd)
        self._begin()

    def _pool(self, host: Host, proxy: str | None, allowed: Collection[str] | None) -> HTTPConnectionPool:
        key = (host, proxy, allowed if allowed is None else frozenset(allowed))
        with self._lock:
            if key not in self._pools:
                options: dict[str, Any] = {"maxsize": MAX_IDLE, "timeout": self._timeout}
                if host.scheme == "https":
                    options["ssl_context"] = self._tls = self._tls or _tls()
                manager = PoolManager(**options) if proxy is None else _through(proxy, options)
                pool: Any = manager.connection_from_host(host.bracketed, host.port, host.scheme)
                kind: Any = _CheckedTlsConnection if host.scheme == "https" else _CheckedConnection
                pool.ConnectionCls = partial(kind, owner=self, allowed=key[2])
                self._pools[key] = pool
            return self._pools[key]

    def _look_up(self, host: Host) -> set[str]:
        try:
            return {nearness(a) for a in _addresses(host.name, host.port)}
        except (OSError, UnicodeError):
            return set()


def _through(proxy: str, options: dict[str, Any]) -> ProxyManager:
    login, at, address = urlsplit(proxy).netloc.rpartition("@")
    user, _, password = login.partition(":")
    text = f"{unquote(user)}:{unquote(password)}".encode().decode("latin-1")  # make_headers sends Latin-1
    headers = make_headers(proxy_basic_auth=text) if at else None
    return ProxyManager(f"http://{address}", proxy_headers=headers, **options)


def _addresses(name: str, port: int) -> list[str]:
    """Raises UnknownHostError, and UnicodeError for what cannot be a name."""
    try:
        return list(dict.fromkeys(str(where[0]) for *_, where in getaddrinfo(name, port, proto=6)))  # TCP
    except OSError:
        raise UnknownHostError from None


def _open(conn: _CheckedConnection, pool: HTTPConnectionPool, host: Host, *, is_tunnel: bool) -> None:
    try:
        pool._prepare_proxy(conn) if is_tunnel else conn.connect()  # noqa: SLF001
    except OSError as e:
        if not (m := _TUNNEL.match(str(e))):
            raise
        by = pool.proxy.netloc if pool.proxy else ""
        what = f"the proxy {by} answers {m[1]} when asked for {host.bracketed}:{host.port}"
        raise OSError(what) from None


def _tls() -> ssl.SSLContext:
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    bundle = None if os.environ.get("SSL_CERT_FILE") else bundle
    kind = "capath" if bundle and os.path.isdir(bundle) else "cafile"  # noqa: PTH112
    where: dict[str, Any] = {kind: bundle}
    try:
        context = ssl.create_default_context(**where)
    except OSError as e:
        raise OSError(f"the certificates in {bundle} cannot be read: {e.strerror}") from None
    paths = ssl.get_default_verify_paths()
    if not (bundle or paths.cafile or paths.capath):  # a container without certificates
        with suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    own = os.environ.get("AWS_CA_BUNDLE")  # of a store in one's own network, as boto3 reads it
    if own:
        context.load_verify_locations(own)
    return context


def _check(name: str, refused: Collection[str]) -> None:
    if refused:
        raise AddressError(f"it leads to {name}, which has a {', '.join(sorted(refused))} address")


def _forget() -> None:
    for client in list(_clients):
        client.forget()


os.register_at_fork(after_in_child=_forget)
