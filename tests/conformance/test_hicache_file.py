"""The conformance suite, on SGLang's own file backend: the suite holds for a backend it was not written for.

Where that backend differs, the check is listed with the reason; a listed check must fail, every other must pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sgl_kvtier.testing.conformance import BackendConformance
from sgl_kvtier.testing.dialects import DIALECTS
from sgl_kvtier.testing.pools import PoolShape, fill_like_kv, mha_pool, page_bytes, page_keys, storage_config

_NO_V1 = "it has no v1 interface: the calls answer None"
_NO_FORMAT = "files hold a page's bytes as the host pool has them, and no description of them"
_RAISES = "it trusts its caller, and raises"

_KNOWN_FAILURES = {
    "test_unknown_key_is_a_miss[v1]": _NO_V1,
    "test_pages_come_back_byte_for_byte[like-kv-v1]": _NO_V1,
    "test_pages_come_back_byte_for_byte[any-bits-v1]": _NO_V1,
    "test_pages_come_back_byte_for_byte[zeros-v1]": _NO_V1,
    "test_batches_of_any_size[0-v1]": _NO_V1,
    "test_batches_of_any_size[1-v1]": _NO_V1,
    "test_batches_of_any_size[128-v1]": _NO_V1,
    "test_neighbours_stay_untouched[v1]": _NO_V1,
    "test_missing_page_leaves_the_others_their_answers[v1]": _NO_V1,
    "test_one_key_several_times_in_a_batch[v1]": _NO_V1,
    "test_storing_again_is_success[v1]": _NO_V1,
    "test_flat_pages_and_indices_name_the_same_pages": _NO_V1,
    "test_pages_survive_a_restart[v1]": _NO_V1,
    "test_wrong_indices_are_misses[v1]": _NO_V1,
    "test_against_a_dictionary[v1]": _NO_V1,
    "test_host_layout_does_not_matter": f"{_NO_FORMAT}: another layout reads it permuted",
    "test_other_deployments_never_hit[dtype]": f"{_NO_FORMAT}: float16 is read as bfloat16",
    "test_other_deployments_never_hit[page-size]": f"{_NO_FORMAT}: pages of equal size are taken for equal",
    "test_other_deployments_never_hit[head-split]": f"{_NO_FORMAT}: pages of equal size are taken for equal",
    "test_other_deployments_never_hit[layer-count]": f"{_NO_FORMAT}: pages of equal size are taken for equal",
    "test_other_deployments_never_hit[model-of-like-name]": "'/' in a model's name is written as '-'",
    "test_block_groups_never_gate": "it does not know the hit policy BLOCK_GROUPS",
    "test_clear_forgets_own_pages_only": "it deletes every file of the directory",
    "test_closed_backend_misses": "it has no close",
    "test_damaged_files_are_misses": "it keeps no checksum; a short file raises",
    "test_damaged_store_stores_again": "a short file raises, and is never replaced",
    "test_wrong_indices_are_misses[v2]": "indices outside the pool give short pages, which it stores",
    "test_bad_generic_arguments_never_raise": _RAISES,
    "test_bad_single_page_arguments_never_raise": _RAISES,
    "test_bad_keys_never_exist": _RAISES,
    "test_bad_transfers_never_raise": _RAISES,
    "test_calls_before_a_pool_is_known_never_raise": _RAISES,
    "test_statistics_count_pages": "it gives no statistics",
}


class TestHiCacheFile(BackendConformance):
    known_failures: ClassVar[dict[str, str]] = _KNOWN_FAILURES

    def make_backend(self, directory: Path, storage_config: Any, host_pool: Any) -> HiCacheFile:
        del host_pool  # registered afterwards
        return HiCacheFile(storage_config, str(directory))

    def capped_config(self, capacity_bytes: int) -> dict[str, Any]:
        return {"max_size": capacity_bytes}


@pytest.mark.parametrize("listed", _KNOWN_FAILURES)
def test_listed_checks_exist(listed: str) -> None:
    assert callable(getattr(BackendConformance, listed.partition("[")[0]))


def test_wrong_layout_really_reads_wrong_bytes(tmp_path: Path) -> None:
    """One listed difference looked at closely: the read succeeds, with another page's bytes."""
    keys = page_keys(1)
    writer, reader = mha_pool(PoolShape("page_first", pages=2)), mha_pool(PoolShape("layer_first", pages=2))
    fill_like_kv(writer, 1)
    backend = HiCacheFile(storage_config(), str(tmp_path))
    assert DIALECTS["generic"].put(backend, writer, keys, [0]) == [True]
    assert DIALECTS["generic"].get(backend, reader, keys, [0]) == [True]
    assert page_bytes(reader, 0) != page_bytes(writer, 0)
