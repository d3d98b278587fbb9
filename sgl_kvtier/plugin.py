"""Entry point ``sglang.srt.plugins``: makes ``--hicache-storage-backend sgl_kvtier`` a name like SGLang's own.

SGLang has a fixed list of backend names in three places; a hook on each adds ours:

* the argument parser's choices,
* the factory that constructs registered backends,
* the choice between handing over indices into the host pool (zero-copy) and copies of pages.

SGLang loads plugins in every process before it parses arguments, and only logs a plugin's failures; so the backend
asks :func:`missing_hooks` when it is constructed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "sgl_kvtier"
MODULE = "sgl_kvtier.backend"
CLASS = "KVTierStorage"

_PARSER = "sglang.srt.server_args.ServerArgs.add_cli_args"
_FACTORY = "sglang.srt.mem_cache.storage.StorageBackendFactory._create_builtin_backend"
_ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"


def load() -> None:
    """Register the backend's name and the hooks; SGLang calls it once in each of its processes."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: PLC0415 - only where SGLang runs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    StorageBackendFactory.register_backend(NAME, MODULE, CLASS)
    HookRegistry.register(_PARSER, _add_choice, HookType.AFTER)
    HookRegistry.register(_FACTORY, _create, HookType.AROUND)
    HookRegistry.register(_ATTACH, _use_zero_copy, HookType.AFTER)


def missing_hooks() -> list[str]:
    """Targets of ours that SGLang did not patch in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415 - only where SGLang runs

    return [target for target in (_PARSER, _FACTORY, _ATTACH) if target not in HookRegistry._patched]


def _add_choice(result: Any, parser: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``ServerArgs.add_cli_args(parser)``: one more choice for the backend's flag."""
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None and NAME not in action.choices:
            action.choices = [*action.choices, NAME]
    return result


def _create(
    original: Callable[..., Any], cls: Any, name: str, backend_class: Any, config: Any, pool: Any, *args: Any
) -> Any:
    """Around the factory of built-in backends: construct ours, leave the others to SGLang."""
    if name == NAME:
        return backend_class(config, {"mem_pool_host": pool, "plugin": True})
    return original(cls, name, backend_class, config, pool, *args)


def _use_zero_copy(result: Any, controller: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``HiCacheController.attach_storage_backend``: hand our backend indices, not copies."""
    if controller.storage_backend_type == NAME:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
    return result
