"""One typed configuration object, from SGLang's extra config, the environment, or a file.

Precedence, highest first: the extra config JSON given to SGLang, environment variables
``SGL_KVTIER_<KEY>``, the file named by the key ``config_file`` (or ``SGL_KVTIER_CONFIG``), the defaults.
An unknown key, a wrong type or an impossible value raises :class:`ConfigError` naming the key.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sgl_kvtier.errors import ConfigError

ENV_PREFIX = "SGL_KVTIER_"

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

#: A store that is given no capacity takes half of the space it finds, and never more than this.
AUTO_CAPACITY_LIMIT_BYTES = 100 * GIB

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40,
    "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

#: Keys of SGLang's own that share the extra config with ours.
_SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)

CodecName = Literal["zstd", "raw"]
ZstdLevel = Annotated[int, msgspec.Meta(ge=1, le=19)]
Durability = Literal["none", "interval", "strict"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]
Size = int | str

#: Threads that encode and decode when none are configured; beyond that, other parts of the server need the cores.
AUTO_THREADS_LIMIT = 4


#: Keys whose value is a number: variables of the environment are text.
_NUMBERS: dict[str, type[int] | type[float]] = {
    "zstd_level": int,
    "threads": int,
    "durability_interval": float,
    "lease": float,
    "deadline": float,
    "high_watermark": float,
    "low_watermark": float,
}

_SHORTEST_INTERVAL_S = 0.1


def default_directory() -> str:
    """The store's folder when none is configured: ``$XDG_CACHE_HOME/sgl_kvtier/store``."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "sgl_kvtier", "store")


class _Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys as a user writes them; sizes are numbers of bytes or strings such as ``"64GiB"``."""

    directory: str = msgspec.field(default_factory=default_directory)
    capacity: Size = "auto"
    segment_size: Size = "256MiB"
    min_free: Size = "1GiB"
    codec: CodecName = "zstd"
    zstd_level: ZstdLevel = 1
    model_id: str | None = None
    durability: Durability = "none"
    durability_interval: Seconds = 5.0
    threads: Threads | None = None
    lease: Seconds = 30.0
    deadline: Seconds = 0.0
    high_watermark: Fraction = 0.99
    low_watermark: Fraction = 0.98
    scrub_rate: Size = "16MiB"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the tier runs with.

    Attributes:
        directory: Absolute path of the store's folder.
        capacity_bytes: Cap over everything all processes keep in ``directory``; ``None`` lets the store
            choose half of the space it finds, at most :data:`AUTO_CAPACITY_LIMIT_BYTES`.
        segment_bytes: Size of one segment's data file; smaller when ``capacity_bytes`` holds few of them.
        min_free_bytes: Space on the file system that the store leaves to others.
        codec: Codec of newly written pages. Reading understands every codec.
        zstd_level: zstd compression level of the coded plane; levels above 1 cost time and gain little.
        model_id: Name of the weights in page identities, in place of the model path's fingerprint.
        durability: What acknowledged pages survive: ``none``: the death of the process; ``interval``: a power loss too,
            but for those of the last ``durability_interval_s`` seconds; ``strict``: a power loss.
        durability_interval_s: Seconds from one sync to the next under ``interval``.
        threads: Threads that work on one batch at a time, the calling one included.
        lease_s: For how many seconds eviction leaves alone the pages that an exists call reported; 0 for not at all.
        deadline_s: After how many seconds a batch read returns the pages it has, from the first on; 0 for never.
        high_watermark, low_watermark: Shares of this process's slots that are in use when eviction begins, and ends.
        scrub_bytes_s: Bytes of stored records that are read and checked per second; 0 for none.
    """

    directory: str
    capacity_bytes: int | None
    segment_bytes: int
    min_free_bytes: int
    codec: CodecName
    zstd_level: int
    model_id: str | None
    durability: Durability
    durability_interval_s: float
    threads: int
    lease_s: float
    deadline_s: float
    high_watermark: float
    low_watermark: float
    scrub_bytes_s: int


def accepted_keys() -> tuple[str, ...]:
    """The configuration keys a user may set."""
    return (*_Given.__struct_fields__, "config_file")


