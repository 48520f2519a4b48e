"""A Paddle program in the JSON answers of ``convert-json`` and ``inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import pick

if TYPE_CHECKING:
    from ckpttool.formats.paddle import Program


def program_json(program: Program) -> dict[str, Any]:
    """Version, operators, what goes in and out."""
    return {
        **pick(program, "kind version trainable"),
        "operators": program.operators.total(),
        "blocks": program.blocks,
        "by_operator": dict(program.operators.most_common()),
        "inputs": [pick(p, "name dtype shape") for p in program.inputs],
        "outputs": [pick(p, "name dtype shape") for p in program.outputs],
    }
