"""``ckpttool doctor``: whether runs can work here, what is slow or missing, and how to mend it.

Each point has a verdict, a text and a hint. The filesystem is tried with the calls that runs use
(``execute.probes``); logins are those that the readers of each storage look for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.words import count, short
from ckpttool.errors import CkptError, UsageError
from ckpttool.execute import probes
from ckpttool.execute.files import descriptor_limit
from ckpttool.storage.access import anonymous
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import parse_place
from ckpttool.storage.system import cores
from ckpttool.version import __version__

OK, SLOW, MISSING, WRONG = "ok", "slow", "missing", "wrong"
"""Works; works, but takes more time or space; missing, and only some uses need it; no run can work."""
PACKAGES = ("numpy", "ml_dtypes", "xxhash", "pydantic", "pyyaml", "rich", "typer", "huggingface_hub", "protobuf")
EXTRAS = (
    ("torch", "torch", "torch tensors in the Python API, merge --method della --rng mergekit"),
    ("boto3", "remote", "s3://"),
    ("google.auth", "remote", "gs://"),
    ("azure.storage.blob", "remote", "az://"),
    ("azure.identity", "remote", "az:// with an Azure login"),
    ("ray", "ray", "--on ray"),
)
"""Modules, the extra that installs each, and its uses."""
_VECTORS = ("avx512f", "avx2", "asimd")
_LEAST_FREE = 64 << 20
"""Bytes below which no checkpoint can be written."""
_FEW_FILES = 1000
_LITTLE_MEMORY = 1 << 30
_FEW_DESCRIPTORS = 64


class Point(NamedTuple):
    """One check and its result."""

    topic: str
    id: str
    verdict: str
    text: str
    hint: str = ""


@dataclass(slots=True)
class MachineHealth:
    """The state of this machine and of one path or URL."""

    place: Place
    points: list[Point] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether ordinary runs are possible."""
        return all(p.verdict != WRONG for p in self.points)