def parse_size(key: str, value: int | str) -> int:
    """Number of bytes in ``value``: an int, or a string such as ``"512MiB"``, ``"1.5GB"``, ``"4096"``.

    Raises:
        ConfigError: Not a size, or negative.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match.group(2).upper()) if match else None
        if match is None or unit is None:
            raise ConfigError(
                f"{key}: {value!r} is not a size; write bytes as a number or with a unit, such as '64GiB' or '500MB'"
            )
        return int(float(match.group(1)) * unit)
    if value < 0:
        raise ConfigError(f"{key}: {value} is negative; a size is a number of bytes of 0 or more")
    return value


def load_config(extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> TierConfig:
    """Merge extra config, environment and file into a checked :class:`TierConfig`.

    Args:
        extra_config: SGLang's ``--hicache-storage-backend-extra-config``, as a mapping.
        environ: The environment; the process's own when None.

    Raises:
        ConfigError: Unknown key, wrong type, impossible value, or unreadable file.
    """
    environ = os.environ if environ is None else environ
    given = {k: v for k, v in (extra_config or {}).items() if k not in _SGLANG_KEYS}
    file_path = given.pop("config_file", None) or environ.get(ENV_PREFIX + "CONFIG")
    merged: dict[str, Any] = {}
    if file_path is not None:
        merged.update(_checked(_read_file(file_path), f"config file {file_path}"))
    merged.update(_from_environment(environ))
    merged.update(_checked(given, "extra config"))
    return _resolve(_convert(merged, "configuration"))


def _resolve(given: _Given) -> TierConfig:
    if not given.directory:
        raise ConfigError("directory: must not be empty; name a folder on a local disk")
    segment_bytes = parse_size("segment_size", given.segment_size)
    if not MIB <= segment_bytes <= 16 * GIB:
        raise ConfigError(f"segment_size: {given.segment_size!r} is outside 1MiB to 16GiB")
    capacity_bytes = None if given.capacity == "auto" else parse_size("capacity", given.capacity)
    if capacity_bytes is not None and capacity_bytes < 4 * MIB:
        raise ConfigError(f"capacity: {given.capacity!r} is less than the smallest store of 4MiB; or write 'auto'")
    if given.model_id == "":
        raise ConfigError("model_id: must not be empty; leave it out to use the model's own fingerprint")
    if given.low_watermark > given.high_watermark:
        raise ConfigError(
            f"low_watermark: {given.low_watermark} is above high_watermark, {given.high_watermark}: "
            "eviction ends at the low one"
        )
    if given.durability == "interval" and given.durability_interval < _SHORTEST_INTERVAL_S:
        raise ConfigError(
            f"durability_interval: {given.durability_interval} is below {_SHORTEST_INTERVAL_S} seconds; "
            "for pages that are durable at once, set durability to 'strict'"
        )
    return TierConfig(
        directory=os.path.abspath(os.path.expanduser(given.directory)),
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        min_free_bytes=parse_size("min_free", given.min_free),
        codec=given.codec,
        zstd_level=given.zstd_level,
        model_id=given.model_id,
        durability=given.durability,
        durability_interval_s=given.durability_interval,
        threads=given.threads or min(AUTO_THREADS_LIMIT, len(os.sched_getaffinity(0))),
        lease_s=given.lease,
        deadline_s=given.deadline,
        high_watermark=given.high_watermark,
        low_watermark=given.low_watermark,
        scrub_bytes_s=parse_size("scrub_rate", given.scrub_rate),
    )


def _checked(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The same values, after the whole of them passed the type check under ``origin``'s name."""
    _convert(dict(values), origin)
    return dict(values)


def _convert(values: dict[str, Any], origin: str) -> _Given:
    unknown = sorted(set(values) - set(_Given.__struct_fields__))
    if unknown:
        raise ConfigError(f"{origin}: unknown key {unknown[0]!r}; accepted keys: {', '.join(accepted_keys())}")
    try:
        return msgspec.convert(values, _Given)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("`$.")[2].rstrip("`") or "value"
        shown = f" (given: {values[key]!r})" if key in values else ""
        raise ConfigError(f"{origin}: {key}: {error}{shown}") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in _Given.__struct_fields__:
        name = ENV_PREFIX + key.upper()
        text = environ.get(name)
        if text is None:
            continue
        kind = _NUMBERS.get(key)
        try:
            values[key] = text if kind is None else kind(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {text!r} is not a number") from error
    _convert(values, "environment")
    return values


def _read_file(path: object) -> dict[str, Any]:
    if not isinstance(path, str):
        raise ConfigError(f"config_file: expected a path as a string, got {path!r}")
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"config_file: cannot read {path!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config_file: {path!r} is neither JSON nor (by its suffix) TOML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config_file: {path!r} must hold a table of keys, not {type(values).__name__}")
    return values
