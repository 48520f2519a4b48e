"""The S3 server as Google has it: its XML API is S3's with other headers, and the JSON API lists, looks and reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.s3_server import Answer, Request, S3Error, S3Server

_META = "x-goog-meta-"


class GoogleServer(S3Server):
    """See ``S3Server``; without pages in listings of the JSON API."""

    def answer(self, request: Request, body: bytes, fault: str | None = None) -> Answer:
        m = re.fullmatch(r"v1/b/([^/]+)/o(?:/(.*))?", request.key) if request.bucket == "storage" else None
        if m is None:
            return super().answer(request, body, fault)
        bucket, key = self.buckets.get(m[1]), m[2]
        if bucket is None or (key is not None and key not in bucket):
            raise S3Error(404, "")
        if key is not None and request.query.get("alt") == "media":
            if request.query.get("ifGenerationMatch") not in (None, str(bucket[key].generation)):
                raise S3Error(412, "")
            return super().answer(request._replace(bucket=m[1], key=key), body, fault)
        if key is not None:
            stored = bucket[key]
            metadata = {k.removeprefix(_META): v for k, v in stored.headers.items() if k.startswith(_META)}
            return _json({"size": str(len(stored.data)), "generation": str(stored.generation), "metadata": metadata})
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        items, prefixes = [], set()
        for name, stored in sorted(bucket.items()):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif name.startswith(prefix):
                items.append({"name": name, "size": str(len(stored.data)), "generation": str(stored.generation)})
        return _json({"items": items, "prefixes": sorted(prefixes)})


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


@contextmanager
def google_server() -> Iterator[GoogleServer]:
    """A server with an empty bucket, "bucket"; it is closed at the end."""
    server = GoogleServer(["bucket"])
    try:
        yield server
    finally:
        server.close()
