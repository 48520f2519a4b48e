"""Connections for ``storage/http.py``: addresses, proxies, TLS, and a pool of what can be used again.

A host that an answer named, not the user, may not be on this machine or its network: see ``nearness``.
"""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import os
import re
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

CONNECT_SECONDS, NEXT_SECONDS, MAX_ADDRESSES = 10.0, 3.0, 8
"""Seconds for the last address of a host, and for the others; how many addresses are tried."""
GRACE_SECONDS, SLOWEST = 60.0, 16 << 10
"""An answer may take so many seconds, and one more for each so many bytes: a slow drip is as good as no answer."""
IDLE_SECONDS = 50.0
"""A connection that waited longer is not used again: servers and firewalls close those, some without a word."""
MAX_IDLE = 64
"""Connections kept for each host."""
PORTS = {"https": 443, "http": 80}

PUBLIC = ""
_WIRE_SERVER = ipaddress.ip_address("168.63.129.16")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_OWN = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10")))
"""Of one's own network, whatever the ``ipaddress`` of this Python knows; clouds have had services there."""
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


class Clock:
    """Time as the client takes it; tests have one of their own."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        """Wait, but not longer than until the event is set."""
        stopped.wait(seconds)


class AddressError(OSError):
    """A host that an answer named is on this machine or its network."""


class Host(NamedTuple):
    """What a connection is made to."""

    scheme: str
    name: str
    port: int

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"


def split(url: str) -> tuple[Host, str]:
    """The host of a URL, and what of it is sent: path and query. Raises ValueError with a sentence."""
    if _UNSAFE.search(url):
        raise ValueError("the URL has spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the URL's host cannot be read") from None  # urlsplit's words have it, with a password
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


class Proxy(NamedTuple):
    """What the environment says of the way to a host."""

    name: str
    port: int
    headers: dict[str, str]


def proxy_for(host: Host) -> Proxy | None:
    """The proxy of ``HTTPS_PROXY``, ``HTTP_PROXY`` or ``ALL_PROXY``, unless ``NO_PROXY`` names the host.

    Raises OSError for a kind of proxy that is not known.
    """
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    text = proxies.get(host.scheme) or proxies.get("all")
    if not text or proxy_bypass(f"{host.name}:{host.port}"):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port, parts = None, None, urlsplit("")
    if parts.scheme != "http" or not name:
        raise OSError(f"the proxy of the environment is not http://HOST:PORT: {shown(text)}")
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    return Proxy(name, port or 80, headers)


class _Paced(io.RawIOBase):
    """The bytes of one answer as they come; an error as soon as they come too slowly, or there are too many."""

    def __init__(self, raw: io.RawIOBase, clock: Clock, grace: float, most: int) -> None:
        self._raw, self._clock, self._left = raw, clock, most
        self._until = clock.now() + grace
        self._count = 0
        self.has_begun = False
        """Whether what comes now is the body: only that may take longer the more there is of it."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        n = self._raw.readinto(buffer)
        self._left -= n or 0
        if self._left < 0:
            raise http.client.HTTPException("the answer does not end")
        self._count += (n or 0) if self.has_begun else 0
        if self._clock.now() > self._until + self._count / SLOWEST:
            raise TimeoutError("the answer comes too slowly")
        return n

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedSocket(NamedTuple):
    """What ``http.client`` makes the file of an answer from."""

    paced: _Paced

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.paced)


class _PacedResponse(http.client.HTTPResponse):
    """An answer that has to come in time."""

    def __init__(self, paced: _Paced, *args: Any, **options: Any) -> None:
        super().__init__(cast("socket.socket", _PacedSocket(paced)), *args, **options)
        self._paced = paced

    def begin(self) -> None:
        super().begin()
        self._paced.has_begun = True


