"""A prompt in one server's tree -> storage -> another server's tree -> its device: every layer's bytes are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from sgl_kvtier import plugin
from sgl_kvtier.backend import KVTierStorage
from sgl_kvtier.testing.radix import CacheConfig, ComponentType, Driver, load_plugins

#: Host layouts with the ways of copying that SGLang allows for them.
LAYOUTS = [
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_head", "kernel"),
]
FULL = CacheConfig(page_size=16, components=(ComponentType.FULL,), num_layers=4)
WINDOW = CacheConfig(
    page_size=4,
    components=(ComponentType.FULL, ComponentType.SWA),
    sliding_window_size=8,
    num_layers=6,
    full_attention_layer_ids=(2, 5),
)
MAMBA = CacheConfig(
    page_size=4,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
    num_layers=6,
    full_attention_layer_ids=(2, 5),
)

_layouts = pytest.mark.parametrize(("layout", "io"), LAYOUTS, ids=["-".join(case) for case in LAYOUTS])


class MakeDriver(Protocol):
    def __call__(self, cfg: CacheConfig, layout: str = "page_first_direct", io: str = "direct") -> Driver: ...


@pytest.fixture
def make_driver(tmp_path: Path) -> Iterator[MakeDriver]:
    drivers: list[Driver] = []

    def make(cfg: CacheConfig, layout: str = "page_first_direct", io: str = "direct") -> Driver:
        extra = {"directory": str(tmp_path / "store"), "capacity": "256MiB", "segment_size": "1MiB"}
        drivers.append(Driver(cfg, plugin.NAME, extra, layout, io))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.doCleanups()


def _assert_equal(found: Sequence[torch.Tensor], stored: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(stored) > 0
    assert all(bool(tensor.any()) for tensor in stored)
    assert [torch.equal(a, b) for a, b in zip(found, stored, strict=True)] == [True] * len(stored)


def test_plugin_is_in_effect() -> None:
    load_plugins()
    assert plugin.missing_hooks() == []


def test_flag_takes_the_plain_name() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = ["--model-path", "dummy", "--hicache-storage-backend"]
    assert parser.parse_args([*arguments, plugin.NAME]).hicache_storage_backend == plugin.NAME
    assert parser.parse_args([*arguments, "file"]).hicache_storage_backend == "file"
    with pytest.raises(SystemExit):
        parser.parse_args([*arguments, "sgl_kvtiers"])


@_layouts
def test_full_attention(make_driver: MakeDriver, layout: str, io: str) -> None:
    driver = make_driver(FULL, layout, io)
    producer, tokens = driver.open(), driver.tokens(5)
    leaf = driver.insert(producer, tokens)
    producer_indices = producer.path(tokens)
    producer.fill(tokens, 1)
    stored = producer.kv(producer_indices)
    keys = driver.store(producer, leaf)
    assert isinstance(producer.backend, KVTierStorage)
    controller = producer.cache.cache_controller
    assert controller.page_get_func == controller._page_get_zero_copy
    assert controller.page_set_func == controller._page_set_zero_copy
    assert producer.backend.batch_exists(keys) == 5

    consumer = driver.open()
    assert driver.prefetch(consumer, tokens).host_hit_length == len(tokens)
    driver.load(consumer, tokens)
    _assert_equal(consumer.kv(consumer.path(tokens)), stored)


def test_layouts_of_two_servers_may_differ(make_driver: MakeDriver) -> None:
    writer = make_driver(FULL, "layer_first", "direct")
    producer, tokens = writer.open(), writer.tokens(5)
    leaf = writer.insert(producer, tokens)
    producer.fill(tokens, 2)
    stored = producer.kv(producer.path(tokens))
    writer.store(producer, leaf)
    for layout, io in LAYOUTS:
        reader = make_driver(FULL, layout, io)
        consumer = reader.open()
        assert reader.prefetch(consumer, tokens).host_hit_length == len(tokens)
        reader.load(consumer, tokens)
        _assert_equal(consumer.kv(consumer.path(tokens)), stored)


def test_shared_prefix_only(make_driver: MakeDriver) -> None:
    """A prompt that goes on differently finds the pages of the common prefix; another one finds nothing."""
    driver = make_driver(FULL)
    producer, tokens = driver.open(), driver.tokens(5)
    leaf = driver.insert(producer, tokens)
    producer.fill(tokens, 3)
    stored = producer.kv(producer.path(tokens)[:48])
    driver.store(producer, leaf)

    consumer = driver.open()
    other = tokens[:50] + driver.tokens(2, start=1000)[:30]
    assert driver.prefetch(consumer, other).host_hit_length == 48
    driver.load(consumer, other)
    _assert_equal(consumer.kv(consumer.path(other)), stored)
    assert driver.prefetch(consumer, driver.tokens(5, start=2000), "stranger").host_hit_length == 0


def test_cleared_storage_is_recomputed(make_driver: MakeDriver) -> None:
    driver = make_driver(FULL)
    producer, tokens = driver.open(), driver.tokens(5)
    driver.store(producer, driver.insert(producer, tokens))
    producer.cache.cache_controller.storage_backend.clear()
    assert driver.prefetch(driver.open(), tokens).host_hit_length == 0


def test_host_pool_as_staging_buffer(make_driver: MakeDriver) -> None:
    """SGLang's ``buffer_only`` mode: host memory keeps nothing, the storage is the second level."""
    driver = make_driver(FULL)
    producer, tokens = driver.open(host_memory_mode="buffer_only"), driver.tokens(5)
    leaf = driver.insert(producer, tokens)
    producer.fill(tokens, 4)
    stored = producer.kv(producer.path(tokens))
    assert producer.backend.batch_exists(driver.store_buffered(producer, leaf)) == 5

    consumer = driver.open(host_memory_mode="buffer_only")
    assert driver.prefetch(consumer, tokens).device_prefix_len == len(tokens)
    _assert_equal(consumer.kv(consumer.path(tokens)), stored)


