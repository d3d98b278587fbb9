"""Stand-in for SGLang's compiled kernels; only ``kvcacheio`` works. See README.md one level up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.10"


def missing(module: str, name: str) -> Callable[..., NoReturn]:
    """A function that says what is missing when it is called."""

    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{module}.{name} needs SGLang's compiled kernels, which this machine does not have")

    call.__name__ = name
    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(__name__, name)
