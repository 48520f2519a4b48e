"""The Python API: everything that the commands do, as functions and objects.

    >>> import ckpttool
    >>> with ckpttool.open("llama_tp8") as source:                                     # doctest: +SKIP
    ...     source.read("model.layers.0.self_attn.q_proj.weight", (slice(0, 4),))
    ...     source.reshard(tp=2).run("llama_tp2", verify=True)
    >>> ckpttool.merge(["model_a", "model_b"], weights=[0.6, 0.4]).run("merged")        # doctest: +SKIP

``checkpoint`` opens and reads, ``plans`` has what can be looked at and run, ``results`` what comes back, ``commands``
the commands that need no open checkpoint. Every expected failure is a ``CkptError``.
"""

from ckpttool.answers.findings import CheckResult, Finding
from ckpttool.api.checkpoint import Checkpoint, open_
from ckpttool.api.commands import check, convert, diff, drop_keys, make_report, merge, size
from ckpttool.api.plans import Conversion, Dropping, Merging, Plan, Resharding
from ckpttool.api.results import Report, Size, Written
from ckpttool.api.show import in_notebooks
from ckpttool.ops.inspect.diff import DiffResult

__all__ = [
    "CheckResult",
    "Checkpoint",
    "Conversion",
    "DiffResult",
    "Dropping",
    "Finding",
    "Merging",
    "Plan",
    "Report",
    "Resharding",
    "Size",
    "Written",
    "check",
    "convert",
    "diff",
    "drop_keys",
    "make_report",
    "merge",
    "open_",
    "size",
]

in_notebooks()
