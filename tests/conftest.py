"""Which test groups run: the core everywhere, the SGLang groups where SGLang is installed.

Under CI (``CI=true``) nothing may be left out: a missing group is an error there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_SHIM = _HERE.parent / "scripts" / "sglang_cpu" / "shim"

#: Folders whose tests run SGLang itself, in process or as a server.
_SGLANG_FOLDERS = ("conformance", "hostpool", "radix", "sglang")
_HOW_TO = "run scripts/test.sh, which installs SGLang for the CPU and runs everything"

_has_sglang = importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("torch") is not None

collect_ignore = [] if _has_sglang else [str(_HERE / folder) for folder in _SGLANG_FOLDERS]


def pytest_configure(config: pytest.Config) -> None:
    """Put the stand-ins for SGLang's GPU-only dependencies on the path before SGLang is imported."""
    if not _has_sglang:
        if os.environ.get("CI"):
            raise pytest.UsageError(f"CI must leave nothing out, but SGLang is not installed: {_HOW_TO}")
        return
    if importlib.util.find_spec("triton") is None:
        sys.path.insert(0, str(_SHIM))
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to have it."""
    if not _has_sglang:
        folders = ", ".join(f"tests/{folder}" for folder in _SGLANG_FOLDERS)
        terminalreporter.write_line(f"left out, as SGLang is not installed: {folders}; {_HOW_TO}", yellow=True)
