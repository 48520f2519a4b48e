"""Machines that work for a run. Another engine is an addition: a module with ``fleet(address)``."""

from __future__ import annotations

import sys

from ckpttool.errors import UsageError
from ckpttool.execute.fleets.apart import ApartFleet, connected
from ckpttool.execute.fleets.base import Fleet

ENGINES = ("ray",)
"""Each is a module beside this one, imported when it is used, a package, and an extra of ckpttool."""


def fleet_for(text: str) -> Fleet:
    """The fleet that ``--on`` names: an engine, with an address where there are several (``ray=HOST:PORT``).

    Raises UsageError for an engine that does not exist, or is not installed.
    """
    engine, given, address = text.partition("=")
    if given and not address.strip():
        raise UsageError(f"--on {text}: the address is empty", hint=f"--on {engine}=HOST:PORT, or --on {engine}")
    if engine not in ENGINES:
        raise UsageError(f"--on {text}: unknown engine", hint=f"engines: {', '.join(ENGINES)}")
    # A program that has imported the engine may be connected to a cluster, and has one connection.
    return connected(engine, address) if engine in sys.modules else ApartFleet(engine, address)
