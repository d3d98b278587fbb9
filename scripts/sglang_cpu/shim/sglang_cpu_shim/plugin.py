"""``sglang.srt.plugins`` entry point: what HiCache lacks without a GPU.

The host pools import their copy kernels only where there is a GPU, and always ask for pinned memory. For MLA models
SGLang takes its torch attention, which it does not know there, through the path that needs expanded keys.
"""

from __future__ import annotations

import importlib
from typing import Any

_POOL_MODULES = ("mha", "mla", "mamba", "dsa", "unified")


def _without_pinning(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs["pin_memory"] = False
    return args, kwargs


def load() -> None:
    """Give the host pools their copies in torch, switch pinning off, and let torch attention read latents.

    Does nothing where SGLang has a GPU.
    """
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    import sgl_kernel.kvcacheio as copies
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in _POOL_MODULES:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for copy in (attribute for attribute in dir(copies) if attribute.startswith("transfer_kv")):
            if not hasattr(module, copy):
                setattr(module, copy, getattr(copies, copy))
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _without_pinning, HookType.BEFORE)
    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)
