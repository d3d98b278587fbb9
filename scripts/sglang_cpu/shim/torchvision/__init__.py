"""Stand-in for torchvision; see README.md one level up."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_cpu_shim import stand_in

__version__ = "0.0.0+standin"

stand_in.install(__name__)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
