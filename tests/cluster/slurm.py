"""Slurm on this machine: a controller and several nodes, as processes of their own with their own configuration.

Nothing that the system may have of Slurm is touched or used but its programs. No authentication is needed, as nobody
else may connect: everything listens on this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.helpers.memory_disk import memory_disk

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol")
WAIT_S = 60
"""For the nodes to be there."""


def lacking() -> str:
    """Why Slurm cannot be started here; "" where it can."""
    if absent := [name for name in PROGRAMS if _found(name) is None]:
        return f"no {absent[0]}: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "slurmd starts tasks for others, as root"


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens to."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()


class Slurm:
    """A cluster that runs while the block does."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        # Sockets of steps lie in there, and their paths may have a hundred characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=memory_disk()))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration())
        try:
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._daemons and self._daemons[0].poll() is None:
            self.call("scancel", "--state=PENDING", "--state=RUNNING", "--user=root", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs, whatever its exit code."""
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def batch(self, script: str, output: Path, *options: object) -> str:
        """Submit a script, wait for its end, and return what it printed. ``%a`` in ``output`` stands for an element."""
        path = self.folder / "script.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        done = self.call("sbatch", "--wait", f"--output={output}", *options, path)
        assert "error" not in done.stderr, done.stderr
        return output.read_text() if output.exists() else ""

    def _configuration(self) -> str:
        host = socket.gethostname()
        control, *ports = free_ports(1 + len(self.nodes))
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "AuthType=auth/none",
            "AuthInfo=cred_expire=5",  # so long a job waits that is requeued
            "CredType=cred/none",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_interval=1,batch_sched_delay=0",
            "JobRequeue=1",
        ]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        return "\n".join([*lines, "PartitionName=test Nodes=ALL Default=YES State=UP", ""])

    def _start(self, program: str, *options: str) -> None:
        path = _found(program)
        assert path is not None
        with (self.folder / f"{program}{len(self._daemons)}.out").open("wb") as output:
            command = [path, *options, "-f", str(self.folder / "slurm.conf")]
            self._daemons.append(subprocess.Popen(command, stdout=output, stderr=output, env=self.environment))

    def _wait(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            said = self.call("sinfo", "--noheader", "--format=%T %D").stdout.split()
            if said == ["idle", str(len(self.nodes))]:
                return
            time.sleep(0.2)
        logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in sorted(self.folder.glob("*.log")))
        message = f"Slurm's nodes are not there after {WAIT_S} s\n{logs}"
        raise TimeoutError(message)
