"""Several processes on one store: killed in the middle, reading each other, sharing one budget."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_kvtier.tier.ssd import SsdTier
from tests.store.worker import SETTINGS, SHAPE
from tests.support import HostPool, content, key, namespace, tier

_REPO = Path(__file__).resolve().parents[2]
_DEADLINE_S = 60


def _start(directory: Path, model: str, first: int, count: int = 0) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(_REPO), str(_REPO / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.store.worker", str(directory), model, str(first), str(count)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_REPO,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def _acknowledged(process: subprocess.Popen[str], kill_after: int | None = None) -> list[int]:
    """Pages that the process acknowledged: until it says "done", or is killed soon after so many."""
    assert process.stdout is not None
    names: list[int] = []
    for line in process.stdout:
        if line == "done\n":
            break
        if line.endswith("\n"):  # else the process died while it wrote the line
            names.append(int(line))
        if len(names) == kill_after:
            process.kill()
    if kill_after is not None:
        _kill(process)
    return names


def _kill(process: subprocess.Popen[str]) -> None:
    with process:  # closes the pipes and waits
        process.kill()


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n")
    assert process.returncode == 0


def _held(opened: SsdTier, space: bytes, names: list[int] | range) -> list[int]:
    """The pages that come back; each must be the right one."""
    pool = HostPool(1, shape=SHAPE)
    held = []
    for name in names:
        if opened.get(space, [key(name)], [pool.page(0)])[0]:
            assert pool.canonical(0) == content(name, pool.geometry)
            held.append(name)
    return held


def _eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _files_bytes(root: Path) -> int:
    return sum(f.stat().st_size for f in root.rglob("*") if f.name in ("data.ninja", "toc.bin"))


def test_what_a_killed_process_acknowledged_is_there_and_right(tmp_path: Path) -> None:
    rng = random.Random(1)
    geometry = HostPool(1, shape=SHAPE).geometry
    acknowledged: list[int] = []
    for _ in range(6):
        first = acknowledged[-1] + 10 if acknowledged else 0
        acknowledged += _acknowledged(_start(tmp_path / "s", "m", first), rng.randint(1, 60))
        opened = tier(tmp_path / "s", **SETTINGS)
        space = namespace(opened, geometry, "m")
        recent = acknowledged[-200:]  # the cap may have cost older ones
        assert _held(opened, space, recent) == recent
        opened.store.close()
    assert _files_bytes(tmp_path / "s") <= 32 << 20
    assert len(list((tmp_path / "s").glob("writer-*"))) == 1


def test_readers_follow_a_living_writer_and_its_evictions(tmp_path: Path) -> None:
    reader = tier(tmp_path / "s", **SETTINGS)
    space = namespace(reader, HostPool(1, shape=SHAPE).geometry, "m")
    writer = _start(tmp_path / "s", "m", 0, 3000)
    _eventually(lambda: reader.leading_run(space, [key(0)]) == 1 or bool(_held(reader, space, [500])))
    names = _acknowledged(writer)
    assert names == list(range(3000))
    held = _held(reader, space, range(3000))
    assert held[-100:] == list(range(2900, 3000))
    assert len(held) < 3000
    present = reader.present(space, [key(n) for n in range(3000)])
    assert [n for n in range(3000) if present[n]] == held
    assert _files_bytes(tmp_path / "s") <= 32 << 20
    _end(writer)
    reader.store.close()


def test_two_writers_share_one_budget_and_neither_starves(tmp_path: Path) -> None:
    first = _start(tmp_path / "s", "a", 0, 1200)
    assert len(_acknowledged(first)) == 1200  # the whole budget is the first one's by now
    second = _start(tmp_path / "s", "b", 0, 400)
    stored = _acknowledged(second)
    assert stored == list(range(400)) or stored == []
    opened = tier(tmp_path / "s", **SETTINGS)
    space = namespace(opened, HostPool(1, shape=SHAPE).geometry, "a")
    assert _held(opened, space, [1199]) == [1199]
    assert _files_bytes(tmp_path / "s") <= 32 << 20
    opened.store.close()
    for process in (first, second):
        _end(process)


def test_a_process_that_holds_too_much_gives_a_segment_to_one_that_waits(tmp_path: Path) -> None:
    pool = HostPool(1, shape=SHAPE)
    rich, poor = tier(tmp_path / "s", **SETTINGS), tier(tmp_path / "s", **SETTINGS)
    spaces = [namespace(opened, pool.geometry, model) for opened, model in ((rich, "rich"), (poor, "poor"))]

    def put(opened: SsdTier, space: bytes, name: int) -> bool:
        pool.fill(0, content(name, pool.geometry))
        return opened.put(space, [key(name)], [pool.page(0)])[0]

    assert all(put(rich, spaces[0], name) for name in range(1500))
    assert not put(poor, spaces[1], 0)
    assert put(rich, spaces[0], 1500)
    assert put(poor, spaces[1], 0)
    assert _held(poor, spaces[1], [0]) == [0]
    assert _held(rich, spaces[1], [0]) == [0]
    assert _files_bytes(tmp_path / "s") <= 32 << 20
    for opened in (rich, poor):
        opened.store.close()


def test_folders_of_dead_processes_are_taken_over_when_space_is_needed(tmp_path: Path) -> None:
    left = [_start(tmp_path / "s", model, 0, 300) for model in ("a", "b")]
    for process in left:
        _acknowledged(process)
        _kill(process)
    opened = tier(tmp_path / "s", **SETTINGS)
    pool = HostPool(1, shape=SHAPE)
    space = namespace(opened, pool.geometry, "c")
    for name in range(1500):
        pool.fill(0, content(name, pool.geometry))
        assert opened.put(space, [key(name)], [pool.page(0)])[0]
    assert _held(opened, space, [1499]) == [1499]
    assert _files_bytes(tmp_path / "s") <= 32 << 20
    opened.store.close()


def test_a_clear_holds_for_folders_of_dead_processes_and_spares_other_models(tmp_path: Path) -> None:
    geometry = HostPool(1, shape=SHAPE).geometry
    process = _start(tmp_path / "s", "m", 0, 50)
    _acknowledged(process)
    _kill(process)
    opened = tier(tmp_path / "s", **SETTINGS)
    mine, other = (namespace(opened, geometry, model) for model in ("m", "other"))
    assert opened.store.clear([other]) == 0
    assert len(_held(opened, mine, range(50))) == 50
    assert opened.store.clear([mine]) == 50
    assert _held(opened, mine, range(50)) == []
    opened.store.close()
    again = tier(tmp_path / "s", **SETTINGS)
    assert _held(again, mine, range(50)) == []
    again.store.close()


def test_a_clear_reaches_what_a_living_process_wrote_before_it(tmp_path: Path) -> None:
    geometry = HostPool(1, shape=SHAPE).geometry
    process = _start(tmp_path / "s", "m", 0, 50)
    _acknowledged(process)
    opened = tier(tmp_path / "s", **SETTINGS)
    space = namespace(opened, geometry, "m")
    assert opened.store.clear([space]) == 50
    assert _held(opened, space, range(50)) == []
    _end(process)
    # The living process could not be made to void them; whoever owns its folder next must, before reusing the slots.
    again = tier(tmp_path / "s", **SETTINGS)
    assert _held(again, space, range(50)) == []
    pool = HostPool(1, shape=SHAPE)
    pool.fill(0, content(7, geometry))
    assert again.put(space, [key(7)], [pool.page(0)]) == [True]
    assert _held(again, space, range(50)) == [7]
    again.store.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    opened = tier(tmp_path / "s", **SETTINGS)
    pool = HostPool(1, shape=SHAPE)
    space = namespace(opened, pool.geometry, "m")
    pool.fill(0, content(1, pool.geometry))
    opened.put(space, [key(1)], [pool.page(0)])
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent is done
        os._exit(0)
    os.close(read_end)
    opened.store.close()
    second = tier(tmp_path / "s", **SETTINGS)
    pool.fill(0, content(2, pool.geometry))
    assert second.put(space, [key(2)], [pool.page(0)]) == [True]
    assert len(list((tmp_path / "s").glob("writer-*"))) == 1
    second.store.close()
    os.close(write_end)
    os.waitpid(child, 0)
