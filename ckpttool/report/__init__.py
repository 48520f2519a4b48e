"""All human, TSV and JSON output of results, and progress. The only place that imports rich.

    text.py       sizes, tables, TSV, JSON; what a terminal gets and what a pipe gets
    style.py      colours, and who gets them
    failure.py    errors, also as JSON
    tables.py     tables that fit the terminal
    bars.py       a bar on a terminal, a line every ten seconds elsewhere
    reshard.py    plans and results of reshard
    merge.py      plans and results of merge
    drop_keys.py  what drop-keys leaves out
    convert_json.py  what convert-json converted, checked and wrote
    fp8_cast.py   what fp8-cast quantises and dequantises
    fp8_size.py   what fp8-size worked out
    inspect.py    what inspect found
    layout.py     who holds what, drawn with characters
    svg.py        the same as a picture

stdout carries data, stderr messages and progress.
"""

from ckpttool.report.bars import progress
from ckpttool.report.convert_json import (
    show_conversion,
    show_conversion_plan,
    show_header,
    show_index,
    show_program_check,
    show_text,
)
from ckpttool.report.drop_keys import show_drop, show_drop_plan
from ckpttool.report.failure import show_error, show_failure
from ckpttool.report.fp8_cast import show_cast, show_cast_plan
from ckpttool.report.fp8_size import UNITS, show_fp8_size
from ckpttool.report.inspect import show_inspect
from ckpttool.report.merge import show_merge, show_merge_plan, show_methods
from ckpttool.report.reshard import show_plan, show_reshard

__all__ = [
    "UNITS",
    "progress",
    "show_cast",
    "show_cast_plan",
    "show_conversion",
    "show_conversion_plan",
    "show_drop",
    "show_drop_plan",
    "show_error",
    "show_failure",
    "show_fp8_size",
    "show_header",
    "show_index",
    "show_inspect",
    "show_merge",
    "show_merge_plan",
    "show_methods",
    "show_plan",
    "show_program_check",
    "show_reshard",
    "show_text",
]
