"""Brute-force answers to ``batch_exists_v2``, from SGLang's description of hit policies alone."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple


class Restorable(NamedTuple):
    """What ``batch_exists_v2`` must answer: pages to restore, each pool's own verdict, every possible prefix."""

    pages: int
    hits: dict[Any, int]
    prefixes: list[int]


def restorable(keys: Sequence[str], kv: Set[str], transfers: Sequence[Any], stored: dict[Any, Set[str]]) -> Restorable:
    """Try every prefix length of ``keys`` against every pool.

    Args:
        keys: The chain's page keys.
        kv: Keys stored in the main pool.
        transfers: ``PoolTransfer`` of the gating pools: ALL_PAGES or TRAILING_PAGES.
        stored: Keys stored in each of those pools, by pool name.
    """
    kv_prefixes = [n for n in range(1, len(keys) + 1) if all(key in kv for key in keys[:n])]
    prefixes = list(kv_prefixes)
    hits: dict[Any, int] = {"kv": kv_prefixes[-1]} if kv_prefixes else {}
    for transfer in transfers:
        if not prefixes:
            break  # nothing is left to restrict, and SGLang reports no verdict of the pools that follow
        present = stored[transfer.name]
        own = []
        for length in kv_prefixes:
            if transfer.hit_policy.value == "all_pages":
                needed = list(keys[:length])
            else:
                window = max(1, len(transfer.keys or ()))
                needed = list(keys[max(0, length - window) : length])
            if all(key in present for key in needed):
                own.append(length)
        if own:
            hits[transfer.name] = own[-1]
        prefixes = [length for length in prefixes if length in own]
    return Restorable(prefixes[-1] if prefixes else 0, hits, prefixes)
