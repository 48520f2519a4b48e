"""What stands on the PATH of a page's shells as `ckpttool`: hands its order to the process of forks.py.

`python -IS client.py SOCKET ARGUMENT...`. It imports next to nothing, so that it starts in the time of an `ls`.
"""

import json
import os
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET
from _socket import socket as Socket  # noqa: N812  # `socket` itself imports what takes longer than all the rest
from collections.abc import Mapping, Sequence

ANSWER_BYTES = 16
KILLED = 137


def order(
    server: str,
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    streams: tuple[int, int, int],
    timeout: float | None = None,
) -> int:
    """Have the process that listens at `server` run a command, with these as stdin, stdout and stderr.

    Returns its exit status, `KILLED` for one that ended without. Raises TimeoutError.
    """
    connection = Socket(AF_UNIX, SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        connection.connect(server)
        descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in streams)
        message = json.dumps([list(arguments), folder, dict(environment)]).encode()
        connection.sendmsg([message], [(SOL_SOCKET, SCM_RIGHTS, descriptors)])
        return int(connection.recv(ANSWER_BYTES) or KILLED)
    except (BrokenPipeError, ConnectionResetError):
        return KILLED
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(order(sys.argv[1], sys.argv[2:], os.getcwd(), os.environ, (0, 1, 2)))  # noqa: PTH109  # pathlib is slow
