"""A Ray cluster on this machine: real raylets, each of which is a node. Run as a module, it holds one.

It lives in a process of its own, so that tests need no Ray in theirs, and ends when that process has no more input.

    -> {"add": "three", "cpus": 1, "environment": {}}      <- {"pid": 4711}
    -> {"remove": "three"}                                 <- {}

``join`` adds a node that sees other files than the rest, in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
_SYSTEM = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000}
"""A node that is gone is missed after some seconds, one that stands still after half a minute at most."""


class RayNodes:
    """A cluster, as tests see it."""

    def __init__(self, names: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.names = tuple(names)
        self.environment = dict(environment or {})
        """Variables of these nodes, beside those of this process."""
        self.raylets: dict[str, int] = {}
        """Name -> process."""
        self.address = ""

    def __enter__(self) -> Self:
        self._temp = tempfile.mkdtemp(prefix="r-", dir="/tmp")
        Path(self._temp, "ray").mkdir()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        own = {"TMPDIR": self._temp, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment = {**inherited, **self.environment, **own}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_nodes", self._temp, *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._temp,
            env=self._environment,
        )
        said = self._hear()
        self.address, self.raylets = said["address"], said["raylets"]
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        shutil.rmtree(self._temp, ignore_errors=True)

    @property
    def on(self) -> str:
        """For ``--on``."""
        return f"ray={self.address}"

    def add(self, name: str, cpus: int = 2, environment: Mapping[str, str] | None = None) -> None:
        said = {"add": name, "cpus": cpus, "environment": {**self.environment, **(environment or {})}}
        self.raylets[name] = self._ask(said)["pid"]

    def remove(self, name: str) -> None:
        """A node leaves, if it is still there."""
        self._ask({"remove": name})
        del self.raylets[name]

    def kill(self, name: str) -> None:
        """A node is gone, without a word."""
        os.kill(self.raylets[name], signal.SIGKILL)

    @contextlib.contextmanager
    def join(
        self, name: str, *, over: Mapping[Path, Path | None] | None = None, variables: Mapping[str, str] | None = None
    ) -> Iterator[None]:
        """For a while there is another node. It sees other directories, by the places where they lie (None: an empty
        one), and has further variables of the environment.
        """
        mounts = {str(place): str(other or "") for place, other in (over or {}).items()}
        words = [sys.executable, "-m", "tests.cluster.ray_nodes", "join", self.address, name, json.dumps(mounts)]
        process = subprocess.Popen(
            ["unshare", "--mount", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._temp,
            env=self._environment | {"NODE_VARIABLES": json.dumps(dict(variables or {}))},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"joined\n"
            yield
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()

    def restore(self) -> None:
        """All nodes of the beginning, and no other."""
        for name, pid in list(self.raylets.items()):
            if name not in self.names or not is_alive(pid):
                self.remove(name)
        for name in self.names:
            if name not in self.raylets:
                self.add(name)

    def workers(self, name: str) -> list[int]:
        """Processes of a node that work for a run."""
        return [pid for pid in children(self.raylets[name]) if "RayWorker" in _command(pid)]

    def keepers(self) -> list[int]:
        """The process that keeps the cluster together."""
        return [pid for pid in children(self._process.pid) if "gcs_server" in _command(pid).partition(" ")[0]]

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        return said


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: int) -> str:
    """Ray puts there what a process is doing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def host(temp: str, names: Sequence[str]) -> None:
    """Hold a cluster until there is no more input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints
    del os.environ["PYTHONPATH"]  # a run brings this package along
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 2,
        "node_name": names[0],
        "temp_dir": f"{temp}/ray",
        "_system_config": _SYSTEM,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {names[0]: cluster.head_node}
    for name in names[1:]:
        nodes[name] = cluster.add_node(wait=False, num_cpus=2, node_name=name)
    cluster.wait_for_nodes(120)

    def pid(name: str) -> int:
        (raylet,) = nodes[name].all_processes["raylet"]
        found: int = raylet.process.pid
        return found

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say({"address": cluster.address, "raylets": {name: pid(name) for name in nodes}})
    for line in sys.stdin:
        order = json.loads(line)
        if "add" in order:
            os.environ.update(order["environment"])
            nodes[order["add"]] = cluster.add_node(num_cpus=order["cpus"], node_name=order["add"])
            say({"pid": pid(order["add"])})
        else:
            cluster.remove_node(nodes.pop(order["remove"]), allow_graceful=False)
            time.sleep(0.1)
            say({})
    cluster.shutdown()


def join(address: str, name: str, mounts: Mapping[str, str]) -> None:
    """Be a node until there is no more input. This process has mounts of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del os.environ["PYTHONPATH"]
    os.environ.update(json.loads(os.environ.pop("NODE_VARIABLES")))
    for place, other in mounts.items():
        how = ["--bind", other] if other else ["-t", "tmpfs", "-o", "size=1m", "none"]
        subprocess.run(["mount", *how, place], check=True)
    from ray.cluster_utils import Cluster

    raylet: Any = importlib.import_module("ray._raylet")  # compiled, without types

    cluster = Cluster()
    cluster.head_node, cluster.redis_address = SimpleNamespace(gcs_address=address), address
    options = raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    cluster.global_state._initialize_global_state(options)
    node = cluster.add_node(num_cpus=1, node_name=name)
    answers.write("joined\n")
    answers.flush()
    sys.stdin.read()
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        host(sys.argv[1], sys.argv[2:])
