"""What a view of ``inspect`` is: a class with its options as fields, which finds the answer to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar, dataclass_transform

from ckpttool.answers.document import Document, Section
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace, DataFile
    from ckpttool.execute import Progress
    from ckpttool.execute.fleets.base import Fleet
    from ckpttool.formats.base import OpenOptions
    from ckpttool.ops.inspect.listing import TensorChoice, TensorListing

A_co = TypeVar("A_co", bound="ViewAnswer", covariant=True)

SCHEMA = "ckpttool.inspect/1"


class ViewOption(NamedTuple):
    """An option of the command line."""

    name: str
    about: str
    kind: Any
    """``bool`` for a flag; the type of its value; ``tuple`` for one that may be given several times."""
    metavar: str = ""
    values: Sequence[str] = ()
    """Completions."""
    least: int | None = None
    """The smallest number."""


def flag(name: str, about: str) -> Any:
    """A field that is an option without a value."""
    return field(default=False, metadata={"option": ViewOption(name, about, bool)})


def value(name: str, metavar: str, about: str, kind: Any = str, **more: Any) -> Any:
    """A field that is an option with a value; None, or () for a ``tuple``, where it is not given."""
    default = () if kind is tuple else None
    return field(default=default, metadata={"option": ViewOption(name, about, kind, metavar, **more)})


class InspectedSource(NamedTuple):
    """What a view looks at, and with what."""

    src: AnyPlace
    options: OpenOptions
    watch: Progress | None
    fleet: Fleet | None

    @property
    def progress(self) -> Progress:
        """What hears how far it is."""
        from ckpttool.execute import NoProgress  # with numpy, which a listing does without

        return self.watch or NoProgress()

    def tensors(self, choice: TensorChoice | None = None, *, stored_too: bool = False) -> TensorListing:
        """See ``list_tensors``."""
        from ckpttool.ops.inspect.listing import list_tensors

        return list_tensors(self.src, self.options, choice, stored_too=stored_too)


@dataclass_transform(kw_only_default=True)
@dataclass(init=False, eq=False, repr=False, kw_only=True)
class View(ABC, Generic[A_co]):
    """A question about a checkpoint; its subclasses are dataclasses, too.

    Fields made by ``flag`` and ``value`` are the view's own options, the first of them the one that asks for it.
    Fields without are filled from options of this name that another view, or the command, has.
    """

    def __init_subclass__(cls) -> None:
        dataclass(init=False, eq=False, repr=False, kw_only=True)(cls)

    # Each command makes the classes of all views to know its options: generated methods would cost it 20 ms.
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)  # defaults are the class's

    choice: TensorChoice
    """Of tensors."""

    name: ClassVar[str]
    """In JSON."""
    whole: ClassVar[bool] = False
    """Whether it looks at a whole checkpoint or at what it names: filters do not apply."""
    writes: ClassVar[bool] = False
    """Whether it changes what it looks at."""

    @classmethod
    def options(cls) -> dict[str, ViewOption]:
        """Its own options, by field."""
        return {f.name: f.metadata["option"] for f in fields(cls) if "option" in f.metadata}

    @classmethod
    def filled(cls, given: Mapping[str, Any]) -> Self:
        """With those of the given options that it has fields for."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})

    @property
    def label(self) -> str:
        """Its option, as errors call it."""
        return next(iter(self.options().values())).name

    @property
    def asked(self) -> bool:
        """Whether its option is given."""
        return getattr(self, next(iter(self.options()))) not in (None, False, ())

    @property
    def slow(self) -> bool:
        """Whether it may take long: then it shows progress."""
        return False

    @property
    def reads_elements(self) -> bool:
        """Whether a cluster can take part."""
        return False

    @property
    def outside_report(self) -> str:
        """The option that is given and has no place in a report; "" for none."""
        return self.label if self.asked else ""

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        """Raises UsageError for options of the view that contradict each other, or do nothing without it."""

    def refuse_filters(self) -> None:
        """Raises UsageError for filters that do not apply to the view, which is asked for."""
        choice = self.choice
        if self.whole and choice.components:
            raise UsageError(f"--only does not apply to {self.label}", hint="--list --only COMPONENT shows its files")
        if self.whole and narrows(choice):
            raise UsageError(f"{self.label} does not take filters")

    def opened(self, src: AnyPlace) -> tuple[AnyPlace, Self]:
        """The checkpoint to look at where SRC names several; and the view of it."""
        return src, self

    @property
    def others(self) -> Sequence[AnyPlace]:
        """Checkpoints beside SRC that it looks at."""
        return ()

    @abstractmethod
    def look(self, at: InspectedSource) -> A_co:
        """The answer. Raises what ``open_checkpoint`` raises, and UsageError for what is not there."""


def narrows(choice: TensorChoice) -> bool:
    """Whether patterns, dtypes or sizes choose among the tensors."""
    return bool(choice.patterns or choice.dtypes or choice.min_size)


@dataclass_transform()
@dataclass(init=False, eq=False, repr=False)
class ViewAnswer(ABC):
    """What a view has found; its subclasses are dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(init=False, eq=False, repr=False)(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        names = [f.name for f in fields(self)]
        vars(self).update(zip(names, given, strict=False), **named)

    name: ClassVar[str]
    """``view`` in JSON."""

    @property
    def ok(self) -> bool:
        """False when a check found an error, a pickle is dangerous or two checkpoints differ."""
        return True

    @property
    def files(self) -> Sequence[DataFile]:
        """Files that were read, and must be the same afterwards."""
        return ()


class PrintedAnswer(ViewAnswer):
    """An answer that is printed."""

    @property
    def notes(self) -> Sequence[str]:
        """What was inferred or left out."""
        return ()

    @abstractmethod
    def json(self) -> Mapping[str, Any]:
        """What ``--json`` prints after schema and view."""

    @abstractmethod
    def sections(self) -> Iterable[Section]:
        """What people see. Drawings are sections of their own kinds, which ``report`` knows."""

    def entries(self) -> int:
        """About how many entries the JSON has."""
        return 0

    def head(self) -> Mapping[str, Any]:
        """What precedes ``json``."""
        return {"schema": SCHEMA, "view": self.name}

    def document(self) -> Document:
        """All that is printed."""
        return Document(lambda: {**self.head(), **self.json()}, self.sections, self.notes, self.entries())


class ListingAnswer(PrintedAnswer):
    """What is seen of one checkpoint; its ``json`` follows what is said of every checkpoint."""

    listing: TensorListing

    @property
    def files(self) -> Sequence[DataFile]:
        return self.listing.files

    @property
    def notes(self) -> Sequence[str]:
        return self.listing.notes

    def head(self) -> Mapping[str, Any]:
        from ckpttool.ops.inspect.listing_json import listing_json

        return {**super().head(), **listing_json(self.listing)}


class ViewResult(Protocol):
    """A verdict and notes, as ``check``, ``diff`` and ``list_imports`` return them."""

    notes: list[str]

    @property
    def ok(self) -> bool: ...


class ResultAnswer(PrintedAnswer):
    """A verdict, and what led to it."""

    result: ViewResult

    @property
    def ok(self) -> bool:
        return self.result.ok

    @property
    def notes(self) -> Sequence[str]:
        return self.result.notes
