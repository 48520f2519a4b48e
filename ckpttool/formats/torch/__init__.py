"""Checkpoints of PyTorch and the software around it."""
