"""What goes wrong on a cluster: the same bytes in the end, or one clear error that names the node and nothing left."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.execute.fleets.base import Reply
from tests.cluster.ray_fleet import LastingFleet
from tests.cluster.ray_nodes import ROOT, RayNodes, children, is_alive
from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Raw, save_hf

FIXTURES = ROOT / "fixtures"
INPUTS = FIXTURES / "merge/inputs"
RESHARD = ["reshard", "MODEL", "{}", "--tp-out", 4, "--to", "ranks", "--manifest"]
MERGE = ["merge", INPUTS / "ft1", INPUTS / "ft2", "--method", "della", "--base", INPUTS / "base", "--seed", 3]
MERGE += ["--param=weight=0.6,0.4", "--param=density=0.5,0.6", "-o", "{}", "--manifest"]
LEAST = {"reshard": 2_500_000, "merge": 40_000}
"""Bytes of a share, for seven of them."""
MODEL: list[Path] = []
"""Where it lies in this session."""
COMMANDS = {"reshard": RESHARD, "merge": MERGE}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 17 MB, so that there is something to share out."""
    wide, inner, layers = 256, 704, 12
    config = json.loads((FIXTURES / "llama_tp8/config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": wide, "intermediate_size": inner, "num_hidden_layers": layers}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (259, wide),
        "model.norm": (wide,),
        "lm_head": (259, wide),
    }
    for i in range(layers):
        names: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (wide, wide), "self_attn.o_proj": (wide, wide)}
        names |= {"self_attn.k_proj": (wide // 4, wide), "self_attn.v_proj": (wide // 4, wide)}
        names |= {"mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide), "mlp.down_proj": (wide, inner)}
        names |= {"input_layernorm": (wide,), "post_attention_layernorm": (wide,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in names.items()}
    rng = np.random.default_rng(5)
    tensors = {
        f"{name}.weight": Raw("BF16", (rng.standard_normal(shape, np.float32).view("<u4") >> 16).astype("<u2"))
        for name, shape in shapes.items()
    }
    MODEL.append(save_hf(tmp_path_factory.mktemp("model") / "src", tensors, config))
    return MODEL[-1]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What each command makes on this machine alone."""
    found = {}
    for name, words in COMMANDS.items():
        dst = tmp_path_factory.mktemp(name) / "dst"
        assert run(words, dst, on="").code == 0
        found[name] = contents(dst)
    return found


@pytest.fixture
def nodes(ray_nodes: RayNodes) -> Iterator[RayNodes]:
    """The cluster, which is mended afterwards."""
    yield ray_nodes
    ray_nodes.restore()


def said(words: list[Any], dst: Path) -> list[str]:
    places = {"{}": dst, "MODEL": MODEL[-1]}
    return [str(places.get(w, w)) for w in words]


def run(words: list[Any], dst: Path, *options: object, on: str = "ray") -> Done:
    return ckpttool(*said(words, dst), *(["--on", on] if on else []), *options)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins when all nodes have looked at it."""
    from ckpttool.execute.fleets import ray

    monkeypatch.setattr(ray, "_OTHERS_TIMEOUT", 100)


# -- what is lost


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_is_killed(
    name: str, after: int, ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    computing: list[int] = []

    def end() -> None:
        until = time.monotonic() + 10
        workers = nodes.workers("one")
        while not (helpers := [c for worker in workers for c in children(worker)]) and time.monotonic() < until:
            if name == "reshard":
                break
            time.sleep(0.05)  # on a busy machine this worker may have begun with nothing yet
        computing.extend([*helpers, *[c for helper in helpers for c in children(helper)]])
        kill(workers)

    ray_fleet.at[after] = end
    done = run(COMMANDS[name], tmp_path / "dst")
    assert done.code == 0, done.err
    assert contents(tmp_path / "dst") == wanted[name]
    assert not ray_fleet.at, len(ray_fleet.answered)
    if name == "merge" and after == 5:
        assert computing  # processes of an interpreter of its own, as a worker cannot be forked
    until = time.monotonic() + 30
    while any(is_alive(pid) for pid in computing) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in computing if is_alive(pid)]


@pytest.mark.parametrize("name", COMMANDS)
def test_all_processes_are_killed(
    name: str, ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    ray_fleet.at[3] = lambda: kill([worker for node in nodes.names for worker in nodes.workers(node)])
    done = run(COMMANDS[name], tmp_path / "dst")
    assert done.code == 0, done.err
    assert contents(tmp_path / "dst") == wanted[name]
    assert ray_fleet.lost


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_node_is_gone(
    name: str, after: int, ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    ray_fleet.at[after] = lambda: nodes.kill("two")
    done = run(COMMANDS[name], tmp_path / "dst")
    assert done.code == 0, done.err
    assert contents(tmp_path / "dst") == wanted[name]
    assert not ray_fleet.at, len(ray_fleet.answered)


def test_a_node_that_was_given_up_comes_back(
    ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    """It stands still amid its orders until Ray has no hope, and does the rest while others do it, too."""
    frozen: list[int] = []

    def freeze() -> None:
        workers = nodes.workers("two")
        frozen.extend([nodes.raylets["two"], *workers, *[c for worker in workers for c in children(worker)]])
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(reply: Reply) -> None:
        if reply.lost:
            while frozen:
                os.kill(frozen.pop(), signal.SIGCONT)

    ray_fleet.at[2], ray_fleet.on_reply = freeze, thaw
    done = run(RESHARD, tmp_path / "dst")
    left = [pid for pid in frozen if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGCONT)
    assert done.code == 0, done.err
    assert not left
    assert contents(tmp_path / "dst") == wanted["reshard"]
    assert {r.node.partition("(")[2] for r in ray_fleet.lost} == {"two)"}


def test_a_node_joins(ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path) -> None:
    """All others stand still until it has done something; there is more to do than they have."""
    frozen: list[int] = []

    def wait() -> None:
        frozen.extend([worker for name in nodes.names for worker in nodes.workers(name)])
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        nodes.add("three")

    def go_on(reply: Reply) -> None:
        if reply.node.endswith("(three)"):
            while frozen:
                os.kill(frozen.pop(), signal.SIGCONT)

    ray_fleet.at[1], ray_fleet.on_reply = wait, go_on
    done = run(MERGE, tmp_path / "dst")
    assert done.code == 0, done.err
    assert contents(tmp_path / "dst") == wanted["merge"]
    assert not frozen


def test_a_node_without_a_processor_does_nothing(
    ray_fleet: LastingFleet, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    nodes.add("idle", cpus=0)
    done = run(RESHARD, tmp_path / "dst")
    assert done.code == 0, done.err
    assert contents(tmp_path / "dst") == wanted["reshard"]
    assert not [r for r in ray_fleet.heard if "idle" in r.node]


# -- the process that the user has started

DRIVER = """
import os, signal, sys
sys.argv = ["ckpttool", *sys.argv[2:]]
line = int({line})
from ckpttool.execute import journal
from ckpttool.execute.destinations import local
local.LEAST_SHARE = int({least})
append = journal.Journal._append

def counted(self, entry):
    global line
    append(self, entry)
    line -= 1
    if not line:
        os.kill(os.getpid(), {signal})

journal.Journal._append = counted
from ckpttool.cli.app import main
main()
"""


def driver(
    nodes: RayNodes, words: list[Any], dst: Path, line: int, how: int, least: int
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, to which something happens behind a line of its journal."""
    given = said(words, dst)
    script = DRIVER.format(line=line, signal=how, least=least)
    return subprocess.run(
        [sys.executable, "-c", script, "", *given, "--on", nodes.on, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.usefixtures("ray_fleet")
@pytest.mark.parametrize("line", range(1, 8))
@pytest.mark.parametrize("name", COMMANDS)
def test_the_run_is_killed_behind_each_line_of_its_journal(
    name: str, line: int, nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path
) -> None:
    done = driver(nodes, COMMANDS[name], tmp_path / "dst", line, signal.SIGKILL, LEAST[name])
    if done.returncode == 0:  # it has fewer lines
        assert line > 5
        return
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "dst").exists()
    again = run(COMMANDS[name], tmp_path / "dst", "--resume", "--json", on="ray" if line % 2 else "")
    assert again.code == 0, again.err
    assert contents(tmp_path / "dst") == wanted[name]
    assert line < 2 or json.loads(again.out)["bytes_resumed"]


@pytest.mark.usefixtures("ray_fleet")
def test_ctrl_c(nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path) -> None:
    began = time.monotonic()
    done = driver(nodes, RESHARD, tmp_path / "dst", 3, signal.SIGINT, LEAST["reshard"])
    assert done.returncode == 130, done.stderr
    assert time.monotonic() - began < 120
    assert json.loads(done.stdout)["error"]["message"] == "interrupted; rerun with --resume to continue"
    assert "Traceback" not in done.stderr
    again = run(RESHARD, tmp_path / "dst", "--resume")
    assert again.code == 0, again.err
    assert contents(tmp_path / "dst") == wanted["reshard"]


def test_what_ray_has_to_say_is_not_in_the_answer(nodes: RayNodes, tmp_path: Path) -> None:
    """A process of the cluster is killed meanwhile, which Ray would tell everybody."""
    words = said(RESHARD, tmp_path / "dst")
    command = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DRIVER.format(line=2, signal=signal.SIGSTOP, least=1 << 20),
            "",
            *words,
            "--on",
            nodes.on,
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.waitid(os.P_PID, command.pid, os.WSTOPPED)
    kill([worker for name in nodes.names for worker in nodes.workers(name)])
    time.sleep(1)
    command.send_signal(signal.SIGCONT)
    out, err = command.communicate(timeout=100)
    assert command.returncode == 0, err
    assert json.loads(out)["bytes_written"]
    assert [line for line in err.splitlines() if not line.startswith(("note: ", "write ", "verify "))] == []


@pytest.mark.parametrize("what", ["head", "cluster"])
def test_the_cluster_is_gone(what: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    """Ray would end the process, with a line of C++."""
    with RayNodes(["head", "one"]) as nodes:
        script = DRIVER.format(line=2, signal=signal.SIGSTOP, least=LEAST["reshard"])
        command = subprocess.Popen(
            [sys.executable, "-c", script, "", *said(RESHARD, tmp_path / "dst"), "--on", nodes.on],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_gcs_rpc_server_reconnect_timeout_s": "5"},
        )
        os.waitid(os.P_PID, command.pid, os.WSTOPPED)
        kill(nodes.keepers() + (list(nodes.raylets.values()) if what == "cluster" else []))
        command.send_signal(signal.SIGCONT)
        out, err = command.communicate(timeout=100)
    assert command.returncode == 1, err
    assert out == ""
    assert err.count("error: ") == 1
    assert nodes.address in err
    assert "is gone" in err or "has lost its connection" in err
    assert "rerun with --resume" in err
    assert "rpc_client.h" not in err
    assert not (tmp_path / "dst").exists()
    assert run(RESHARD, tmp_path / "dst", "--resume", on="").code == 0
    assert contents(tmp_path / "dst") == wanted["reshard"]


# -- what is wrong on one machine


def refused(done: Done, dst: Path, *texts: str) -> None:
    """One error, which names the node, and nothing is left."""
    assert done.code in {1, 2}, done.err
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err
    assert not dst.exists()
    assert not dst.with_name(dst.name + ".partial").exists()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return Path(shutil.copytree(FIXTURES / "llama_tp8", tmp_path / "shared/src"))


@pytest.mark.usefixtures("ray_fleet")
def test_a_node_that_does_not_see_the_source(nodes: RayNodes, source: Path, tmp_path: Path) -> None:
    with nodes.join("blind", over={source: None}):
        done = run(["reshard", source, "{}", "--tp-out", 2], tmp_path / "dst")
    refused(done, tmp_path / "dst", "on ", "(blind)", str(source), "same path")


@pytest.mark.usefixtures("ray_fleet")
def test_a_node_that_sees_another_source(nodes: RayNodes, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    os.utime(next(iter(sorted(other.glob("*.safetensors")))), (1, 1))
    with nodes.join("astray", over={source: other}):
        done = run(["reshard", source, "{}", "--tp-out", 2], tmp_path / "dst")
    refused(done, tmp_path / "dst", "(astray)", str(source))


@pytest.mark.usefixtures("ray_fleet")
def test_a_node_that_does_not_see_the_destination(nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with nodes.join("elsewhere", over={tmp_path / "disk": None}):
        done = run(RESHARD, tmp_path / "disk/dst")
    refused(done, tmp_path / "disk/dst", "(elsewhere)", str(tmp_path / "disk"))


@pytest.mark.usefixtures("ray_fleet")
def test_a_node_that_lacks_a_package(nodes: RayNodes, tmp_path: Path) -> None:
    package = tmp_path / "lacking/xxhash.py"
    package.parent.mkdir()
    package.write_text("raise ModuleNotFoundError('no', name='xxhash')")
    with nodes.join("poor", variables={"PYTHONPATH": str(package.parent)}):
        done = run(RESHARD, tmp_path / "dst")
    refused(done, tmp_path / "dst", "xxhash", "(poor)", "pip install ckpttool")


def test_another_version(ray_fleet: LastingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.execute.fleets import ray

    ray_fleet.dismiss()
    monkeypatch.setattr(ray, "__version__", "0.0.1")
    refused(run(RESHARD, tmp_path / "dst"), tmp_path / "dst", "another ckpttool", "0.0.1 here", "on ")


@pytest.mark.usefixtures("ray_fleet")
def test_a_node_cannot_write(nodes: RayNodes, wanted: dict[str, Any], tmp_path: Path) -> None:
    """Its process may make small files only. What others have done by then is kept for --resume."""
    assert run(RESHARD, tmp_path / "first").code == 0
    for worker in nodes.workers("one"):
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (4096, 4096))
    done = run(RESHARD, tmp_path / "dst")
    assert done.code == 1, done.err
    assert "the destination does not allow files of this size" in done.err
    assert "(one)" in done.err
    assert not (tmp_path / "dst").exists()
    kept = (tmp_path / "dst.partial").exists()
    assert ("--resume" in done.err) == kept
    again = run(RESHARD, tmp_path / "dst", *["--resume"] * kept)
    assert again.code == 0, again.err
    assert contents(tmp_path / "dst") == wanted["reshard"]


@pytest.mark.usefixtures("ray_fleet")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        refused(run(RESHARD, disk / "dst"), disk / "dst", "not enough space")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.usefixtures("ray_fleet")
def test_a_corrupt_source(source: Path, tmp_path: Path) -> None:
    """Two ranks hold different bytes of a tensor that both should have."""
    file = sorted(source.glob("*.safetensors"))[1]
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    with file.open("r+b") as f:
        f.seek(8 + size + header["model.norm.weight"]["data_offsets"][0])
        f.write(b"\x7f\x7f")
    done = run(["reshard", source, "{}", "--tp-out", 2], tmp_path / "dst")
    refused(done, tmp_path / "dst", "model.norm.weight", "on ")


def test_a_source_that_changes_meanwhile(ray_fleet: LastingFleet, source: Path, tmp_path: Path) -> None:
    ray_fleet.at[2] = lambda: os.utime(sorted(source.glob("*.safetensors"))[3], (1, 1))
    done = run(["reshard", source, "{}", "--tp-out", 2], tmp_path / "dst")
    refused(done, tmp_path / "dst", "changed")


@pytest.mark.usefixtures("ray_fleet")
def test_the_nodes_are_fit_again(tmp_path: Path) -> None:
    """The next run has the nodes after any of these errors."""
    assert run(RESHARD, tmp_path / "dst", "--verify").code == 0


# -- no cluster


@pytest.mark.parametrize(
    ("on", "text"),
    [
        ("ray=127.0.0.1:1", "no Ray cluster answers"),
        ("ray=ray://127.0.0.1:10001", "does not go through Ray's client"),
        ("ray=127.0.0.1:port", "the address of a Ray cluster is HOST:PORT"),
        ("ray=127.0.0.1", "the address of a Ray cluster is HOST:PORT"),
        ("ray=", "the address is empty"),
        ("dusk", "`dusk` is not one of ray"),
    ],
)
def test_no_cluster(on: str, text: str, tmp_path: Path) -> None:
    refused(run(RESHARD, tmp_path / "dst", on=on), tmp_path / "dst", text)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_else_listens_there(answer: bytes, tmp_path: Path) -> None:
    """Ray would try again for minutes, and write about it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(100)
                client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        done = run(RESHARD, tmp_path / "dst", on=f"ray=127.0.0.1:{server.getsockname()[1]}")
    refused(done, tmp_path / "dst", "no Ray cluster answers", "something else listens there")
    assert "GCS" not in done.err
