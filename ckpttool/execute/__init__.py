"""Carry out a plan: bounded blocks, worker threads, a partial directory, a journal, one rename at the end."""

from ckpttool.execute.engine import run
from ckpttool.execute.options import Checksum, NoProgress, Progress, RunOptions, RunResult

__all__ = ["Checksum", "NoProgress", "Progress", "RunOptions", "RunResult", "run"]
