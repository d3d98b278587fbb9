"""The SSD tier against a dict: it may forget, it must never lie."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_kvtier import metrics
from sgl_kvtier.store import toc
from sgl_kvtier.tier.ssd import Chain
from tests.support import HostPool, config, content, key, namespace, tier

_SHAPES = ((16, 2, 2, 32), (16, 4, 2, 64), (4, 1, 1, 8))
_NAMES = st.integers(0, 30)
_SPACES = st.integers(0, 2)


class TierMachine(RuleBasedStateMachine):
    """Puts, gets, clears and restarts in any order; three namespaces, of different page sizes, in a small store."""

    @initialize(codec=st.sampled_from(["zstd", "raw"]))
    def open(self, codec: str) -> None:
        """An empty store of 4 MiB."""
        self._root = Path(tempfile.mkdtemp())
        self._settings = {"capacity": "4MiB", "segment_size": "1MiB", "codec": codec}
        self._pools = [HostPool(1, shape=shape) for shape in _SHAPES]
        self._stored: dict[tuple[int, int], bytes] = {}
        self._reopen()

    def _reopen(self) -> None:
        self._tier = tier(self._root / "s", **self._settings)
        self._spaces = [namespace(self._tier, p.geometry, f"model {i}") for i, p in enumerate(self._pools)]

    @rule(space=_SPACES, name=_NAMES, version=st.integers(0, 1))
    def put(self, space: int, name: int, version: int) -> None:
        """Store a page; one that is there stays as it is."""
        pool = self._pools[space]
        given = content((space, name, version), pool.geometry)
        pool.fill(0, given)
        there = self._tier.leading_run(self._spaces[space], [key(name)]) == 1
        assert self._tier.put(self._spaces[space], [key(name)], [pool.page(0)]) == [True]
        if not there:
            self._stored[space, name] = given

    @rule(space=_SPACES, name=_NAMES)
    def get(self, space: int, name: int) -> None:
        """What comes back is what was stored last."""
        pool = self._pools[space]
        present = self._tier.present(self._spaces[space], [key(name)])
        found = self._tier.get(self._spaces[space], [key(name)], [pool.page(0)])
        assert found == present
        if found[0]:
            assert pool.canonical(0) == self._stored[space, name]

    @rule(space=_SPACES)
    def clear(self, space: int) -> None:
        """Nothing of the namespace is found afterwards."""
        self._tier.store.clear([self._spaces[space]])
        assert not any(self._tier.present(self._spaces[space], [key(n) for n in range(31)]))
        self._stored = {k: v for k, v in self._stored.items() if k[0] != space}

    @rule()
    def restart(self) -> None:
        """What was found is found again."""
        before = [self._tier.present(s, [key(n) for n in range(31)]) for s in self._spaces]
        self._tier.store.close()
        self._reopen()
        assert [self._tier.present(s, [key(n) for n in range(31)]) for s in self._spaces] == before

    @invariant()
    def stays_under_the_cap(self) -> None:
        """The files of all segments fit into the capacity."""
        if hasattr(self, "_root"):
            total = sum(f.stat().st_size for f in self._root.rglob("*") if f.name in ("data.ninja", "toc.bin"))
            assert total <= 4 << 20

    def teardown(self) -> None:
        """Remove the store."""
        if hasattr(self, "_tier"):
            self._tier.store.close()
            shutil.rmtree(self._root)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_runs_and_presence(tmp_path: Path) -> None:
    opened, pool = tier(tmp_path / "s"), HostPool(4)
    space = namespace(opened, pool.geometry)
    assert opened.put(space, [key(n) for n in (0, 1, 3)], pool.views([0, 1, 3])) == [True] * 3
    keys = [key(n) for n in range(4)]
    assert opened.leading_run(space, keys) == 2
    assert opened.present(space, keys) == [True, True, False, True]
    assert opened.get(space, keys, pool.views()) == [True, True, False, True]
    assert opened.leading_run(space, []) == 0
    assert opened.present(space, []) == []
    assert opened.put(space, [], []) == []
    assert opened.get(space, [], []) == []
    opened.store.close()


def test_entries_record_the_chain(tmp_path: Path) -> None:
    opened, pool = tier(tmp_path / "s"), HostPool(3)
    space = namespace(opened, pool.geometry)
    keys = [key(n) for n in range(4)]
    opened.put(space, keys[1:], pool.views(), Chain.after(keys[:1]))
    opened.put(space, [key("alone")], pool.views([0]))
    opened.store.close()
    file = next((tmp_path / "s").rglob("toc.bin"))
    header = toc.TocHeader.unpack(file.read_bytes()[: toc.HEADER_BYTES])
    entries = np.fromfile(file, toc.ENTRY_DTYPE, header.slot_count, offset=toc.HEADER_BYTES)
    live = sorted(entries[toc.valid_entries(entries, header.seed)], key=lambda entry: int(entry["written_us"]))
    assert [int(entry["position"]) for entry in live] == [1, 2, 3, toc.UNKNOWN_POSITION]
    assert [int(entry["parent"]) for entry in live[1:3]] == [int(entry["digest"][0]) for entry in live[:2]]
    assert live[0]["parent"] != 0
    assert live[3]["parent"] == 0


def test_a_page_that_is_rewritten_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, pool = tier(tmp_path / "s", codec="raw"), HostPool(1)
    space = namespace(opened, pool.geometry)
    pool.fill(0, content(1, pool.geometry))
    opened.put(space, [key(1)], [pool.page(0)])
    decode = opened.codecs.decode

    def and_clear(*arguments: object) -> None:
        decode(*arguments)  # type: ignore[arg-type]
        opened.store.clear([space])

    monkeypatch.setattr(opened.codecs, "decode", and_clear)
    assert opened.get(space, [key(1)], [pool.page(0)]) == [False]
    opened.store.close()


def test_counters_count(tmp_path: Path) -> None:
    opened, pool = tier(tmp_path / "s"), HostPool(1)
    space = namespace(opened, pool.geometry)

    def count(operation: str, outcome: str) -> float:
        return metrics.PAGES.labels(operation, outcome)._value.get()

    before = {pair: count(*pair) for pair in (("put", "stored"), ("put", "present"), ("get", "hit"), ("get", "miss"))}
    raw, stored = (c.labels("put")._value.get() for c in (metrics.PAGE_BYTES, metrics.RECORD_BYTES))
    opened.put(space, [key(1)], [pool.page(0)])
    opened.put(space, [key(1)], [pool.page(0)])
    opened.get(space, [key(1), key(2)], [pool.page(0), pool.page(0)])
    assert {pair: count(*pair) - value for pair, value in before.items()} == dict.fromkeys(before, 1.0)
    assert metrics.PAGE_BYTES.labels("put")._value.get() - raw == pool.geometry.nbytes
    assert 0 < metrics.RECORD_BYTES.labels("put")._value.get() - stored < pool.geometry.nbytes
    opened.store.close()


def test_transfers_are_given_out_once() -> None:
    log = metrics.TransferLog()
    log.add(3, 6_000_000_000, 2.0)
    log.add(0, 0, 1.0)
    assert log.drain() == [metrics.Transfer(3, 3.0)]
    assert log.drain() == []


def test_settings_reach_the_codec(tmp_path: Path) -> None:
    assert config(tmp_path, codec="raw").codec == "raw"
    opened = tier(tmp_path / "s", codec="raw")
    assert opened.codecs.write_name == "raw"
    assert opened.codecs.names() == {0: "raw", 1: "zstd"}
    opened.store.close()
