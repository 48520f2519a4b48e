"""Convert, reshard and merge large-model checkpoints by moving byte ranges."""

__version__ = "0.1.0"
