"""Machines that work for a run. Another engine is an addition: a module with ``fleet(address)``."""

from __future__ import annotations

from importlib import import_module

from ckpttool.errors import UsageError, not_installed
from ckpttool.execute.fleets.base import Fleet

MODULES = {"ray": "ray"}
"""Engine -> module beside this one, imported when it is used. ckpttool's extra for it has the engine's name."""


def fleet_for(text: str) -> Fleet:
    """The fleet that ``--on`` names: an engine, with an address where there are several (``ray=HOST:PORT``).

    Raises UsageError for an engine that does not exist, or is not installed.
    """
    engine, given, address = text.partition("=")
    if given and not address.strip():
        raise UsageError(f"--on {text}: the address is empty", hint=f"--on {engine}=HOST:PORT, or --on {engine}")
    if engine not in MODULES:
        raise UsageError(f"--on {text}: there is no such engine", hint=f"engines: {', '.join(MODULES)}")
    try:
        module = import_module(f"{__name__}.{MODULES[engine]}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "ckpttool":
            raise
        raise not_installed(f"--on {engine}", e.name, engine) from None
    found: Fleet = module.fleet(address)
    return found
