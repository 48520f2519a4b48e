"""The tables of docs/formats/ say what the formats' capabilities are."""

from __future__ import annotations

from pathlib import Path

from ckpttool.formats.base import Writer
from ckpttool.formats.megatron.models import KINDS
from ckpttool.formats.registry import WRITERS

FORMATS = Path(__file__).parents[2] / "docs" / "formats"
NAMINGS = {"": "that of SRC", "paddle": "Paddle's"}


def differences() -> dict[str, dict[str, str]]:
    """The cells of the tables that compare formats, by format and row."""
    table: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    page = (FORMATS / "contents.md").read_text(encoding="utf-8").partition("\n## How formats differ\n")[2]
    for line in page.splitlines():
        first, *cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("|") and not first:
            columns = [c.strip("`") for c in cells]
        elif line.startswith("|") and not first.startswith("---"):
            for column, text in zip(columns, cells, strict=True):
                table.setdefault(column, {})[first] = text
    for rows in table.values():
        for row, text in rows.items():
            if text.startswith("as `"):
                rows[row] = table[text.removeprefix("as ").strip("`")][row]
    return table


def expected(writer: Writer) -> dict[str, tuple[str, ...]]:
    """What each row may say of a format."""
    c = writer.capabilities
    vocabulary = "-" if not c.sharded else "tp" if c.pad_vocab and c.vocab_multiple == 1 else str(c.vocab_multiple)
    return {
        "meshes": (c.meshes or "one rank",),
        "components": (", ".join(c.components).replace("_", " "),),
        "naming": (NAMINGS.get(writer.dialect, f"`{writer.dialect}`"),),
        "optimizer state sharded (`--sharding-out`)": ("yes", "always") if c.optimizer_shards else ("no",),
        "one save in several directories (`--also`)": ("yes" if c.multi_directory else "no",),
        "vocabulary is padded to a multiple of": (vocabulary if c.pad_vocab or not c.sharded else "not padded",),
        "vocabulary that tp does not divide": ("whole on every rank" if c.sharded and not c.pad_vocab else "-",),
        "experts that do not divide by ep": (
            "-" if not c.sharded else "one more on the first ranks" if c.ragged_experts else "refused",
        ),
        "layers of a pipeline stage": ("from 0 in every stage",) if c.local_layers else ("global numbers", "-"),
    }


def test_every_format_that_is_written_is_in_a_table() -> None:
    assert differences().keys() == WRITERS.keys()


def test_the_tables_say_what_the_formats_can_hold() -> None:
    for name, rows in differences().items():
        wanted = expected(WRITERS[name])
        assert rows.keys() <= wanted.keys()
        wrong = {row: text for row, text in rows.items() if not text.startswith(wanted[row])}
        assert not wrong, f"{name}: {wrong}"


def test_every_kind_of_model_of_megatron_is_listed() -> None:
    page = (FORMATS / "megatron.md").read_text(encoding="utf-8")
    rows = page.partition("## Models of Megatron")[2].partition("\n## ")[0].splitlines()
    listed = [name.strip(" `") for row in rows if row.startswith("| `") for name in row.split("|")[1].split(",")]
    assert sorted(listed) == sorted(["model_type", *(k.model_type for k in KINDS)])
