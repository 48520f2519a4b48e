"""Every module of ckpttool, loaded at once."""

from __future__ import annotations

import importlib
import pkgutil

import ckpttool


def import_all() -> None:
    """Load what can be loaded here: the module of an engine needs a package that only its own tests install."""
    for module in pkgutil.walk_packages(ckpttool.__path__, "ckpttool."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as e:
            if e.name is None or e.name.startswith("ckpttool"):
                raise