@_layouts
def test_sliding_window(make_driver: MakeDriver, layout: str, io: str) -> None:
    """Full-attention layers of all pages through v1, window layers of the last pages through v2."""
    driver = make_driver(WINDOW, layout, io)
    producer, tokens = driver.open(), driver.tokens(6)
    leaf = driver.insert(producer, tokens)
    producer.fill(tokens, 5)
    indices = producer.path(tokens)
    stored, window = producer.kv(indices), producer.window_kv(indices[-8:])
    driver.store(producer, leaf)

    consumer = driver.open()
    match = driver.prefetch(consumer, tokens)
    assert (match.host_hit_length, match.swa_host_hit_length) == (24, 8)
    driver.load(consumer, tokens)
    found = consumer.path(tokens)
    _assert_equal(consumer.kv(found), stored)
    _assert_equal(consumer.window_kv(found[-8:]), window)


def test_sliding_window_through_a_staging_buffer(make_driver: MakeDriver) -> None:
    driver = make_driver(WINDOW)
    producer, tokens = driver.open(host_memory_mode="buffer_only"), driver.tokens(6)
    leaf = driver.insert(producer, tokens)
    producer.fill(tokens, 6)
    indices = producer.path(tokens)
    stored, window = producer.kv(indices), producer.window_kv(indices[-8:])
    driver.store_buffered(producer, leaf)

    consumer = driver.open(host_memory_mode="buffer_only")
    assert driver.prefetch(consumer, tokens).device_prefix_len == 24
    found = consumer.path(tokens)
    _assert_equal(consumer.kv(found), stored)
    _assert_equal(consumer.window_kv(found[-8:]), window)


def test_recurrent_state(make_driver: MakeDriver) -> None:
    """Attention layers through v1, the state at the prompt's end through v2."""
    driver = make_driver(MAMBA)
    producer, tokens = driver.open(), driver.tokens(6)
    leaf = driver.insert(producer, tokens)
    producer.fill(tokens, 7)
    stored, states = producer.kv(producer.path(tokens)), producer.states(tokens)
    driver.store(producer, leaf)

    consumer = driver.open()
    match: Any = driver.prefetch(consumer, tokens)
    assert (match.host_hit_length, match.mamba_host_hit_length) == (24, 1)
    driver.load(consumer, tokens)
    _assert_equal(consumer.kv(consumer.path(tokens)), stored)
    _assert_equal(consumer.states(tokens), states)


def test_recurrent_state_is_restorable_at_its_own_end_only(make_driver: MakeDriver) -> None:
    """A longer prompt's prefix has no state of its own: nothing may be restored without one."""
    driver = make_driver(MAMBA)
    producer, tokens = driver.open(), driver.tokens(6)
    driver.store(producer, driver.insert(producer, tokens))
    assert driver.prefetch(driver.open(), tokens[:16]).host_hit_length == 0
    assert driver.prefetch(driver.open(), [*tokens, *driver.tokens(2, start=1000)]).host_hit_length == 24
