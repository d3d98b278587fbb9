"""One process, one store: what is kept, what is given up, and what the files are."""

from __future__ import annotations

import os
import random
import stat
import threading
from pathlib import Path

import mmap_ninja.numpy
import numpy as np
import pytest

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store import Store, segment
from sgl_kvtier.store.feed import EVENTS, Feed
from sgl_kvtier.store.inspect import store_usage
from sgl_kvtier.tier.ssd import SsdTier
from tests.support import HostPool, config, content, key, namespace, tier


def _put(opened: SsdTier, pool: HostPool, space: bytes, names: range | list[int]) -> None:
    for name in names:
        pool.fill(0, content(name, pool.geometry))
        assert opened.put(space, [key(name)], [pool.page(0)]) == [True]


def _got(opened: SsdTier, pool: HostPool, space: bytes, name: int) -> bool:
    """Whether the page comes back; if it does, it must be the right one."""
    pool.fill(0, bytes(pool.geometry.nbytes))
    if not opened.get(space, [key(name)], [pool.page(0)])[0]:
        return False
    assert pool.canonical(0) == content(name, pool.geometry)
    return True


def _files_bytes(root: Path) -> int:
    return sum(f.stat().st_size for f in root.rglob("*") if f.name in ("data.ninja", "toc.bin"))


def test_pages_survive_closing_and_opening(tmp_path: Path) -> None:
    pool = HostPool(1)
    first = tier(tmp_path / "s")
    space = namespace(first, pool.geometry)
    _put(first, pool, space, range(40))
    first.store.close()
    assert not _got(first, pool, space, 1)
    second = tier(tmp_path / "s")
    assert second.leading_run(space, [key(n) for n in range(41)]) == 40
    assert all(_got(second, pool, space, n) for n in range(40))
    assert not _got(second, pool, space, 40)
    second.store.close()


def test_every_segment_is_a_mmap_ninja_array_of_private_files(tmp_path: Path) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, range(5))
    folders = [folder for folder in (tmp_path / "s").rglob("seg-*") if folder.is_dir()]
    assert folders
    for folder in folders:
        array = mmap_ninja.numpy.open_existing(folder)
        assert array.dtype == np.uint8
        assert array.shape[1] % segment.SLOT_ALIGNMENT == 0
        assert any(row[:6].tobytes() == b"KVTREC" for row in array)
        assert (folder / "data.ninja").stat().st_blocks * 512 >= array.nbytes
    for path in (tmp_path / "s").rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    opened.store.close()


def test_a_full_store_stays_under_its_cap_and_gives_up_the_least_recently_used(tmp_path: Path) -> None:
    pool = HostPool(1, shape=(16, 8, 4, 64))
    opened = tier(tmp_path / "s", capacity="8MiB", segment_size="1MiB")
    space = namespace(opened, pool.geometry)
    favourites = [0, 1, 2]
    for name in range(120):
        _put(opened, pool, space, [name])
        assert all(_got(opened, pool, space, favourite) for favourite in favourites if favourite <= name)
        assert _files_bytes(tmp_path / "s") <= 8 << 20
    held = [n for n in range(120) if _got(opened, pool, space, n)]
    assert held[:3] == favourites
    assert held[3:] == list(range(held[3], 120))
    assert len(held) * pool.geometry.nbytes > 8 << 20  # more than fits raw
    assert opened.store.stats().evicted_pages == 120 - len(held)
    opened.store.close()


