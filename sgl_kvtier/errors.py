"""Every error the project raises on purpose derives from :class:`KVTierError`.

Inside a backend call none of them leaves the backend: they are logged once, counted, and answered as a miss.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of all errors raised by ``sgl_kvtier``."""


class ConfigError(KVTierError):
    """A configuration value is unknown, of the wrong type, or impossible; the message names the key."""


class StoreError(KVTierError):
    """The store directory cannot be used: permissions, ownership, space, or a foreign or newer format."""


class DamagedError(StoreError):
    """A file of the store is damaged beyond use. Whoever owns it repairs or deletes it."""


class StoreFullError(StoreError):
    """No slot can be had for a record: the budget is spent and nothing of ours may be evicted."""


class RecordError(KVTierError):
    """A stored record is not the one asked for, or its bytes are damaged. The reader answers a miss."""


class GeometryError(KVTierError):
    """A host pool has a layout or a shape that pages cannot be taken from."""
