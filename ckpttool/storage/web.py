"""Files of web servers: ``https://host/model.safetensors``, or a directory of them.

The web has no listings. What a directory holds is what its indexes name (``model.safetensors.index.json``, ...), what a
pipeline names (``model_index.json``), and whichever of the usual files are there: each is asked for once, by HEAD.

A URL's query may be a signature. It is sent with the requests of the file or directory that it came with, and is not
part of the text of a place, which is shown and recorded. A login is that of ``~/.netrc``.
"""

from __future__ import annotations

import base64
import errno
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote, urlsplit

from ckpttool.core.files import DataFile, OpenFile
from ckpttool.errors import AccessError, CorruptError, UnsupportedError, UsageError
from ckpttool.storage import hub
from ckpttool.storage.access import QUERIES, anonymous
from ckpttool.storage.caches import TimedCache
from ckpttool.storage.http import Answer, ChangedError, HttpError, NoRangesError, RefusedRedirectError, client, shown
from ckpttool.storage.json_file import parse_json
from ckpttool.storage.network import split
from ckpttool.storage.place import read_all
from ckpttool.storage.remote import NamedEntry, RangedFile, RemotePlace, parts

INDEXED = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "master_weights.safetensors",
    "peft_model.safetensors",
)
"""Files of tensors that may have an index: its name has ``.index.json`` more."""
PIPELINE = "model_index.json"
USUAL = (
    "config.json", "generation_config.json", "model_config.json", "quantize_config.json", "hf_quant_config.json",
    "adapter_config.json", "adapter_model.bin", "consolidated.safetensors", "params.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "README.md", "LICENSE",
    "optimizer.pt", "optimizer.bin", "optimizer.pdopt", "scheduler.pt", "scheduler.pdparams", "trainer_state.json",
    "trainer_state.bin", "training_args.bin",
)  # fmt: skip
MAX_INDEX = 256 << 20
MAX_NAMES = 1 << 18
LISTED_SECONDS = 30.0
"""How long what was found says what is there."""
_PROBES = 8
"""Requests at a time while a directory is listed."""
_NOT_THERE, _NO_ENTRY = {404, 410}, {401, 403}
_MOVED = {400, 401, 403, 404, 410}
"""Answers of an address to which a redirect led some time ago."""
_TEXT = re.compile(r"(https?):/{1,2}(?=[^/])")


class WebFileState(NamedTuple):
    """A file, as it was when it was looked at."""

    size: int
    etag: str | None
    modified: str | None
    location: str
    """The URL at the end of the redirects."""

    @property
    def tag(self) -> str:
        return self.etag or self.modified or ""


