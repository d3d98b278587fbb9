"""The digest index against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier_kernels.index import DigestIndex, promise
from tests.kernels.strategies import examples

# Mixing wraps around by design; in plain Python, without the compiler, NumPy warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in scalar:RuntimeWarning")

# Few distinct values, in the low bits, in the high bits, and at the ends: chains, wrap-around, equal halves.
_WORDS = st.one_of(
    st.integers(0, 7),
    st.integers(0, 7).map(lambda n: n << 61),
    st.integers((1 << 64) - 4, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
)
_DIGESTS = st.tuples(_WORDS, _WORDS)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "remove if"]), _DIGESTS, st.integers(1, 5)), min_size=1, max_size=80
)


def _array(digests: list[tuple[int, int]]) -> np.ndarray:
    return np.array(digests, np.uint64).reshape(len(digests), 2)


def _locations(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


@examples
@given(_STEPS)
def test_the_index_equals_a_dict(steps: list[tuple[str, tuple[int, int], int]]) -> None:
    index, model = DigestIndex(), {}
    for action, digest, location in steps:
        row = _array([digest])
        if action == "put":
            assert index.put_many(row, _locations([location])).tolist() == [model.get(digest, 0)]
            model[digest] = location
        elif action == "remove":
            assert index.remove_many(row, _locations([0])).tolist() == [model.pop(digest, None) is not None]
        else:
            expected = model.get(digest) == location
            assert index.remove_many(row, _locations([location])).tolist() == [expected]
            if expected:
                del model[digest]
        assert len(index) == len(model)
    asked = list({digest for _, digest, _ in steps})
    assert index.get(_array(asked)).tolist() == [model.get(digest, 0) for digest in asked]
    lows = sorted({low for low, _ in asked} | {3, 1 << 60})
    for low, location in zip(lows, index.get_low(_locations(lows)).tolist(), strict=True):
        assert location in ([where for (known, _), where in model.items() if known == low] or [0])
    digests, locations = index.items()
    assert {(int(a), int(b)): int(c) for (a, b), c in zip(digests, locations, strict=True)} == model


def test_the_index_grows_and_shrinks_without_losing_any() -> None:
    count = 3000
    rng = np.random.default_rng(1)
    digests = rng.integers(0, 1 << 63, (count, 2), np.uint64)
    digests[::3, 0] = 5  # one chain of a thousand
    index = DigestIndex()
    old = index.put_many(digests, np.arange(1, count + 1, dtype=np.uint64))
    assert not old.any()
    assert len(index) == count
    assert index.nbytes / count <= 100
    expected = np.arange(1, count + 1, dtype=np.uint64)
    assert index.remove_many(digests[::2], expected[::2]).all()
    assert len(index) == count // 2
    expected[::2] = 0
    assert np.array_equal(index.get(digests), expected)
    index.clear()
    assert len(index) == 0
    assert not index.get(digests).any()


def test_a_digest_given_twice_counts_once() -> None:
    index = DigestIndex()
    digest = _array([(1, 2)])
    index.put_many(np.repeat(digest, 3, axis=0), np.array([7, 8, 9], np.uint64))
    assert len(index) == 1
    assert index.get(digest).tolist() == [9]


def test_nothing_asked_is_nothing_answered() -> None:
    index = DigestIndex()
    assert index.get(_array([])).size == 0
    assert index.get_low(_locations([])).size == 0
    assert index.remove_many(_array([]), _locations([])).size == 0


def test_location_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="location 0"):
        DigestIndex().put_many(_array([(1, 2)]), _locations([0]))


@pytest.mark.parametrize("leading", [True, False])
def test_promises_are_written_where_the_pages_lie(leading: bool) -> None:
    leases = [np.zeros(count, np.uint32) for count in (4, 3)]
    addresses = _locations([0, *(lease.ctypes.data for lease in leases)])
    slots = _locations([0, *(lease.size for lease in leases)])
    # Two pages, then an absent one, one of a segment that is not known, one past a segment's end, one more page.
    locations = _locations([1 << 32, 2 << 32 | 2, 0, 3 << 32, 2 << 32 | 3, 1 << 32 | 3])
    assert promise(locations, leading, addresses, slots, np.uint32(77)) == 2
    assert leases[0].tolist() == ([77, 0, 0, 0] if leading else [77, 0, 0, 77])
    assert leases[1].tolist() == [0, 0, 77]
    assert promise(locations[:2], leading, addresses, slots, np.uint32(78)) == 2
