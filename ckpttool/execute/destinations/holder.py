"""The process that holds a destination, and whether it is certainly gone."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Self

from ckpttool.storage.system import this_boot

HERE: set[str] = set()
"""Tokens of holders in this process that have not let go."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes a destination."""

    token: str
    host: str
    pid: int
    machine: str
    """This boot of this machine, and the names that its processes go by in a container."""

    @classmethod
    def here(cls) -> Self:
        """This process."""
        return cls(uuid.uuid4().hex, os.uname().nodename, os.getpid(), machine())

    def check(self) -> None:
        """Raises TypeError where a value is none of its kind."""
        if not all(type(t) is str for t in (self.token, self.host, self.machine)):
            raise TypeError
        if type(self.pid) is not int or self.pid < 0:
            raise TypeError

    def is_gone(self) -> bool:
        """Whether the process has certainly ended."""
        if not self.machine or self.machine != machine():
            return False
        if self.pid == os.getpid():
            return self.token not in HERE
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def machine() -> str:
    """The name of this boot of this machine, which no other has; "" where the system does not say."""
    return this_boot()