@dataclass(frozen=True, slots=True, repr=False)
class WebPlace(RemotePlace):
    """A file or directory of a web server."""

    url: str
    """Escaped, without a query and without a slash at its end."""
    query: str = ""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return unquote(self._path.rpartition("/")[2]) or split(self.url)[0].name

    @property
    def parent(self) -> WebPlace:
        return _at(self.url.removesuffix(self._path) + self._path.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> WebPlace:
        url = "/".join([self.url, *(quote(p, safe="!$&'()*+,;=:@~") for p in parts(name))])
        return WebPlace(url, QUERIES.get(url, self.query))

    def is_file(self) -> bool:
        if entry := (_listed.get(self.parent) or {}).get(self.name):
            return entry.is_file()
        if _absent.get(self):
            return False
        try:
            found = _ask(self)
        except HttpError as e:
            # Without a suffix it may be a directory: servers show what is in it to nobody.
            if e.status not in _NOT_THERE and (e.status not in _NO_ENTRY or self.suffix):
                _explain(self, e)
            found = None
        if found is None:
            _absent.put(self, answer=True)
        return found is not None

    def is_dir(self) -> bool:
        return bool(self._list())

    def scan(self) -> Iterable[NamedEntry]:
        found = self._list()
        if not found:
            raise self.error(errno.ENOENT)
        return found.values()

    def identity(self) -> tuple[int, str]:
        found = _look(self)
        return found.size, found.tag

    def open_file(self) -> OpenFile:
        found = _seen(self)
        info = DataFile(self, found.size, found.tag)
        return RangedFile(info, partial(_fill, info, self))

    def note(self) -> str:
        """What else may lie in a directory (an optimizer without an index, say) cannot be known."""
        return "" if self.is_file() else "the web has no listings: only files with usual names, or in indexes, are read"

    def lost(self) -> str:
        if said := _refused.get(self):
            return said
        return (
            "the web has no listings: a directory needs an index (model.safetensors.index.json) or a file with a usual "
            "name (model.safetensors, config.json); or give the URL of one file"
        )

    @property
    def _path(self) -> str:
        return urlsplit(self.url).path

    def _list(self) -> dict[str, NamedEntry]:
        found, above = _listed.get(self), _listed.get(self.parent)
        if found is None and above and self not in _given:  # formats ask for a dozen names that a directory may have
            found = None if self.name in above and above[self.name].is_folder else {}
        if found is None:
            found = _list(self)
            _listed.put(self, found)
        return found


def parse(text: str) -> WebPlace | hub.HubPlace:
    """The place that a text names; one slash after the colon will do. Asks nothing. Raises UsageError.

    Pages of the Hub and downloads from it are its models.
    """
    m = _TEXT.match(text)
    url, _, query = _TEXT.sub(r"\1://", text).partition("#")[0].partition("?")
    if "@" in url.removeprefix(f"{m[1]}://").partition("/")[0] if m else False:
        raise UsageError(
            "a URL with a user name or password would be seen in lists of processes, and is not taken",
            where=shown(text),
            hint="put the login into ~/.netrc: machine HOST login NAME password ...",
        )
    try:
        host, path = split(url.replace(" ", "%20"))
        split(f"{url.replace(' ', '%20')}?{query}")
    except ValueError as e:
        raise UsageError(str(e), where=shown(text)) from None
    if any(unquote(p) in (".", "..") for p in path.split("/")):
        raise UsageError("the URL contains ..", where=shown(text), hint="write the URL that it leads to")
    url = f"{host.scheme}://{host}{path.rstrip('/')}"
    if model := hub.from_page(url):
        return model
    if query:
        QUERIES[url] = query
    place = _at(url)
    _given.add(place)
    return place


def _fill(info: DataFile, place: WebPlace, at: int, into: memoryview) -> None:
    """Read a range of a file. Raises AccessError, CorruptError, UnsupportedError, and FileNotFoundError."""
    url, found = _sent(place), _files.get(place)
    location = found.location if found else url
    try:
        try:
            _range(info, url, location, at, into)
        except HttpError as e:
            if e.status not in _MOVED or location == url:
                raise
            _range(info, url, _look(place).location, at, into)
    except HttpError as e:
        _explain(place, e)


def _range(info: DataFile, url: str, location: str, at: int, into: memoryview) -> None:
    is_etag = info.tag.startswith(('"', "W/"))
    client().get_range(
        location,
        at,
        at + len(into),
        into,
        headers=_login(location, url),
        if_match=info.tag if is_etag else None,
        modified=info.tag if info.tag and not is_etag else None,
        total=info.size,
        origin=None if location == url else url,
    )


_files: TimedCache[WebPlace, WebFileState] = TimedCache(math.inf, 1 << 20)
"""Files as they were when somebody looked last."""
_given: set[WebPlace] = set()
"""Places that users named."""
_absent: TimedCache[WebPlace, bool] = TimedCache(LISTED_SECONDS)
_listed: TimedCache[WebPlace, dict[str, NamedEntry]] = TimedCache(LISTED_SECONDS)
_refused: TimedCache[WebPlace, str] = TimedCache(math.inf)


def _at(url: str) -> WebPlace:
    """A place with the query that its URL, or one above it, came with."""
    at = url
    while at.count("/") > 2:
        if at in QUERIES:
            return WebPlace(url, QUERIES[at])
        at = at.rpartition("/")[0]
    return WebPlace(url, QUERIES.get(at, ""))


def _sent(place: WebPlace) -> str:
    return place.url + (f"?{place.query}" if place.query else "")


def _look(place: WebPlace) -> WebFileState:
    """A file as it is now. Raises FileNotFoundError, AccessError, UnsupportedError."""
    try:
        return _ask(place) or _raise(place.error(errno.ENOENT))
    except HttpError as e:
        _explain(place, e)


def _seen(place: WebPlace) -> WebFileState:
    """A file as it was when somebody looked last; as it is now where nobody did. Raises as ``_look`` does."""
    return _files.get(place) or _look(place)


def _ask(place: WebPlace) -> WebFileState | None:
    """A file as it is now; None for a page and other things that are no file. Raises HttpError, UnsupportedError."""
    url = _sent(place)
    if ".." in place.url.split("/"):
        return None
    answer = client().request("HEAD", url, headers=_login(url, url))
    no_head = answer.status in (405, 501) or (answer.status in (400, 403) and place.query)  # signed for GET
    if no_head or (answer.status == 200 and not answer.total):  # to HEAD, some say 0 of every file
        answer = _first_byte(url) or answer
    if answer.status not in (200, 206) and not (answer.status == 416 and answer.total == 0):
        raise HttpError(f"{split(url)[0]} answers {answer.named}", url, answer)
    if answer.total is None:
        raise UnsupportedError("the server does not say how long the file is", where=str(place), hint=_DOWNLOAD)
    if not _is_data(place, answer):
        return None
    found = WebFileState(answer.total, answer.headers.get("ETag"), answer.headers.get("Last-Modified"), answer.url)
    _files.put(place, found)
    return found


def _first_byte(url: str) -> Answer | None:
    """The answer to GET for the first byte; None where it says nothing of the file."""
    try:
        return client().get_range(url, 0, 1, memoryview(bytearray(1)), headers=_login(url, url))
    except HttpError as e:
        return e.answer


def _is_data(place: WebPlace, answer: Answer) -> bool:
    """Whether an answer is a file of a checkpoint, and no page: of a directory, or of what is not there."""
    if urlsplit(answer.url).path.endswith("/"):
        return False
    return answer.headers.get_content_type() not in ("text/html", "application/xhtml+xml") or ".htm" in place.suffix


def _list(place: WebPlace) -> dict[str, NamedEntry]:
    """What is found in a directory; {} where nothing is. Raises AccessError."""
    indexes = [f"{n}.index.json" for n in INDEXED] + [PIPELINE]
    names = [*indexes, *INDEXED, *USUAL]
    with ThreadPoolExecutor(_PROBES) as pool:
        try:
            found = {n: NamedEntry(n) for n, there in zip(names, pool.map(_prober(place), names), strict=True) if there}
        except KeyboardInterrupt:
            client().stop()
            raise
    for index in [n for n in indexes if n in found]:
        if (size := _seen(place / index).size) > MAX_INDEX:
            raise UnsupportedError(f"an index of {size:,} bytes is too large", where=str(place / index))
        try:
            data = parse_json(read_all(place / index), MAX_INDEX)
        except ValueError:
            continue  # whoever reads it says what is wrong
        named = data.get("weight_map") if isinstance(data, dict) and index != PIPELINE else None
        if isinstance(named, dict):
            found |= {n: NamedEntry(n) for n in _plain(named.values())}
        elif isinstance(data, dict) and index != PIPELINE and "weight_map" not in data:
            raise UnsupportedError(
                "this index names no files, and the web has no listings: its files cannot be found",
                where=str(place / index),
                hint="read the checkpoint from a directory or a bucket",
            )
        elif isinstance(data, dict) and index == PIPELINE:
            parts = [k for k, v in data.items() if isinstance(v, list) and any(v)]
            found |= {n: NamedEntry(n, is_folder=True) for n in _plain(parts) if n not in found}
    return found


def _plain(names: Iterable[Any]) -> list[str]:
    """The names that can be files in one directory."""
    plain = {n for n in names if isinstance(n, str) and re.fullmatch(r"[^/\\\x00]{1,255}", n) and n not in (".", "..")}
    if len(plain) > MAX_NAMES:
        raise UnsupportedError(f"an index names {len(plain):,} files, more than {MAX_NAMES:,}")
    return sorted(plain)


def _prober(place: WebPlace) -> Callable[[str], bool]:
    """Whether a file with a usual name is there. What the first one ends with ends all."""
    failed = threading.Event()

    def is_there(name: str) -> bool:
        if failed.is_set():
            return False
        try:
            return _ask(place / name) is not None
        except RefusedRedirectError as e:
            _refused.put(place, f"{e.strerror}; {e.hint}")
            return False
        except HttpError as e:
            if e.status in _NO_ENTRY:  # S3 says so of what is not there to those who may not list
                _refused.put(place, f"{e.strerror}; {_LOG_IN}")
            elif e.status not in _NOT_THERE:
                failed.set()
                _explain(place / name, e)
            return False
        except UnsupportedError:
            return False

    return is_there


def _explain(place: WebPlace, e: HttpError) -> NoReturn:
    """Raise what an answer, or none, means."""
    if e.status in _NOT_THERE:
        raise place.error(errno.ENOENT) from None
    if isinstance(e, ChangedError):
        what = e.strerror or "the file has changed"
        raise CorruptError(what, where=str(place), hint=f"repeat the command; if it fails again, {_DOWNLOAD}") from None
    if isinstance(e, NoRangesError):
        raise UnsupportedError(e.strerror or "the server sends no ranges", where=str(place), hint=_DOWNLOAD) from None
    hint = e.hint or "check the URL, the network and the proxy (HTTPS_PROXY)"
    if e.status in _NO_ENTRY:
        hint = _LOG_IN
    elif e.status:
        hint = "try again later"
    raise AccessError(f"the file cannot be reached: {e.strerror}", where=str(place), hint=hint) from None


_LOG_IN = "the URL may need a login (in ~/.netrc: machine HOST login NAME password ...) or a fresh signature"
_DOWNLOAD = "download the file and give its path"


def _raise(e: OSError) -> NoReturn:
    raise e


def _login(url: str, named: str) -> Mapping[str, str]:
    """The login of ``~/.netrc`` for the host that the user named; never for another one, and not unencrypted."""
    host = split(url)[0]
    if anonymous() or host != split(named)[0] or host.scheme != "https":
        return {}
    import netrc

    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(path).hosts.get(host.name)  # what is for all hosts is not for one that a recipe names
    except (OSError, netrc.NetrcParseError, UnicodeError):
        return {}
    if not known:
        return {}
    user, _, password = known
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
