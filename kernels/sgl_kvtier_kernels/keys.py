"""Page keys as text to index digests, for a whole batch at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel

KEY_DIGITS = 64

_STRIDE = KEY_DIGITS + 1


@kernel
def parse_hex_keys(text: npt.NDArray[np.uint8], words: npt.NDArray[np.uint64]) -> bool:
    """Parse keys of 64 lower-case hex digits each, joined by one newline.

    Args:
        text: uint8[65 n - 1].
        words: uint64[n, 4], out: the 32 bytes of each key as little-endian words.

    Returns:
        Whether all of ``text`` has that form; if not, ``words`` holds nothing of use.
    """
    nibbles = np.empty(KEY_DIGITS, np.uint8)
    for key in range(words.shape[0]):
        start = key * _STRIDE
        if key and text[start - 1] != 10:
            return False
        bad = False
        for i in range(KEY_DIGITS):
            character = np.int32(text[start + i])
            digit, letter = character - 48, character - 97
            is_digit = (digit >= 0) & (digit < 10)
            bad |= not (is_digit | ((letter >= 0) & (letter < 6)))
            nibbles[i] = np.uint8((digit if is_digit else letter + 10) & 15)
        if bad:
            return False
        for word in range(4):
            value = np.uint64(0)
            for byte in range(8):
                at = word * 16 + byte * 2
                pair = np.uint64(nibbles[at]) << np.uint64(4) | np.uint64(nibbles[at + 1])
                value |= pair << np.uint64(8 * byte)
            words[key, word] = value
    return True


@kernel
def mix_keys(words: npt.NDArray[np.uint64], salt_low: Any, salt_high: Any, digests: npt.NDArray[np.uint64]) -> None:
    """Index digests of keys in a namespace: ``uint64[n, 4]`` to ``uint64[n, 2]``."""
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    for i in range(words.shape[0]):
        digests[i, 0] = words[i, 0] ^ np.uint64(words[i, 2] * multiplier) ^ salt_low
        digests[i, 1] = words[i, 1] ^ np.uint64(words[i, 3] * multiplier) ^ salt_high
