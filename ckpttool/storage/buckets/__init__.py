"""Buckets of the clouds, for sources and destinations: one class for each cloud, in a module of its own.

The libraries of the clouds log in and sign. Modules are imported when there is a place in their cloud.
"""

from __future__ import annotations

import sys
from importlib import import_module

from ckpttool.storage.buckets.base import Bucket

_CLOUDS = {"s3": ("boto3", "s3"), "gs": ("google.auth", "gcs"), "az": ("azure.storage.blob", "azure")}
"""Scheme -> library, and module of this package with ``open_bucket`` and ``close``."""
SCHEMES = tuple(_CLOUDS)


def check_installed(scheme: str) -> None:
    """Raises ModuleNotFoundError when a package is missing."""
    import_module(_CLOUDS[scheme][0])


def open_bucket(scheme: str, name: str, *, writes: bool = False) -> Bucket:
    """The bucket of this name; ``writes``: as a destination, which errors say. Asks nothing."""
    check_installed(scheme)
    found: Bucket = import_module(f"{__name__}.{_CLOUDS[scheme][1]}").open_bucket(name, writes=writes)
    return found


def close() -> None:
    """Close all connections and forget logins: the environment may be another one."""
    for _, module in _CLOUDS.values():
        if loaded := sys.modules.get(f"{__name__}.{module}"):
            loaded.close()
