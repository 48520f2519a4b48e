"""Errors that other processes raise arrive as what they are."""

from __future__ import annotations

import json

import pytest

from ckpttool.containers.safetensors import HeaderError
from ckpttool.errors import CkptError, CorruptError, OutputError, VerifyError
from ckpttool.execute.error_data import error_from_data, error_to_data
from ckpttool.execute.files import SourceReadError


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OutputError("no space", where=["file", "there"], hint="free some"), OutputError),
        (VerifyError("differs"), VerifyError),
        (SourceReadError("cannot read"), SourceReadError),
        (HeaderError("header", "no header", where="file"), CorruptError),
    ],
)
def test_errors_that_users_meet(raised: CkptError, expected: type[CkptError]) -> None:
    found = error_from_data(json.loads(json.dumps(error_to_data(raised))), whose="a worker process")
    assert type(found) is expected
    assert isinstance(found, CkptError)
    assert (found.what, found.where, found.hint) == (raised.what, raised.where, raised.hint)
    assert (found.finding, found.exit_code) == (raised.finding, raised.exit_code)


def test_a_defect_brings_its_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        dict[str, int]()["missing"]
    said = error_to_data(caught.value)
    found = error_from_data(said, whose="a worker process")
    assert str(found).startswith("in a worker process:\nTraceback")
    assert "KeyError: 'missing'" in str(found)
