"""A checkpoint on another machine, cut for eight ranks here, beside downloading it and cutting it then.

The other machine is a server on 127.0.0.1 that answers 0, 5 or 30 ms late: see ``bench.sender``.
"""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from bench.measure import OURS, OUT, URL, Job, Program
from bench.models import Size, write_noise
from bench.sender import sending
from bench.setting import PYTHON, TOOL, Setting, differing, made

DELAYS = (0.0, 0.005, 0.03)
SHARD = "500MB"
KEYS = ("AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret", "AWS_REGION=us-east-1", f"AWS_ENDPOINT_URL={URL}")
HUB = (f"HF_ENDPOINT={URL}", "HF_HUB_DISABLE_XET=1", "HF_HUB_DISABLE_TELEMETRY=1", "HF_HUB_DISABLE_PROGRESS_BARS=1")
CUT = ("--tp-out", "8", "-q")


def jobs(setting: Setting) -> list[Job]:
    """From the Hub and from S3, for each delay."""
    size = Size.of(setting.gb)
    work = setting.work / f"remote-{size.name}"
    source = work / "model"
    hub_home = f"HF_HOME={OUT}.home"  # no cache
    from_hub = ("env", hub_home, *HUB, TOOL, "reshard", "hf://org/model", OUT, *CUT)
    from_s3 = ("env", *KEYS, TOOL, "reshard", "s3://bucket/model", OUT, *CUT)
    hf = str(Path(TOOL).with_name("hf"))
    download_hub = ("env", hub_home, *HUB, hf, "download", "org/model", "--local-dir")
    download_s3 = ("env", *KEYS, PYTHON, "-m", "bench.peers.s3_download", "bucket", "model")
    out = []
    for delay in DELAYS:
        for place, ours, name, download in (
            ("Hub", from_hub, "hf download", download_hub),
            ("S3", from_s3, "boto3 download", download_s3),
        ):
            programs = (
                Program(OURS, ours),
                Program(name, (*download, OUT)),
                Program(f"{name}, reshard", ("sh", "-c", _THEN, OUT, TOOL, *download)),
            )
            out.append(
                Job(
                    f"reshard remote {place} -> TP8, {delay * 1000:g} ms",
                    (source,),
                    programs,
                    partial(_prepare, work, size),
                    compare=_compare,
                    serve=partial(sending, source, delay),
                    usual=False,
                )
            )
    return out


_THEN = 'tool=$1; shift; "$@" "$0.source" && "$tool" reshard "$0.source" "$0" --tp-out 8 -q && rm -r "$0.source"'


def _prepare(work: Path, size: Size) -> None:
    with made(work / "model") as missing:
        if missing:
            write_noise(work, "whole", size)
            command = [TOOL, "reshard", str(work / "whole"), str(work / "model"), "-q", "--force"]
            subprocess.run([*command, "--to", "hf", "--max-shard-size", SHARD], check=True)
            for path in (work / "whole").iterdir():
                path.unlink()


def _compare(ours: Path, theirs: Path, peer: str) -> str:
    return differing(ours, theirs) if peer.endswith("reshard") else ""
