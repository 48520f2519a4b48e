"""All human and JSON output of results, and progress. The only module that imports rich."""
from __future__ import annotations

import json
import sys
from typing import Any

from ckpttool.execute import NoProgress, Progress, RunOptions
from ckpttool.ops.reshard import Prepared, ReshardResult


def progress(*, quiet: bool) -> Progress:
    return NoProgress()


def show_plan(prepared: Prepared, run: RunOptions, *, as_json: bool) -> None:
    print(prepared.format, prepared.mesh, len(prepared.plan.outputs), prepared.plan.bytes_written, prepared.plan.boxes)


def show_reshard(result: ReshardResult, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    for n in result.prepared.notes:
        print("note:", n, file=sys.stderr)
    print(result.dst, result.run.bytes_written)