class Connection(http.client.HTTPConnection):
    """A connection that is there already."""

    def __init__(self, host: Host, sock: socket.socket, near: str, clock: Clock, grace: float) -> None:
        super().__init__(host.name, host.port)
        self.auto_open = 0
        self.default_port = PORTS[host.scheme]
        self.sock = self.wire = sock
        self.to, self.near = host, near
        self.proxy: Proxy | None = None
        """A proxy that takes whole URLs; one that only passes bytes on is not seen here."""
        self.used_at = 0.0
        self.most = 0
        """Bytes that the next answer may have, with its headers and what lies between its chunks."""
        self._clock, self._grace = clock, grace
        self.response_class = self._response  # type: ignore[assignment]  # it is only called

    def _response(self, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
        raw = cast("io.RawIOBase", sock.makefile("rb", buffering=0))
        return _PacedResponse(_Paced(raw, self._clock, self._grace, self.most), *args, **options)

    def is_idle(self) -> bool:
        """Whether nothing waits to be read: neither its end, nor bytes that nobody asked for."""
        if isinstance(self.wire, ssl.SSLSocket) and self.wire.pending():
            return False
        poll = select.poll()
        poll.register(self.wire, select.POLLIN)
        return not poll.poll(0)


_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """Open connections, each used by one thread at a time. Safe to use from several threads, and after a fork."""

    def __init__(self, timeout: float, grace: float, clock: Clock, tls: ssl.SSLContext | None = None) -> None:
        self._timeout, self._grace, self._clock, self._tls = timeout, grace, clock, tls
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Host, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._peers: dict[Host, str] = {}
        self._families: dict[tuple[str, int], int] = {}
        """Kinds of addresses, IPv4 or IPv6, that worked."""

    def __del__(self) -> None:
        for conn in self._open:
            conn.wire.close()

    def take(self, host: Host, allowed: Collection[str] | None, *, fresh: bool = False) -> tuple[Connection, bool]:
        """A connection, and whether it was used before.

        ``allowed`` are the values of ``nearness`` that its other end may have; None for any. Raises OSError, and
        AddressError where there is no other address.
        """
        while not fresh and (conn := self._kept(host, allowed)):
            if self._clock.now() - conn.used_at < IDLE_SECONDS and conn.is_idle():
                return conn, True
            self.drop(conn)
        conn = self._dial(host, allowed)
        with self._lock:
            self._open.add(conn)
            self._peers[host] = conn.near if self._peers.get(host, conn.near) == conn.near else PUBLIC
        return conn, False

    def give(self, conn: Connection) -> None:
        """A connection whose answer was read to its end."""
        conn.used_at = self._clock.now()
        with self._lock:
            idle = self._idle.setdefault(conn.to, [])
            if conn in self._open and conn.sock is not None and len(idle) < MAX_IDLE:
                idle.append(conn)
                return
        self.drop(conn)

    def drop(self, conn: Connection) -> None:
        with self._lock:
            self._open.discard(conn)
        conn.close()
        with suppress(OSError):
            conn.wire.close()

    def home(self, host: Host) -> str:
        """How near a host is that the user named."""
        near = self._peers.get(host)
        if near is None:
            found = _look_up(host)
            near = PUBLIC if PUBLIC in found else min(found, default=PUBLIC)
        return near

    def has_met(self, host: Host) -> bool:
        """Whether there was a connection to a host."""
        return host in self._peers

    def stop(self) -> None:
        """End all connections, whoever waits for them."""
        with self._lock:
            busy, idle, self._open, self._idle = self._open, self._idle, set(), {}
        for conn in (c for conns in idle.values() for c in conns):
            busy.discard(conn)
            conn.wire.close()
        for conn in busy:
            with suppress(OSError):  # not SSLSocket's own: a thread reads from it
                socket.socket.shutdown(conn.wire, socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a child after a fork: the connections are its parent's."""
        open_now = self._open
        self._begin()
        for conn in open_now:
            fd = conn.wire.detach()
            if fd >= 0:
                os.close(fd)

    def _kept(self, host: Host, allowed: Collection[str] | None) -> Connection | None:
        with self._lock:
            idle = self._idle.get(host, [])
            for i in reversed(range(len(idle))):
                if allowed is None or idle[i].near in allowed:
                    return idle.pop(i)
        return None

    def _dial(self, host: Host, allowed: Collection[str] | None) -> Connection:
        proxy = proxy_for(host)
        if proxy is None:
            sock, near = self._connect(host.name, host.port, allowed)
        else:
            # The proxy looks the name up: what this machine knows of it is all there is to go by.
            found = _look_up(host)
            _check(host.name, sorted(found - {*allowed}) if allowed is not None else ())
            near = PUBLIC if PUBLIC in found else min(found, default=PUBLIC)
            sock, _ = self._connect(proxy.name, proxy.port, None)
        try:
            if host.scheme == "https":
                if proxy is not None:
                    _tunnel(sock, host, proxy)
                sock = self._context().wrap_socket(sock, server_hostname=host.name)
            sock.settimeout(self._timeout)
            conn = Connection(host, sock, near, self._clock, self._grace)
            conn.proxy = proxy if host.scheme == "http" else None
        except BaseException:
            sock.close()
            raise
        return conn

    def _connect(self, name: str, port: int, allowed: Collection[str] | None) -> tuple[socket.socket, str]:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        # Where IPv6 leads nowhere, one connection finds out, and not all.
        found.sort(key=lambda one: one[0] != self._families.get((name, port), one[0]))
        near_ones = [nearness(str(address[0])) for *_, address in found]
        refused = [near for near in near_ones if allowed is not None and near not in allowed]
        tried = [(one, near) for one, near in zip(found, near_ones, strict=True) if near not in refused]
        error = None
        for i, ((family, kind, protocol, _, address), near) in enumerate(tried[:MAX_ADDRESSES]):
            seconds = CONNECT_SECONDS if i == len(tried) - 1 else NEXT_SECONDS
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(min(self._timeout, seconds))
                sock.connect(address)  # the address that was looked at: a second look-up might give another one
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as e:
                sock.close()
                error = e
                continue
            except BaseException:
                sock.close()
                raise
            self._families[name, port] = family
            return sock, near
        _check(name, refused if error is None else ())
        raise error or OSError(f"no address is known for {name}")

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = _tls()
            return self._tls


def _tls() -> ssl.SSLContext:
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if bundle and not os.environ.get("SSL_CERT_FILE"):
        is_directory = os.path.isdir(bundle)  # noqa: PTH112
        try:
            context = ssl.create_default_context(
                cafile=None if is_directory else bundle, capath=bundle if is_directory else None
            )
        except OSError as e:
            raise OSError(f"the certificates in {bundle} cannot be read: {e.strerror}") from None
    else:
        context = ssl.create_default_context()
        paths = ssl.get_default_verify_paths()
        if not (paths.cafile or paths.capath):  # a container without certificates
            with suppress(ImportError):
                import certifi

                context.load_verify_locations(certifi.where())
    own = os.environ.get("AWS_CA_BUNDLE")  # of a store in one's own network, as boto3 reads it
    if own:
        context.load_verify_locations(own)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _tunnel(sock: socket.socket, host: Host, proxy: Proxy) -> None:
    tunnel = http.client.HTTPConnection(proxy.name, proxy.port)
    tunnel.sock = sock
    name = f"[{host.name}]" if ":" in host.name else host.name
    authority = f"{name}:{host.port}"
    tunnel.request("CONNECT", authority, headers={"Host": authority, **proxy.headers})
    response = http.client.HTTPResponse(sock, method="CONNECT")
    response.begin()
    status = response.status
    response.close()
    tunnel.sock = None
    if status != http.client.OK:
        raise OSError(f"the proxy {proxy.name}:{proxy.port} answers {status} when asked for {authority}")


def _look_up(host: Host) -> set[str]:
    try:
        found = socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {nearness(str(address[0])) for *_, address in found}


def _check(name: str, refused: Collection[str]) -> None:
    if refused:
        raise AddressError(f"it leads to {name}, which has a {', '.join(sorted(set(refused)))} address")


def _forget() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget)
