"""Checkpoints of PyTorch and the software around it."""

from ckpttool.formats.torch.bin import TorchFiles
from ckpttool.formats.torch.bytecheckpoint import ByteCheckpoint
from ckpttool.formats.torch.dcp import DistributedCheckpoint
from ckpttool.formats.torch.dcp_chunks import MAX_OBJECT, ChunkFiles, NotPlainError, plain_value
from ckpttool.formats.torch.dcp_layout import ChunkWriter, TensorChunks
from ckpttool.formats.torch.dcp_metadata import (
    CLASS,
    DcpEntry,
    DcpTensor,
    Span,
    entries_of,
    read_pickle,
    write_metadata,
)
from ckpttool.formats.torch.dcp_place import METADATA
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.fsdp import Fsdp
from ckpttool.formats.torch.meta import Meta
from ckpttool.formats.torch.numbered import names_of
from ckpttool.formats.torch.optimizer import read_optimizer
from ckpttool.formats.torch.universal import Universal

__all__ = [
    "CLASS",
    "MAX_OBJECT",
    "METADATA",
    "ByteCheckpoint",
    "ChunkFiles",
    "ChunkWriter",
    "DcpEntry",
    "DcpTensor",
    "DeepSpeed",
    "DistributedCheckpoint",
    "Fsdp",
    "Meta",
    "NotPlainError",
    "Span",
    "TensorChunks",
    "TorchFiles",
    "Universal",
    "entries_of",
    "names_of",
    "plain_value",
    "read_optimizer",
    "read_pickle",
    "write_metadata",
]
