"""Pages: their geometry, their canonical order, and views of them in a host pool of any layout.

A page is the KV of ``page_tokens`` consecutive tokens, all layers, of one rank. It consists of parts (K and V,
or MLA's latent), and each part has ONE canonical order, whatever the host pool's layout::

    part = words[token, layer, head, dim]         C order, the order of SGLang's ``page_first`` layout
    page = part 0, part 1, ...                    one after the other

A part inside a host pool is the same four axes with other strides; ``dim`` is contiguous in every layout. So a
page is described without copying it, and the kernels read and write host memory in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sgl_kvtier.errors import GeometryError
from sgl_kvtier_kernels import layout as layout_kernels
from sgl_kvtier_kernels import planes
from sgl_kvtier_kernels.layout import PagePlan

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

#: Element types with a plane split of their own. Every other type is handled as bytes.
_SPLIT_KINDS = {"bfloat16": planes.BF16, "float16": planes.FP16, "float32": planes.FP32}
_WORD_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}

LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head", "page_first_kv_split")


class PartGeometry(msgspec.Struct, frozen=True):
    """Shape of one part of a page in canonical order.

    Attributes:
        name: ``"k"``, ``"v"``, ``"kv"`` (MLA), or a name of an opaque run.
        tokens, layers, heads, dim: Lengths of the four canonical axes, in words.
        dtype: Logical element type, such as ``"bfloat16"`` or ``"float8_e4m3fn"``.
        word_bytes: Size of a stored word; 1 for types that are handled as bytes.
    """

    name: str
    tokens: int
    layers: int
    heads: int
    dim: int
    dtype: str
    word_bytes: int

    @property
    def words(self) -> int:
        """Number of words in the part."""
        return self.tokens * self.layers * self.heads * self.dim

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return self.words * self.word_bytes

    @property
    def kind(self) -> int:
        """Plane split of the part: one of the constants of ``sgl_kvtier_kernels.planes``."""
        return _SPLIT_KINDS.get(self.dtype, planes.BYTES)


def part_geometry(
    name: str, tokens: int, layers: int, heads: int, dim: int, dtype: str, item_bytes: int
) -> PartGeometry:
    """A part of ``dim`` elements of ``item_bytes`` bytes; types without a plane split become bytes.

    Raises:
        GeometryError: An axis is empty.
    """
    if min(tokens, layers, heads, dim) < 1:
        raise GeometryError(
            f"part {name!r}: empty axis in (tokens={tokens}, layers={layers}, heads={heads}, dim={dim})"
        )
    if dtype in _SPLIT_KINDS:
        return PartGeometry(name, tokens, layers, heads, dim, dtype, item_bytes)
    return PartGeometry(name, tokens, layers, heads, dim * item_bytes, dtype, 1)


class PageGeometry(msgspec.Struct, frozen=True):
    """Shape of a whole page: its parts in order."""

    page_tokens: int
    parts: tuple[PartGeometry, ...]

    @property
    def nbytes(self) -> int:
        """Size of a page in bytes."""
        return sum(part.nbytes for part in self.parts)

    def __str__(self) -> str:
        """One short line for logs."""
        shown = ", ".join(f"{p.name}[{p.layers}x{p.heads}x{p.dim}] {p.dtype}" for p in self.parts)
        return f"{self.page_tokens} tokens of {shown} = {self.nbytes} bytes"


class HostPart(NamedTuple):
    """Where a part of every page lies in a host pool.

    Attributes:
        geometry: The part's shape.
        words: The whole host buffer as a flat array of words.
        base: Index of the word at token 0.
        token_stride: Words from one token index of the pool to the next, for the start of a page.
        strides: Words between neighbours along (token, layer, head) inside a page.
    """

    geometry: PartGeometry
    words: Words
    base: int
    token_stride: int
    strides: tuple[int, int, int]

    def heads(self, first: int, count: int) -> HostPart:
        """The same part, cut down to ``count`` heads from ``first`` on."""
        geometry = msgspec.structs.replace(self.geometry, heads=count)
        return self._replace(geometry=geometry, base=self.base + first * self.strides[2])


def host_part(layout: str, geometry: PartGeometry, words: Words, base: int, pool_tokens: int) -> HostPart:
    """Map one part of a host pool in one of SGLang's layouts.

    Args:
        layout: ``layer_first`` [L, T, H, D], ``page_first`` [T, L, H, D], ``page_first_direct`` and
            ``page_first_kv_split`` [pages, L, P, H, D], ``page_head`` [pages, H, P, L, D].
        geometry: Shape of the part; ``tokens`` is the page size P.
        words: The whole buffer, flat.
        base: Index of the part's first word in the buffer.
        pool_tokens: Length T of the pool's token axis.

    Raises:
        GeometryError: Unknown layout, or a buffer shorter than the pool.
    """
    p, l, h, d = geometry.tokens, geometry.layers, geometry.heads, geometry.dim  # noqa: E741 - axis names
    row = h * d
    if layout == "layer_first":
        token_stride, strides = row, (row, pool_tokens * row, d)
    elif layout == "page_first":
        token_stride, strides = l * row, (l * row, row, d)
    elif layout in ("page_first_direct", "page_first_kv_split"):
        token_stride, strides = l * row, (row, p * row, d)
    elif layout == "page_head":
        token_stride, strides = l * row, (l * d, d, p * l * d)
    else:
        raise GeometryError(f"host layout {layout!r} is not known; known: {', '.join(LAYOUTS)}")
    if words.ndim != 1 or base < 0 or base + pool_tokens * l * row > words.size:
        raise GeometryError(
            f"part {geometry.name!r}: the buffer holds {words.size} words, "
            f"but {pool_tokens} tokens from word {base} need {pool_tokens * l * row}"
        )
    return HostPart(geometry, words, base, token_stride, strides)


class _Run(NamedTuple):
    """Consecutive parts of a page that lie in one buffer and split alike: one kernel call handles them."""

    plan: PagePlan
    kind: int
    #: Size in bytes of the run's coded plane, and of its words.
    coded_bytes: int
    nbytes: int


class PageMap:
    """The pages of a pool, compiled for the kernels: what turns a first token into a :class:`PageView`."""

    def __init__(self, parts: Sequence[HostPart], pool_tokens: int) -> None:
        """Compile the pages of a pool of ``pool_tokens`` tokens that consist of ``parts``.

        Raises:
            GeometryError: A page reaches outside its buffer.
        """
        self.parts = tuple(parts)
        self.page_tokens = parts[0].geometry.tokens
        self._last_first_token = pool_tokens - self.page_tokens
        self._runs = tuple(self._compile())
        self.nbytes = sum(run.nbytes for run in self._runs)
        self.coded_bytes = sum(run.coded_bytes for run in self._runs)
        self.coded_parts = tuple(part.geometry.words for part in self.parts)

    def page(self, first_token: int) -> PageView:
        """The page that starts at token index ``first_token`` of the pool.

        Raises:
            GeometryError: No page starts there.
        """
        if not 0 <= first_token <= self._last_first_token or first_token % self.page_tokens:
            raise GeometryError(f"no page starts at token index {first_token} of the host pool")
        return PageView(self, self._runs, first_token)

    def _compile(self) -> Iterator[_Run]:
        def together(part: HostPart) -> tuple[int, int]:
            return id(part.words), part.geometry.kind

        for _, group in itertools.groupby(self.parts, together):
            parts = list(group)
            specs = [
                layout_kernels.HostPart(
                    part.base,
                    part.token_stride,
                    (part.geometry.tokens, part.geometry.layers, part.geometry.heads, part.geometry.dim),
                    part.strides,
                )
                for part in parts
            ]
            try:
                plan = PagePlan(parts[0].words, specs, self._last_first_token)
            except ValueError as error:
                raise GeometryError(str(error)) from error
            yield _Run(plan, parts[0].geometry.kind, plan.page_words, sum(part.geometry.nbytes for part in parts))


class PageView:
    """One page in host memory, as codecs see it: planes or canonical bytes in, planes or canonical bytes out."""

    __slots__ = ("_first", "_runs", "coded_bytes", "coded_parts", "nbytes", "plane_bytes")

    def __init__(self, owner: PageMap, runs: tuple[_Run, ...], first_token: int) -> None:
        """Made by :meth:`PageMap.page`; nothing is copied."""
        self._runs = runs
        self._first = first_token
        #: Size of the page in bytes.
        self.nbytes = owner.nbytes
        #: Size of the plane that an entropy coder gains on, in bytes, and the shares of the parts in it.
        self.coded_bytes = owner.coded_bytes
        self.coded_parts = owner.coded_parts
        #: Size of the plane that is stored as it is, in bytes.
        self.plane_bytes = owner.nbytes - owner.coded_bytes

    def split(self, coded: Bytes, raw: Bytes) -> None:
        """Write the page's planes: ``coded`` uint8[coded_bytes] and ``raw`` uint8[plane_bytes]."""
        for run, run_coded, run_raw in self._planes(coded, raw):
            planes.split(run.kind, run.plan, self._first, run_coded, run_raw)

    def merge(self, coded: Bytes, raw: Bytes) -> None:
        """Inverse of :meth:`split`: put the page together in host memory."""
        for run, run_coded, run_raw in self._planes(coded, raw):
            planes.merge(run.kind, run.plan, self._first, run_coded, run_raw)

    def gather(self, out: Bytes) -> None:
        """Write the page's canonical bytes to ``out``, uint8[nbytes]."""
        start = 0
        for run in self._runs:
            end = start + run.nbytes
            run.plan.gather(self._first, out[start:end].view(run.plan.words.dtype))
            start = end

    def scatter(self, source: Bytes) -> None:
        """Inverse of :meth:`gather`: fill the page in host memory from canonical bytes."""
        start = 0
        for run in self._runs:
            end = start + run.nbytes
            run.plan.scatter(self._first, source[start:end].view(run.plan.words.dtype))
            start = end

    def contiguous_parts(self) -> list[Bytes] | None:
        """The parts' bytes in place, when host memory already holds each in canonical order; else None."""
        views = []
        for run in self._runs:
            parts = run.plan.contiguous_parts(self._first)
            if parts is None:
                return None
            views += [part.view(np.uint8) for part in parts]
        return views

    def _planes(self, coded: Bytes, raw: Bytes) -> list[tuple[_Run, Bytes, Bytes]]:
        if len(self._runs) == 1:
            return [(self._runs[0], coded, raw)]
        found = []
        c = r = 0
        for run in self._runs:
            c_end, r_end = c + run.coded_bytes, r + run.nbytes - run.coded_bytes
            found.append((run, coded[c:c_end], raw[r:r_end]))
            c, r = c_end, r_end
        return found


def flat_page(words: Words, dtype: str) -> PageView:
    """A page given as one flat array whose order is already canonical (or opaque): ``words`` 1-D."""
    if dtype not in _SPLIT_KINDS:
        words = words.view(np.uint8)
    geometry = PartGeometry("flat", 1, 1, 1, words.size, dtype, words.itemsize)
    return runs_page([geometry], [words])


def runs_page(geometries: Sequence[PartGeometry], runs: Sequence[Words]) -> PageView:
    """A page given as one flat array for each of its parts, each in canonical (or opaque) order already."""
    parts = [
        HostPart(geometry, words, 0, words.size, (words.size, words.size, words.size))
        for geometry, words in zip(geometries, runs, strict=True)
    ]
    return PageMap(parts, parts[0].geometry.tokens).page(0)


def word_type(geometry: PartGeometry) -> np.dtype[Any]:
    """The unsigned NumPy type in which the part's words are handled."""
    return _WORD_TYPES[geometry.word_bytes]
