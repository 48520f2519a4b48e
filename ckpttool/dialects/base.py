"""``Dialect``: what one piece of software does to a model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.core.catalog import RankTensor, StoredTensor
from ckpttool.core.mesh import Mesh
from ckpttool.layout.family import Family
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.statements import Transform

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""
Statements = tuple[Transform, ...]
"""Statements from Hugging Face's published names to others."""


TRAINER_FILES = re.compile(
    r"rng_state.*\.pth|scheduler\.pdparams|scaler\.pdparams|training_args\.bin|trainer_state\.(?:json|bin)"
    r"|model_meta\.json|saved_signal_.*|optimizer\.safetensors\.index\.json"
)
"""Small files that only a trainer has a use for."""


class NamingContext(NamedTuple):
    """The model whose tensors are named, and how it is wanted."""

    family: Family
    config: Mapping[str, Any]
    """Config in Hugging Face's fields."""
    mesh: Mesh
    fused: str = ""
    """``fuse`` or ``unfuse``: with all fusions, or without any; "" is what the dialect has."""
    version: str = ""
    """Version of the software that will read it (--target), or ""."""


class Dialect(ABC):
    """The interface of each dialect. The defaults are those of software that follows Hugging Face."""

    name = ""
    versions: tuple[str, ...] = ()
    """Values of --target."""
    in_out = False
    """Whether the weights of linear layers are [in, out]."""
    published = False
    """Whether models are published under these names."""
    whole_alone = False
    """Whether a single rank holds whole tensors, so that no rule is needed to read it; others may pad them."""
    whole_format = ""
    """The format of merged models that keep these names; "" gives them Hugging Face's."""
    packs = False
    """Whether packed weights (GPTQ, AWQ, bitsandbytes, ...) keep their names."""

    def detect(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        """Statements to the names of a checkpoint whose tensors have these shapes on a rank."""
        return self.target(context, shapes)

    @abstractmethod
    def target(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        """Statements to this dialect's names; ``shapes`` are those of all tensors under Hugging Face's names."""

    def keep(self, context: NamingContext, own: Statements, shapes: Callable[[], Shapes]) -> Statements:
        """The same for a source in this dialect, which has ``shapes`` after ``own``: its names stay."""
        return self.target(context, shapes)

    def reads(self, context: NamingContext) -> bool:
        """Whether its own software knows the tensors that ``target`` makes with all fusions, or without any."""
        return True

    def check_known(self, context: NamingContext, shapes: Shapes, root: str) -> None:
        """Raises LayoutError where the model is not known and would have to be, before its tensors become another
        dialect's, or this one's of another's. ``root`` is the directory of SRC."""

    def uncut(self, context: NamingContext, after: Statements, shapes: Shapes, held: Sequence[str]) -> tuple[str, ...]:
        """Patterns of the tensors to write whole on every rank; ``held`` are those that the source held whole.

        Raises ConflictError where the tensors could not be read again.
        """
        return ()

    def single(self, context: NamingContext) -> tuple[str, ...]:
        """Patterns of the parameters that its trainers keep in float32 in a model of any dtype, without masters."""
        return ()

    def found_whole(
        self, context: NamingContext, own: Statements, cutting: PartitionContext, known: Shapes,
        tensors: Iterable[StoredTensor],
    ) -> tuple[str, ...]:  # fmt: skip
        """The same of a save that does not record what is cut. ``known`` are shapes of whole model weights."""
        return ()

    def check_written(
        self, context: NamingContext, after: Statements, shapes: Shapes, ranks: Sequence[Sequence[RankTensor]]
    ) -> None:
        """Raises ConflictError for tensors that would be read in another way than they are written.

        ``shapes`` are whole; the config is the one that will lie beside them.
        """

    def vocab_axis(
        self, name: str, shape: tuple[int, ...], names: Iterable[str], config: Mapping[str, Any], *, tied: bool
    ) -> int:
        """The axis of an embedding or a head that has a row for each token; ``names`` are those of all tensors."""
        return 0

    def prefix(self, names: Iterable[str]) -> str:
        """The first word of the names of the embeddings, layers and the last norm."""
        return "model"

    def version_of(self, config: Mapping[str, Any], versions: Sequence[str]) -> str:
        """The one of these versions (not empty) that a model with this config is for; the first one when nothing says
        so."""
        return versions[0]

    def version_called(self, name: str) -> str:
        """The version of this dialect that the dialect ``name`` is; "" for none."""
        return ""

    def published_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json without what this software adds to it."""
        return dict(config)

    def own_config(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """config.json as this software has it for tensors with these names."""
        return dict(config)

    def carries(self, file_name: str) -> bool:
        """Whether a sidecar file means something to it."""
        return not TRAINER_FILES.fullmatch(file_name)

    def coordinates(self, file_name: str) -> dict[str, int]:
        """The coordinates of a rank that its file's name says: tp, pp, shard, moe."""
        return {}