def examine(path: AnyPlace = ".", *, online: bool = False) -> MachineHealth:
    """Look at this machine and at a path or URL. Uses the network only with ``online``.

    Raises UsageError when neither the path nor a directory above it exists.
    """
    place = parse_place(path)
    out = MachineHealth(place)
    if isinstance(place, Path):
        out.points += _filesystem(place)
    elif online:
        out.points.append(_reached(place))
    else:
        out.points.append(Point("place", "place", OK, f"{place}: not checked (--online does)"))
    out.points += [*_machine(), *_python(), *_extras(), *_logins(online=online)]
    out.versions = {"ckpttool": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    out.versions |= {name: _version(name) for name in PACKAGES}
    return out


# -- where bytes go


def _filesystem(path: Path) -> Iterator[Point]:
    here = path.absolute()
    while not here.is_dir() and here != here.parent:
        here = here.parent
    if not path.exists() and here == Path(here.anchor):
        raise UsageError("the path does not exist", where=str(path), hint="give a directory, or a URL")
    try:
        found = probes.look_at(here)
    except OSError as e:
        raise UsageError(f"cannot access the path: {e.strerror}", where=str(here)) from None
    what = found.kind or "a filesystem"
    if found.mounted:
        what += f" mounted at {found.mounted}"
    yield Point("place", "filesystem", OK, f"{here}: {what}")
    if found.refused:
        hint = "reading works; choose another directory for DST"
        yield Point("place", "writing", WRONG, f"not writable: {found.refused}", hint)
        return
    room, hint = f"{short(found.free)} free", "free some space, or choose another disk for DST"
    if found.free < _LEAST_FREE:
        yield Point("place", "space", WRONG, room, hint)
    else:
        yield Point("place", "space", OK, room)
    if found.files is not None and found.files < _FEW_FILES:
        yield Point("place", "files", SLOW, f"room for only {count(found.files, 'more file')} (inodes)", hint)
    yield from _abilities(found)


def _abilities(found: probes.Filesystem) -> Iterator[Point]:
    ways = {
        "direct": (OK, "large writes bypass the page cache (O_DIRECT)", ""),
        "uncached": (OK, "large writes bypass the page cache (RWF_DONTCACHE)", ""),
        "write-behind": (OK, "large writes are dropped from the page cache at once", ""),
        "plain": (SLOW, "large writes fill the page cache", "a local disk is faster"),
    }
    yield Point("place", "writing", *ways[found.policy])
    if found.reflinks:
        yield Point("place", "links", OK, "reflinks: drop-keys --link takes no space")
    elif found.hard_links:
        text = "hard links, no reflinks: never edit the files of drop-keys --link in place"
        yield Point("place", "links", OK, text)
    else:
        text = "no links: drop-keys --link copies files"
        yield Point("place", "links", SLOW, text, "btrfs and XFS have reflinks")
    if found.locks:
        yield Point("place", "locks", OK, "concurrent runs to the same DST are blocked")
    else:
        yield Point(
            "place", "locks", MISSING, "concurrent runs to the same DST are not detected", "start one at a time"
        )
    if found.exchanges:
        yield Point("place", "exchange", OK, "--force replaces DST atomically")
    else:
        text = "--force replaces DST in two steps: DST is briefly missing"
        yield Point("place", "exchange", SLOW, text, "readers may have to retry")
    if not found.sparse:
        text = "no sparse files: outputs take their full size from the start"
        yield Point("place", "sparse", SLOW, text)
    if not found.case:
        yield Point("place", "case", SLOW, "file names ignore case: `A.json` replaces `a.json`")


def _reached(place: Place) -> Point:
    try:
        listing = list_source(place)
    except CkptError as e:
        return Point("place", "place", WRONG, f"{place}: {e.what}", e.hint or "")
    return Point("place", "place", OK, f"{place}: reached, {count(len(listing.names), 'file')}")


# -- this machine


def _machine() -> Iterator[Point]:
    free, total = probes.memory()
    text = f"{short(free)} of {short(total)} free"
    if free < _LITTLE_MEMORY:
        hint = "--memory 16MiB; --workers 1 for merges"
        yield Point("machine", "memory", SLOW, text + "; a merge takes about 100 MB a process", hint)
    else:
        yield Point("machine", "memory", OK, text)
    there, quota = cores(), probes.quota()
    text = count(there, "core")
    if quota is not None and quota < there:
        hint = f"--workers {max(1, round(quota))} for merge and quantize, which start one process per core"
        yield Point("machine", "cores", SLOW, f"{text}, but a quota of {quota:g}", hint)
    else:
        yield Point("machine", "cores", OK, text)
    flags = probes.processor()
    vectors = next((f for f in _VECTORS if f in flags), "")
    if vectors or not flags:
        yield Point("machine", "processor", OK, f"vector instructions: {vectors or 'unknown'}")
    else:
        yield Point("machine", "processor", SLOW, "no AVX2: casts, statistics and merges are several times slower")
    files = descriptor_limit()
    if files < _FEW_DESCRIPTORS:
        text = f"only {files} open files allowed: runs reopen files more often"
        yield Point("machine", "descriptors", SLOW, text, "ulimit -n 4096")
    else:
        yield Point("machine", "descriptors", OK, f"{files:,} open files allowed")


def _python() -> Iterator[Point]:
    yield Point("python", "python", OK, f"Python {sys.version.split()[0]}, ckpttool {__version__}")
    lost = [name for name in PACKAGES if _version(name) is None]
    if lost:
        hint = f"pip install {' '.join(lost)}"
        yield Point("python", "packages", WRONG, f"not installed: {', '.join(lost)}", hint)
    else:
        held = ", ".join(f"{name} {_version(name)}" for name in PACKAGES[:3])
        yield Point("python", "packages", OK, f"installed: {held}, ...")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extras() -> Iterator[Point]:
    for module, extra, use in EXTRAS:
        if _there(module):
            yield Point("extras", module, OK, f"installed: {use}")
        else:
            yield Point(
                "extras", module, MISSING, f"not installed, needed for {use}", f"pip install 'ckpttool[{extra}]'"
            )


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that is not there
        return False


# -- other machines


def _logins(*, online: bool) -> Iterator[Point]:
    if anonymous():
        yield Point("logins", "anonymous", OK, "CKPTTOOL_ANONYMOUS is set: requests carry no credentials")
        return
    for scheme, module, look, hint in _PLACES:
        if not _there(module):
            continue
        try:
            found = look(online)
        except CkptError as e:
            yield Point("logins", scheme, MISSING, f"{scheme}:// {e.what}", e.hint or hint)
            continue
        if found:
            yield Point("logins", scheme, OK, f"{scheme}:// {found}")
        else:
            yield Point("logins", scheme, MISSING, f"{scheme}:// no login found", hint)


def _hub(online: bool) -> str:  # noqa: FBT001 - one shape for all
    from ckpttool.storage.hub_access import endpoint, is_offline, token

    if is_offline():
        return "offline: reads the cache only (HF_HUB_OFFLINE)"
    held = token()
    if not online:
        return "token found" if held else ""
    from huggingface_hub import HfApi

    try:
        if held:
            return f"logged in as {HfApi(endpoint=endpoint(), token=held).whoami()['name']}"
        HfApi(endpoint=endpoint(), token=False).list_models(limit=1)
    except Exception as e:
        raise UsageError(
            f"the Hub rejects the login or does not answer: {type(e).__name__}", hint="hf auth login"
        ) from e
    return ""


def _s3(online: bool) -> str:  # noqa: FBT001
    import boto3

    # Without a network, the roles of instances cannot be asked for.
    before = os.environ.get("AWS_EC2_METADATA_DISABLED")
    if not online:
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    try:
        remote = not online and any(n.startswith("AWS_CONTAINER_CREDENTIALS") for n in os.environ)
        found = None if remote else boto3.Session().get_credentials()
    except Exception as e:
        raise UsageError(f"the AWS settings are invalid: {e}", hint="correct AWS_PROFILE or ~/.aws") from e
    finally:
        if before is None:
            os.environ.pop("AWS_EC2_METADATA_DISABLED", None)
        else:
            os.environ["AWS_EC2_METADATA_DISABLED"] = before
    if remote:
        return "container credentials (--online checks them)"
    return f"login found ({found.method})" if found is not None else ""


def _gs(online: bool) -> str:  # noqa: FBT001
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = os.environ.get("CLOUDSDK_CONFIG") or str(Path.home() / ".config" / "gcloud")
    if online:
        from ckpttool.storage.buckets.gcs import authorization

        return "logged in" if authorization("gs://") else "STORAGE_EMULATOR_HOST is set"
    held = [p for p in (named, f"{home}/application_default_credentials.json") if p and Path(p).is_file()]
    return f"credentials found: {held[0]}" if held else ""


def _az(online: bool) -> str:  # noqa: FBT001
    del online  # an Azure login belongs to one account, and only a URL of that account proves it
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        if os.environ.get(name):
            return f"{name} is set"
    if os.environ.get("AZURE_STORAGE_ACCOUNT") and (Path.home() / ".azure" / "azureProfile.json").is_file():
        return "AZURE_STORAGE_ACCOUNT is set, `az login` found"
    return ""


_PLACES: tuple[tuple[str, str, Callable[[bool], str], str], ...] = (
    ("hf", "huggingface_hub", _hub, "hf auth login, or set HF_TOKEN; public repositories need none"),
    (
        "s3",
        "boto3",
        _s3,
        "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; --anonymous reads public buckets",
    ),
    ("gs", "google.auth", _gs, "gcloud auth application-default login; --anonymous reads public buckets"),
    ("az", "azure.storage.blob", _az, "set AZURE_STORAGE_CONNECTION_STRING; --anonymous reads public containers"),
)
