"""What the safetensors library reads in a header: the second opinion of ``--verify`` on ``containers/safetensors.py``.

The library gives no offsets, but it refuses holes, overlaps and bytes behind the last tensor, and gives the order of
the data. So its names, dtypes and shapes are its offsets, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ckpttool.containers.safetensors import Header, read_header, read_raw, tensor_bytes
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.errors import VerifyError
from ckpttool.storage.place import read_each


def confirm_headers(files: Sequence[DataFile]) -> None:
    """Read every safetensors header with the library, too. Files of other containers are skipped.

    Raises VerifyError for a file in which the library finds other metadata, names, dtypes, shapes or offsets.
    """
    places = [f.place for f in files if f.encoding is None and ".safetensors" in f.place.name]
    for place, (own, other) in zip(places, read_each(_both, places), strict=True):
        if own.metadata != other.metadata:
            raise _differs(place, "the metadata")
        mine, theirs = ({t.name: (t.dtype, t.shape, t.offset) for t in h.tensors if t.nbytes} for h in (own, other))
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise _differs(place, f"the entry of `{name}`")


def _differs(place: Place, what: str) -> VerifyError:
    return VerifyError(f"the safetensors library reads {what} differently", where=str(place))


def _both(place: Place) -> tuple[Header, Header]:
    return read_header(place), read_by_library(place)


def read_by_library(place: Place) -> Header:
    """The header of a file as the library reads it. Raises VerifyError for one that the library refuses.

    The library maps files of this machine. For a file elsewhere it is given a local one with the same header and size,
    which takes no more disk than the header does.
    """
    if isinstance(place, Path):
        return _read(place, DataFile.at(place))
    file, raw = read_raw(place)
    with tempfile.NamedTemporaryFile(prefix="ckpttool-header-") as sparse:
        sparse.write(len(raw).to_bytes(8, "little") + raw)
        sparse.truncate(file.size)
        sparse.flush()
        return _read(Path(sparse.name), file)


def _read(path: Path, file: DataFile) -> Header:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as held:
            slices = [(name, held.get_slice(name)) for name in held.offset_keys()]
            found = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
            metadata = held.metadata() or {}
    except SafetensorError as e:
        raise VerifyError(f"the safetensors library refuses the file: {e}", where=str(file.place)) from None
    sizes = [tensor_bytes(dtype, shape) for _, dtype, shape in found]
    at = file.size - sum(sizes)
    tensors = []
    for (name, dtype, shape), size in zip(found, sizes, strict=True):
        tensors.append(StoredTensor(name, dtype, shape, 0, at))
        at += size
    return Header(file, metadata, tensors)