def test_segments_change_hands_when_pages_change_size(tmp_path: Path) -> None:
    opened = tier(tmp_path / "s", capacity="8MiB", segment_size="1MiB")
    for shape in ((16, 8, 4, 64), (16, 2, 2, 32), (64, 8, 4, 64), (16, 1, 1, 8)):
        pool = HostPool(1, shape=shape)
        space = namespace(opened, pool.geometry)
        count = max(20, (16 << 20) // pool.geometry.nbytes) if shape[1] > 2 else 200
        for name in range(count):
            _put(opened, pool, space, [name])
            assert _got(opened, pool, space, name)
        assert _files_bytes(tmp_path / "s") <= 8 << 20
    opened.store.close()


def test_little_of_a_slot_is_wasted(tmp_path: Path) -> None:
    for shape in ((16, 30, 3, 64), (16, 16, 1, 128), (64, 16, 2, 128)):
        pool = HostPool(1, shape=shape)
        opened = tier(tmp_path / str(shape), capacity="512MiB")
        _put(opened, pool, namespace(opened, pool.geometry), range(24))
        opened.store.close()
        usage = store_usage(tmp_path / str(shape))
        assert usage.pages == 24
        assert usage.raw_bytes == 24 * pool.geometry.nbytes
        assert usage.record_bytes <= usage.stored_bytes <= 1.03 * usage.record_bytes
    for record_bytes in range(1, 1 << 22, 4099):
        slot = segment.slot_class(record_bytes)
        assert record_bytes <= slot <= record_bytes + max(512, record_bytes // 64)


def test_a_page_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    pool = HostPool(1, dtype="uint8", shape=(64, 32, 8, 512))
    opened = tier(tmp_path / "s", capacity="4MiB")
    space = namespace(opened, pool.geometry)
    assert opened.put(space, [key(1)], [pool.page(0)]) == [True]  # zeros compress
    pool.fill(0, content(2, pool.geometry, compressible=False))
    assert opened.put(space, [key(2)], [pool.page(0)]) == [False]
    opened.store.close()


def test_clear_forgets_one_namespace_for_good(tmp_path: Path) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    mine, other = (namespace(opened, pool.geometry, model) for model in ("mine", "other"))
    for space in (mine, other):
        _put(opened, pool, space, range(10))
    assert opened.store.clear([mine]) == 10
    assert opened.leading_run(mine, [key(0)]) == 0
    _put(opened, pool, mine, [3])
    opened.store.close()
    again = tier(tmp_path / "s")
    assert [_got(again, pool, mine, n) for n in range(5)] == [False, False, False, True, False]
    assert all(_got(again, pool, other, n) for n in range(10))
    again.store.close()


def test_damage_is_a_miss_and_is_gone_afterwards(tmp_path: Path) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, range(30))
    rng = random.Random(0)
    for data in (tmp_path / "s").rglob("data.ninja"):
        slot_bytes = mmap_ninja.numpy.open_existing(data.parent).shape[1]
        with open(data, "r+b") as file:
            for slot in range(data.stat().st_size // slot_bytes):
                file.seek(slot * slot_bytes + rng.choice([0, 9, 40, 50, 90, 121, 130, 700]))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x10]))
    assert not any(_got(opened, pool, space, n) for n in range(30))
    assert opened.leading_run(space, [key(0)]) == 0
    _put(opened, pool, space, range(30))
    assert all(_got(opened, pool, space, n) for n in range(30))
    opened.store.close()


def test_a_record_under_another_key_is_not_returned(tmp_path: Path) -> None:
    """Two slots' contents exchanged, entries untouched: a misdirected write."""
    pool = HostPool(1)
    opened = tier(tmp_path / "s", codec="raw")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, [1, 2])
    data = next((tmp_path / "s").rglob("data.ninja"))
    slots = np.memmap(data, np.uint8, "r+", shape=mmap_ninja.numpy.open_existing(data.parent).shape)
    used = [i for i in range(len(slots)) if slots[i, :6].tobytes() == b"KVTREC"]
    slots[used] = slots[used[::-1]]
    slots.flush()
    assert not _got(opened, pool, space, 1)
    assert not _got(opened, pool, space, 2)
    opened.store.close()


