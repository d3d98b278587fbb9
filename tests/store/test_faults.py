"""Writes that fail: short, refused, out of space. Nothing becomes visible, nothing is lost, and work goes on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.store import files
from tests.support import HostPool, content, key, namespace, tier


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB, where the tests may mount one; else a folder on the usual one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=False).returncode == 0
    )
    if os.environ.get("CI"):
        assert mounted, "CI must run the test on a file system that fills up"
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class _FailingWrites:
    """``os.pwritev`` that fails every ``period``-th time, in one of the ways a disk does."""

    def __init__(self, kind: str, period: int) -> None:
        self.kind, self.period, self.calls = kind, period, 0
        self.real = os.pwritev

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        self.calls += 1
        if self.calls % self.period:
            return self.real(fd, buffers, offset)
        if self.kind == "short":
            return self.real(fd, [memoryview(buffers[0])[: max(1, len(buffers[0]) // 3)]], offset)
        if self.kind == "torn":
            self.real(fd, [memoryview(buffers[0])[: max(1, len(buffers[0]) // 2)]], offset)
            raise OSError(errno.EIO, "torn")
        raise OSError(getattr(errno, self.kind), os.strerror(getattr(errno, self.kind)))


@pytest.mark.parametrize("kind", ["short", "torn", "EIO", "ENOSPC", "EPERM", "ENOMEM"])
@pytest.mark.parametrize("period", [2, 3, 5])
def test_failing_writes_cost_pages_and_never_show_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, period: int
) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    faulty = _FailingWrites(kind, period)
    monkeypatch.setattr(files.os, "pwritev", faulty)
    acknowledged = []
    for name in range(40):
        pool.fill(0, content(name, pool.geometry))
        if opened.put(space, [key(name)], [pool.page(0)])[0]:
            acknowledged.append(name)
    monkeypatch.undo()
    assert faulty.calls > 40
    assert acknowledged == list(range(40)) if kind == "short" else len(acknowledged) < 40
    for again in range(2):
        for name in range(40):
            found = opened.get(space, [key(name)], [pool.page(0)])[0]
            assert found == (name in acknowledged)
            if found:
                assert pool.canonical(0) == content(name, pool.geometry)
        if not again:  # the same after opening anew, where nothing half written may turn up
            opened.store.close()
            opened = tier(tmp_path / "s")
    for name in range(40):
        pool.fill(0, content(name, pool.geometry))
        assert opened.put(space, [key(name)], [pool.page(0)]) == [True]
    opened.store.close()


def test_a_full_file_system_is_lived_with(small_disk: Path) -> None:
    pool = HostPool(1, shape=(16, 8, 4, 64))
    opened = tier(small_disk / "s", capacity="1GiB", segment_size="1MiB")
    space = namespace(opened, pool.geometry)
    for name in range(60):
        pool.fill(0, content(name, pool.geometry))
        assert opened.put(space, [key(name)], [pool.page(0)]) == [True]
        assert opened.get(space, [key(name)], [pool.page(0)]) == [True]
        assert pool.canonical(0) == content(name, pool.geometry)
    opened.store.close()


def test_one_slot_that_cannot_be_voided_does_not_stop_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(1, shape=(16, 8, 4, 64))
    opened = tier(tmp_path / "s", capacity="4MiB", segment_size="1MiB")
    space = namespace(opened, pool.geometry)
    refused = 0
    from sgl_kvtier.store.segment import Segment

    void = Segment.void

    def stubborn(self: Segment, slots: list[int]) -> None:
        nonlocal refused
        if 0 in slots:
            refused += 1
            raise PermissionError(errno.EPERM, "Operation not permitted")
        void(self, slots)

    monkeypatch.setattr(Segment, "void", stubborn)
    for name in range(200):
        pool.fill(0, content(name, pool.geometry))
        assert opened.put(space, [key(name)], [pool.page(0)]) == [True]
    assert 0 < refused < 200
    opened.store.close()
