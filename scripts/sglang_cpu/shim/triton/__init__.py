"""Stand-in for triton; see README.md one level up."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_cpu_shim import stand_in

__version__ = "3.8.0"

stand_in.install(__name__)


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b``."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


Config = stand_in.stand_in_class("Config", __name__)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[:1].isupper():
        return stand_in.stand_in_class(name, __name__)
    return importlib.import_module(f"{__name__}.{name}")
