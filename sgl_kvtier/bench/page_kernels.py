"""Speed of the page kernels over memcpy of the same bytes, on one core, in the same run.

Each case walks over the pages of a host pool larger than the caches (``cold``) or over one page (``hot``). Kernel and
memcpy alternate, walk by walk, so that both see the same noise; the figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from sgl_kvtier.page import PageMap, PageView, PartGeometry, Words, host_part, part_geometry, word_type

#: Larger than the last-level caches of current servers' sockets, per core that runs this.
_COLD_POOL_BYTES = 512 << 20

#: A rank with 8 KV heads of 128; layers follow from the page size. 64-token pages from 1 MiB on, else 16.
_HEADS, _DIM = 8, 128

_DTYPES = {"bf16": ("bfloat16", 2), "fp16": ("float16", 2), "fp32": ("float32", 4), "fp8": ("float8_e4m3fn", 1)}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case. ``gb_s`` counts raw page bytes, 10^9 a second; memcpy copies as many, read once and written once."""

    layout: str
    dtype: str
    page_bytes: int
    cache: str
    op: str
    gb_s: float
    memcpy_gb_s: float
    over_memcpy: float


def run(
    page_bytes: Sequence[int], layouts: Sequence[str], dtypes: Sequence[str], seconds_per_case: float, seed: int
) -> list[Row]:
    """Measure split, merge, gather and scatter for every combination.

    Raises:
        ValueError: Unknown dtype, or a page too small for one layer.
        GeometryError: Unknown layout.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r} is not known; known: {', '.join(_DTYPES)}")
        noise = rng.integers(0, 256, _COLD_POOL_BYTES, dtype=np.uint8)
        for size in page_bytes:
            geometry = _geometry(size, *_DTYPES[dtype])
            for layout in layouts:
                for cache, pool_bytes in (("cold", _COLD_POOL_BYTES), ("hot", 2 * geometry.nbytes)):
                    words = noise[: pool_bytes // geometry.nbytes * geometry.nbytes].view(word_type(geometry))
                    pages = _pages(layout, geometry, words)
                    rows += _measure(layout, dtype, cache, pages, words, seconds_per_case)
    return rows


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, and the lowest ratio of the bf16 split and merge on pages of 256 KiB and more."""
    table = Table()
    for title in ("layout", "dtype", "page", "cache", "op", "GB/s", "memcpy", "over memcpy"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(
            row.layout,
            row.dtype,
            f"{row.page_bytes / 1024:.0f} KiB",
            row.cache,
            row.op,
            f"{row.gb_s:.1f}",
            f"{row.memcpy_gb_s:.1f}",
            f"{row.over_memcpy:.2f}",
        )
    console.print(table)
    judged = [
        row
        for row in rows
        if row.dtype == "bf16" and row.page_bytes >= 256 << 10 and row.cache == "cold" and row.op in ("split", "merge")
    ]
    if judged:
        worst = min(judged, key=lambda row: row.over_memcpy)
        console.print(
            f"lowest over memcpy, bf16 split and merge, pages of 256 KiB and more, cold: {worst.over_memcpy:.2f} "
            f"({worst.op}, {worst.layout}, {worst.page_bytes >> 10} KiB)"
        )


def _geometry(page_bytes: int, dtype: str, item_bytes: int) -> PartGeometry:
    """K or V of a page of about ``page_bytes``, both together."""
    tokens = 64 if page_bytes >= 1 << 20 else 16
    layers = page_bytes // (2 * tokens * _HEADS * _DIM * item_bytes)
    if layers < 1:
        raise ValueError(
            f"page of {page_bytes} bytes: {tokens} tokens of one layer take {2 * tokens * _HEADS * _DIM * item_bytes}"
        )
    return part_geometry("k", tokens, layers, _HEADS, _DIM, dtype, item_bytes)


def _pages(layout: str, geometry: PartGeometry, words: Words) -> list[PageView]:
    """All pages of a pool that fills ``words``, K in the first half and V in the second."""
    half = words.size // 2
    tokens = half // (geometry.words // geometry.tokens) // geometry.tokens * geometry.tokens
    parts = [host_part(layout, geometry, words, base, tokens) for base in (0, half)]
    pool = PageMap(parts, tokens)
    return [pool.page(first) for first in range(0, tokens, geometry.tokens)]


def _measure(layout: str, dtype: str, cache: str, pages: Sequence[PageView], words: Words, seconds: float) -> list[Row]:
    page = pages[0]
    coded, raw = np.empty(page.coded_bytes, np.uint8), np.empty(page.plane_bytes, np.uint8)
    canonical = np.empty(page.nbytes, np.uint8)
    flat = words.view(np.uint8)
    copies = [flat[i * page.nbytes : (i + 1) * page.nbytes] for i in range(len(pages))]
    # Merging and scattering what was split and gathered leaves the pool's content as it is.
    reads: dict[str, Callable[[PageView], None]] = {
        "split": lambda p: p.split(coded, raw),
        "gather": lambda p: p.gather(canonical),
    }
    writes: dict[str, Callable[[PageView], None]] = {
        "merge": lambda p: p.merge(coded, raw),
        "scatter": lambda p: p.scatter(canonical),
    }
    rows = []
    for op, kernel in (reads | writes).items():

        def copy(number: int, *, reading: bool = op in reads) -> None:
            if reading:
                np.copyto(canonical, copies[number])
            else:
                np.copyto(copies[number], canonical)

        def run_kernel(number: int, kernel: Callable[[PageView], None] = kernel) -> None:
            kernel(pages[number])

        rate, memcpy = _alternate(run_kernel, copy, len(pages), page.nbytes, seconds)
        rows.append(
            Row(
                layout=layout,
                dtype=dtype,
                page_bytes=page.nbytes,
                cache=cache,
                op=op,
                gb_s=rate,
                memcpy_gb_s=memcpy,
                over_memcpy=rate / memcpy,
            )
        )
    return rows


def _alternate(
    kernel: Callable[[int], None], memcpy: Callable[[int], None], pages: int, page_bytes: int, seconds: float
) -> tuple[float, float]:
    """Median GB/s of both, called with the number of a page, over walks through the pool that take turns."""
    # A walk over few pages is too short to time: repeat it.
    repeats = max(1, (8 << 20) // (page_bytes * pages))
    kernel(0)
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < deadline:
        for taken, step in zip(times, (kernel, memcpy), strict=True):
            started = time.perf_counter()
            for _ in range(repeats):
                for number in range(pages):
                    step(number)
            taken.append(time.perf_counter() - started)
    rate, copy_rate = (page_bytes * pages * repeats / statistics.median(taken) / 1e9 for taken in times)
    return rate, copy_rate
