"""Carry out a plan: bounded blocks, worker threads, a partial directory, a journal, one rename at the end."""

from ckpttool.execute.member import run
from ckpttool.execute.options import Advance, Checksum, NoProgress, PhasedProgress, Progress, RunOptions, RunResult

__all__ = ["Advance", "Checksum", "NoProgress", "PhasedProgress", "Progress", "RunOptions", "RunResult", "run"]
