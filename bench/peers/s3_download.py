"""Download all files below a prefix of a bucket, as ``aws s3 cp --recursive`` does: the same engine, its defaults."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3


def main() -> None:
    """``python -m bench.peers.s3_download BUCKET PREFIX DIRECTORY``."""
    bucket, prefix, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    out.mkdir()
    client = boto3.client("s3")
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]

    def one(key: str) -> None:
        client.download_file(bucket, key, str(out / key.removeprefix(f"{prefix}/")))

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(one, [o["Key"] for o in found]):
            pass


if __name__ == "__main__":
    main()
