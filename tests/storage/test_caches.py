"""The caches of places on other machines: how long they hold, how much, and that they outlive a fork."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ckpttool.storage import caches
from ckpttool.storage.caches import ByteCache, TimedCache


def test_answers_hold_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(caches, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cache = TimedCache[str, int](5.0, most=3)
    cache.put("a", 0)
    cache.update({"b": 2}, longer=60.0)
    now[0] += 4.9
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (0, 2, None)
    now[0] += 0.2
    assert (cache.get("a"), cache.get("b")) == (None, 2)
    assert (cache.pop("b"), cache.pop("b")) == (2, None)
    cache.update({"x": 1, "y": 2, "z": 3})
    assert cache.get("z") == 3
    cache.put("w", 4)  # no more than three
    assert (cache.get("w"), cache.get("x")) == (4, None)
    cache.update(dict.fromkeys("abcd", 5))
    assert cache.get("a") is None


def test_the_bytes_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_caches", [])
    cache = ByteCache(10)
    for key in "abc":
        cache.put(key, b"1234")
    assert [key for key in "abc" if key in cache] == ["b", "c"]
    assert cache.get("b") == b"1234"
    cache.put("d", b"12")
    cache.put("e", b"1")
    assert [key for key in "abcde" if key in cache] == ["b", "d", "e"]
    cache.put("b", b"123456789")
    assert [key for key in "abcde" if key in cache] == ["b", "e"]
    cache.put("f", b"1" * 11)
    assert [key for key in "bef" if key in cache] == ["b", "e"]
    caches.forget()
    assert cache.get("b") is None


def test_a_fork_while_a_lock_is_held() -> None:
    cache = ByteCache(10)
    with cache._lock:
        child = os.fork()
        if not child:
            cache.put("a", b"1")
            os._exit(cache.get("a") != b"1")
    assert os.waitpid(child, 0)[1] == 0
