"""What checks find: identifiers, how bad each is, and the answer that collects them.

The identifiers are stable: scripts may rely on them. docs/findings.md explains them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.words import count

if TYPE_CHECKING:
    from ckpttool.core.files import Place

ERROR, WARNING, INFO = "error", "warning", "info"
INERT, REFUSED, DANGEROUS = "inert", "refused", "dangerous"
"""What weights are made of; what loaders of weights refuse; what runs commands or code when it is called."""

CHECKPOINT = {
    "unreadable": ERROR,
    "header-length": ERROR,
    "header-utf8": ERROR,
    "header-json": ERROR,
    "duplicate-key": ERROR,
    "metadata": ERROR,
    "entry": ERROR,
    "dtype": ERROR,
    "shape": ERROR,
    "offsets": ERROR,
    "size": ERROR,
    "truncated": ERROR,
    "overlap": ERROR,
    "hole": ERROR,
    "trailing": ERROR,
    "shard-missing": ERROR,
    "shard-numbering": ERROR,
    "orphan-shard": WARNING,
    "no-index": WARNING,
    "index-json": ERROR,
    "index-shard": ERROR,
    "index-missing": ERROR,
    "index-extra": ERROR,
    "total-size": WARNING,
    "duplicate-tensor": ERROR,
    "format": ERROR,
    "corrupt": ERROR,
    "incomplete": ERROR,
    "conflict": ERROR,
    "layout": ERROR,
    "unsupported": ERROR,
    "latest": ERROR,
    "save-unfinished": ERROR,
    "rank-missing": ERROR,
    "ranks-differ": ERROR,
    "chunk-missing": ERROR,
    "chunk-overlap": ERROR,
    "chunk-size": ERROR,
    "params-json": ERROR,
    "component-refused": WARNING,
    "adapter-kind": INFO,
    "remote-code": WARNING,
    "pickle-code": ERROR,
    "pickle-imports": INFO,
    "scale-missing": ERROR,
    "scale-orphan": ERROR,
    "scale-shape": ERROR,
    "scale-shard": INFO,
    "unscaled": INFO,
    "config-json": ERROR,
    "config-missing": INFO,
    "config-architecture": INFO,
    "config-layers": ERROR,
    "config-extra-layers": WARNING,
    "config-vocab": ERROR,
    "config-vocab-padding": WARNING,
    "config-tie": ERROR,
    "config-tied-copy": INFO,
    "manifest-json": ERROR,
    "manifest-file": ERROR,
    "manifest-size": ERROR,
    "manifest-tensor": ERROR,
    "manifest-checksum": ERROR,
    "replica": ERROR,
    "padding": ERROR,
    "scale-value": ERROR,
    "tied-differ": ERROR,
    "masters-differ": WARNING,
    "steps-differ": WARNING,
    "files-equal": WARNING,
    "member-checksum": ERROR,
    "nan": ERROR,
    "inf": ERROR,
    "zeros": WARNING,
}
PROGRAM = {
    "unreadable": ERROR,
    "json": ERROR,
    "protobuf": ERROR,
    "magic": ERROR,
    "version": ERROR,
    "version-newer": ERROR,
    "version-patched": INFO,
    "structure": ERROR,
    "program-empty": ERROR,
    "block": ERROR,
    "operator": ERROR,
    "type": ERROR,
    "value-undefined": ERROR,
    "value-order": ERROR,
    "value-scope": ERROR,
    "value-twice": ERROR,
    "attribute": ERROR,
    "attribute-nan": ERROR,
    "attribute-inf": INFO,
    "attribute-void": ERROR,
    "parameter-twice": ERROR,
    "parameter-shared": WARNING,
    "parameter-nested": ERROR,
    "parameter-flags": ERROR,
    "parameter-shape": ERROR,
    "float8": INFO,
    "params-missing": ERROR,
    "params-record": ERROR,
    "params-truncated": ERROR,
    "params-count": ERROR,
    "params-dtype": ERROR,
    "params-shape": ERROR,
    "params-trailing": ERROR,
    "names-none": ERROR,
    "names-missing": WARNING,
    "names-twice": ERROR,
    "names-shape": ERROR,
}
SEVERITY = CHECKPOINT | PROGRAM
"""Every identifier and how bad it is: an error makes the answer "no"."""


class Finding(NamedTuple):
    """One problem."""

    id: str
    text: str
    where: str = ""
    hint: str = ""

    @property
    def severity(self) -> str:
        return SEVERITY[self.id]


_BYTES = re.compile(r" \[bytes [^;]*")
"""Where a tensor lies in a file."""


def file_of(finding: Finding) -> str:
    """Where a finding is, without the bytes of a tensor."""
    return _BYTES.sub("", finding.where)


def folded(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """The first of each kind in each file, and ``, and 3 more like it`` where there are more; JSON has them all."""
    first: dict[tuple[str, str], Finding] = {}
    more: Counter[tuple[str, str]] = Counter()
    for f in findings:
        key = (f.id, file_of(f))
        first.setdefault(key, f)
        more[key] += 1
    return [(f, f", and {more[key] - 1:,} more like it" if more[key] > 1 else "") for key, f in first.items()]


@dataclass(slots=True)
class CheckResult:
    """What was looked at, and what was found."""

    path: Place
    format: str = ""
    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    """How many files, tensors, checksums, ... were looked at, by noun."""
    notes: list[str] = field(default_factory=list)
    values: bool = False
    """Values of tensors were checked, too."""
    unread: str = ""
    """Which values were not checked, in words."""

    def __repr__(self) -> str:
        """``<CheckResult llama_tp8: 1 error, 0 warnings, 2 files, 39 tensors>``."""
        lines = Counter(f.severity for f, _ in folded(self.findings))
        parts = [(lines[s], s) for s in (ERROR, WARNING)]
        parts += [(n, noun) for noun, n in self.checked.items()]
        return f"<CheckResult {self.path}: " + ", ".join(count(n, w) for n, w in parts) + ">"

    @property
    def ok(self) -> bool:
        """Whether nothing is an error."""
        return all(f.severity != ERROR for f in self.findings)

    @property
    def counts(self) -> str:
        """``1 error, 2 warnings, 3 info``: as many as there are lines, see ``folded``."""
        lines = Counter(f.severity for f, _ in folded(self.findings))
        errors, warnings, infos = lines[ERROR], lines[WARNING], lines[INFO]
        return f"{count(errors, 'error')}, {count(warnings, 'warning')}" + (f", {infos} info" if infos else "")

    def add(self, id_: str, text: str, where: object = "", hint: str | None = None) -> None:
        """Report a finding."""
        self.findings.append(Finding(id_, text, str(where), hint or ""))


class Import(NamedTuple):
    """A global that the pickles of a file name."""

    file: str
    """Below the source, or the name of the source."""
    member: str
    """Of a zip; "" in a plain pickle. ``@4096 archive/data.pkl`` is in the zip that begins at that byte of the file."""
    offset: int
    """Byte of the member, or of the file, at which it is named first."""
    name: str
    """``os.system``; ``?`` for one that is worked out."""
    times: int
    verdict: str
    """``inert``, ``refused`` or ``dangerous``."""


@dataclass(slots=True)
class ImportsResult:
    """What pickles would import when somebody loads them."""

    path: Place
    found: list[Import] = field(default_factory=list)
    """By file, in the order in which it names them."""
    files: int = 0
    """Pickles that were looked at."""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is dangerous."""
        return all(i.verdict != DANGEROUS for i in self.found)
