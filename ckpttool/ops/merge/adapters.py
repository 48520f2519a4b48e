"""Low-rank adapters on top of the models of a merge."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.errors import UnsupportedError
from ckpttool.ops.merge.models import Models
from ckpttool.plan import Operand
from ckpttool.planner import Operands
from ckpttool.recipe.model import ModelRef


class Adaptations:
    """For each reference with adapters, what they change."""

    def __init__(self, models: Models, refs: Sequence[ModelRef]) -> None:
        self._models = models
        for ref in refs:
            if ref.adapters:
                raise UnsupportedError(f"{ref}: adapters are not merged yet")

    def names(self, ref: ModelRef) -> list[str]:
        """The tensors of a model, adapters included."""
        return list(self._models[ref].views)

    def dtype(self, ref: ModelRef, name: str) -> str:
        """dtype of a tensor."""
        return self._models[ref].dtype(name)

    def operand(self, ref: ModelRef, name: str, operands: Operands) -> Operand:
        """What a Compute reads for a tensor."""
        return self._models[ref].operand(name, operands)

    def hashes(self, ref: ModelRef) -> list[tuple[str, str]]:
        """(path, hash of its weights) of each adapter."""
        del ref
        return []
