"""What the kernels must equal, in plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels import planes
from sgl_kvtier_kernels.layout import HostPart

Words = npt.NDArray[Any]


def strided(words: Words, part: HostPart, first_token: int) -> Words:
    """The part of a page as a view ``[P, L, H, D]`` of the host buffer."""
    start = part.base + first_token * part.token_stride
    item = words.itemsize
    return np.lib.stride_tricks.as_strided(
        words[start:],
        part.shape,
        tuple(stride * item for stride in (*part.strides, 1)),
        writeable=words.flags.writeable,
    )


def canonical(words: Words, parts: Sequence[HostPart], first_token: int) -> list[Words]:
    """The parts of a page in canonical order, flat."""
    return [strided(words, part, first_token).reshape(-1).copy() for part in parts]


def split(kind: int, parts: Sequence[Words]) -> tuple[Words, Words]:
    """Coded and raw plane of canonical parts."""
    coded, raw = [], []
    for words in parts:
        if kind == planes.BF16:
            coded.append(words >> 7 & 0xFF)
            raw.append(words >> 8 & 0x80 | words & 0x7F)
        elif kind == planes.FP16:
            coded.append(words >> 8)
            raw.append(words & 0xFF)
        elif kind == planes.FP32:
            coded.append(words >> 23 & 0xFF)
            raw += [words >> 24 & 0x80 | words >> 16 & 0x7F, words >> 8 & 0xFF, words & 0xFF]
        else:
            coded.append(words)
    empty = [np.empty(0, np.uint8)]
    return tuple(np.concatenate([*empty, *plane]).astype(np.uint8) for plane in (coded, raw))  # type: ignore[return-value]