@pytest.mark.parametrize("name", ["data.ninja", "toc.bin", "shape.ninja", "feed.bin"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_store_with_a_damaged_file_opens_and_works(tmp_path: Path, name: str, cut: bool) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, range(10))
    opened.store.close()
    victim = next((tmp_path / "s").rglob(name))
    with open(victim, "r+b") as file:
        if cut:
            file.truncate(victim.stat().st_size // 2)
        else:
            file.write(b"\xff" * 40)
    again = tier(tmp_path / "s")
    for n in range(10):
        _got(again, pool, space, n)
    _put(again, pool, space, range(20, 30))
    assert all(_got(again, pool, space, n) for n in range(20, 30))
    again.store.close()


def test_folders_that_are_no_store_of_ours_are_refused(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    newer = tmp_path / "newer"
    Store(config(newer)).close()
    (newer / "store.json").write_text('{"format": 3}')
    opened = tmp_path / "opened"
    Store(config(opened)).close()
    opened.chmod(0o750)
    linked = tmp_path / "linked"
    linked.symlink_to(newer)
    file = tmp_path / "file"
    file.touch()
    for folder, reason in (
        (full, "not empty"),
        (newer, "format 3"),
        (opened, "chmod 700"),
        (linked, "symbolic link|not empty"),
        (file, "holds no store|not a directory"),
    ):
        with pytest.raises(StoreError, match=reason):
            Store(config(folder))
    assert (full / "thesis.tex").exists()
    assert (newer / "store.json").read_text() == '{"format": 3}'


def test_symbolic_links_inside_a_store_are_not_followed(tmp_path: Path) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, range(3))
    opened.store.close()
    data = next((tmp_path / "s").rglob("data.ninja"))
    elsewhere = tmp_path / "elsewhere"
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    again = tier(tmp_path / "s")
    assert not any(_got(again, pool, space, n) for n in range(3))
    _put(again, pool, space, range(3))
    again.store.close()
    assert elsewhere.read_bytes() == before


def test_no_room_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no room.*min_free"):
        Store(config(tmp_path / "s", min_free="900TiB"))


def test_what_a_crash_left_half_made_is_removed(tmp_path: Path) -> None:
    pool = HostPool(1)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry)
    _put(opened, pool, space, range(3))
    opened.store.close()
    writer = next((tmp_path / "s").glob("writer-*"))
    for name in (".new-seg-00000007", ".dead-seg-00000003"):
        (writer / name).mkdir()
        (writer / name / "data.ninja").write_bytes(bytes(1 << 20))
    again = tier(tmp_path / "s")
    _put(again, pool, space, [9])
    assert not list(writer.glob(".*"))
    again.store.close()


def test_threads_that_put_get_and_clear_see_no_wrong_page(tmp_path: Path) -> None:
    opened = tier(tmp_path / "s", capacity="4MiB", segment_size="1MiB")
    shape = (16, 4, 2, 64)
    space = namespace(opened, HostPool(1, shape=shape).geometry)
    expected = [content(n, HostPool(1, shape=shape).geometry) for n in range(120)]
    pool = HostPool(1, shape=shape)
    for name in range(120):
        pool.fill(0, expected[name])
        opened.put(space, [key(name)], [pool.page(0)])
    failures: list[str] = []
    hits = 0
    lock = threading.Lock()

    def work(seed: int) -> None:
        nonlocal hits
        rng, pool = random.Random(seed), HostPool(1, shape=shape)
        for step in range(400):
            name = rng.randrange(120)
            if seed % 2:
                pool.fill(0, expected[name])
                opened.put(space, [key(name)], [pool.page(0)])
            elif opened.get(space, [key(name)], [pool.page(0)])[0]:
                with lock:
                    hits += 1
                    if pool.canonical(0) != expected[name]:
                        failures.append(f"page {name} is wrong at step {step} of thread {seed}")
            opened.leading_run(space, [key(name)])
            if seed == 0 and step == 200:
                opened.store.clear([space])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert hits > 50
    assert _files_bytes(tmp_path / "s") <= 4 << 20
    opened.store.close()


def test_the_feed_tells_every_change_or_that_it_cannot(tmp_path: Path) -> None:
    writer = Feed(tmp_path / "feed.bin", create=True)
    reader = Feed(tmp_path / "feed.bin", create=False)
    assert reader.since(0) == (0, [])
    writer.post(3, [4])
    writer.post(5, [0xFFFFFFFF])
    assert reader.since(0) == (2, [(3, 4), (5, 0xFFFFFFFF)])
    assert reader.since(1) == (2, [(5, 0xFFFFFFFF)])
    assert reader.since(9)[1] is None
    for slot in range(EVENTS):
        writer.post(1, [slot])
    assert reader.since(2)[1] is None
    assert reader.since(EVENTS) == (EVENTS + 2, [(1, EVENTS - 2), (1, EVENTS - 1)])
    writer.want = True
    assert reader.want
