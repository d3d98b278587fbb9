"""SGLang's hit policies: at which prefix lengths a side pool can be restored, given which of its pages are present."""

from __future__ import annotations

from collections.abc import Sequence


def leading_run(present: Sequence[bool]) -> int:
    """How many pages are present before the first that is not."""
    return present.index(False) if False in present else len(present)


def restorable_prefixes(present: Sequence[bool], trailing_pages: int | None) -> set[int]:
    """Prefix lengths, in pages, at which a pool can be restored.

    Args:
        present: Which pages of the span the pool has.
        trailing_pages: ``TRAILING_PAGES``: only so many last pages of a prefix are needed (fewer, if the prefix is
            shorter). None for ``ALL_PAGES``: all of them are.
    """
    if trailing_pages is None:
        return set(range(1, leading_run(present) + 1))
    return {n for n in range(1, len(present) + 1) if all(present[max(0, n - trailing_pages) : n])}


def group_keys(keys: Sequence[str], listed: Sequence[str] | None, block_pages: int, group_pages: int) -> list[str]:
    """Keys of a ``BLOCK_GROUPS`` pool, group after group.

    A block of ``block_pages`` pages of the span ``keys`` has a second form of ``group_pages`` pages in the pool. The
    transfer lists the groups' keys one after the other; without a list, a group is keyed by the last pages of its
    block, whose chained hashes cover the block's tokens.

    Raises:
        ValueError: A block or a group of no pages.
    """
    if block_pages < 1 or group_pages < 1:
        raise ValueError(
            f"BLOCK_GROUPS of {block_pages} pages a block and {group_pages} keys a group; both must be >= 1"
        )
    if listed:
        return list(listed)
    ends = range(block_pages, len(keys) + 1, block_pages)
    return [key for end in ends for key in keys[max(0, end - group_pages) : end]]


def covered_pages(present: Sequence[bool], block_pages: int, group_pages: int) -> int:
    """Pages of the span that the pool's leading complete groups cover."""
    return leading_run(present) // group_pages * block_pages
