"""What differs between SGLang versions, in one place: imports that moved, fields that came later."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from sgl_kvtier import plugin
from sgl_kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

#: Server settings that change the bytes of KV under equal weights.
_KV_SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "json_model_override_args",
    "revision",
    "quantization_param_path",
)

_MISSING = object()


def _lookup(*paths: str) -> Any:
    """The first of several ``module:attribute`` paths that exists, else None."""
    for path in paths:
        module, _, attribute = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute, _MISSING)
        except ImportError:
            continue
        if found is not _MISSING:
            return found
    return None


def storage_metrics_type() -> Any:
    """SGLang's ``StorageMetrics`` class, or None in versions without it."""
    return _lookup(
        "sglang.srt.observability.metrics_collector:StorageMetrics",
        "sglang.srt.metrics.collector:StorageMetrics",
    )


def kv_pool_name() -> Any:
    """The main pool's name as SGLang writes it in results."""
    names = _lookup("sglang.srt.mem_cache.hicache_storage:PoolName")
    return names.KV if names is not None else "kv"


def pool_result(pages: int, hits: dict[Any, int], restorable: list[int]) -> Any:
    """A ``PoolTransferResult``; versions before restorable prefixes get it without them."""
    result = _lookup("sglang.srt.mem_cache.hicache_storage:PoolTransferResult")
    if "restorable_prefix_pages" in getattr(result, "__dataclass_fields__", {}):
        return result(pages, hits, restorable)
    return result(pages, hits)


def is_dynamic(storage_config: Any) -> bool:
    """Whether the backend was named by module and class, as versions before the plugin framework need it."""
    return "module_path" in (storage_config.extra_config or {})


def check_hooks() -> None:
    """Check that all of the plugin's hooks are in effect.

    Raises:
        ConfigError: One is not; the message says which and what to do.
    """
    missing = plugin.missing_hooks()
    if missing:
        raise ConfigError(
            f"SGLang did not apply the plugin hook on {missing[0]}; this version of SGLang may have renamed it. "
            "Use --hicache-storage-backend dynamic with module_path, class_name and interface_v1 instead"
        )


def zero_copy(storage_config: Any) -> bool:
    """Whether SGLang hands over indices into the host pool (v1) rather than copies of pages."""
    if is_dynamic(storage_config):
        return bool(storage_config.extra_config.get("interface_v1", 0))
    return not plugin.missing_hooks()


def model_settings() -> tuple[str | None, str]:
    """Local path (or name) of the served model, and a text of the settings that change its KV bytes."""
    args = _server_args()
    if args is None:
        return None, ""
    variant = ";".join(f"{name}={getattr(args, name, None)}" for name in _KV_SETTINGS)
    return _local_model(getattr(args, "model_path", None), getattr(args, "revision", None)), variant


def _server_args() -> Any:
    for path in ("sglang.srt.runtime_context:get_server_args", "sglang.srt.server_args:get_global_server_args"):
        function = _lookup(path)
        if function is None:
            continue
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - raised as it likes where none are set, as in unit tests
            logger.debug("no server arguments from %s: %s", path, error)
    return None


def _local_model(model_path: str | None, revision: str | None) -> str | None:
    """The folder of a model; a hub name is looked up in the local hub cache, without the network."""
    if not model_path or os.path.exists(model_path):
        return model_path
    download = _lookup("huggingface_hub:snapshot_download")
    if download is None:
        return model_path
    try:
        return str(download(model_path, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - not cached, or no hub name at all: the name alone identifies it
        logger.debug("model %s is not in the local hub cache: %s", model_path, error)
        return model_path
