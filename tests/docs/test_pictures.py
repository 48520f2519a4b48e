"""The pictures of README.md are what would be drawn now."""

from __future__ import annotations

from scripts.make_pictures import IMAGES, pictures


def test_pictures_are_up_to_date() -> None:
    made = pictures()
    assert {name: (IMAGES / name).read_text(encoding="utf-8") for name in made} == made, (
        "run: python scripts/make_pictures.py"
    )
    assert len(made) == 5
