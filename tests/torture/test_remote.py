"""A sample of the faults at requests of ``make torture``, and the proof that the judge sees what is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.torture.store import is_readable, visible

ROOT = Path(__file__).parents[2]
WHOLE = {"out/config.json": "c", "out/model.safetensors.index.json": "i", "out/a.safetensors": "a", "aside": "x"}


def test_what_a_reader_may_find() -> None:
    """Nothing to begin with, or all that it speaks of."""
    part = dict(WHOLE)
    assert is_readable(part, WHOLE)
    assert not is_readable(part | {"out/more.safetensors": "m"}, WHOLE)
    del part["out/config.json"]
    assert is_readable(part, WHOLE)  # an index, and what it names
    assert not is_readable(part | {"out/a.safetensors": "other"}, WHOLE)
    del part["out/a.safetensors"]
    assert not is_readable(part, WHOLE)
    del part["out/model.safetensors.index.json"]
    assert is_readable(part, WHOLE)
    del part["aside"]
    assert not is_readable(part, WHOLE)
    assert not is_readable({"out/config.json": "c", "aside": "x"}, WHOLE)
    marks = {"out/.ckpttool-partial.json": "m", "out/.ckpttool-partial/x.json": "s"}
    assert visible(WHOLE | marks) == WHOLE


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may fork."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)


@pytest.mark.thorough  # make torture; tests/execute/test_objects.py ends a run at each request without processes
def test_a_sample() -> None:
    done = run("-m", "tests.torture.remote", "--every", 83, "--jobs", 1, "--only", "ranks", "--only", "drop")
    assert done.returncode == 0, done.stdout + done.stderr
    (total,) = [line for line in done.stdout.splitlines() if line.startswith("all ")]
    requests, runs, killed, failed, ended, *_ = (int(n.replace(",", "")) for n in total.split()[1:])
    assert requests > 80
    assert runs == killed + failed + ended > 10
    assert killed


CARELESS = """
    import http.client, os
    from pathlib import Path
    from tests.torture import remote
    from tests.torture.campaign import place
    from tests.torture.remote import Bench, Campaign, Case, Scenario

    def ask(method, path, body=b""):
        connection = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"))
        connection.request(method, "/target/out/" + path, body)
        return connection.getresponse().read()

    def careless(words):
        ask("PUT", "config.json", b"{}")
        upload = ask("POST", "a.safetensors?uploads").decode().split("<UploadId>")[1].split("<")[0]
        ask("PUT", f"a.safetensors?partNumber=1&uploadId={upload}", b"x" * 99)
        ask("PUT", "a.safetensors", b"x" * 99)
        return 0

    remote.command = careless
    Campaign._check_equal = lambda self: None
    with place() as root:
        bench = Bench(root)
        try:
            Campaign(Scenario("careless", "reshard {d}"), bench)
        except remote.WrongError as e:
            print(e)
        Campaign._check_done = lambda self, seen: None
        tried = Campaign(Scenario("careless", "reshard {d}"), bench)
        for call in tried.calls:
            tried.strike(Case("slow", call))
        print(len(tried.report.wrong) == len(tried.calls) == 4, tried.report.wrong[0])
        bench.close()
"""


@pytest.mark.thorough  # two seconds
def test_the_judge_sees_what_is_wrong() -> None:
    """Config first, and an upload that nobody ends."""
    done = run("-c", textwrap.dedent(CARELESS))
    first, second, *_ = done.stdout.splitlines() or [done.stderr, ""]
    assert first == "uploads stay: ['out/a.safetensors']"
    assert second.startswith("True careless: slow at CreateMultipartUpload out/a.safetensors (1): after PutObject")
