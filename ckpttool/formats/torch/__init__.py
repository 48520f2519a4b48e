"""Checkpoints of PyTorch and the software around it."""

from ckpttool.formats.torch.bin import TorchFiles

__all__ = ["TorchFiles"]
