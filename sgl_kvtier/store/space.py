"""Free slots by size, and which used slots to give up first."""

from __future__ import annotations

import numpy as np

from sgl_kvtier.store.segment import Segment

#: A record may take a slot this much larger than its own class before another segment is opened for it.
_FIT_SLACK = 1 / 64

#: Eviction frees a small batch at a time: scanning the last uses costs the same for one victim as for many.
_BATCH_FRACTION = 1 / 128
_BATCH_LIMIT = 64


class SlotPool:
    """Void slots of owned segments, by slot size."""

    def __init__(self) -> None:
        """An empty pool."""
        self._free: dict[int, list[tuple[Segment, int]]] = {}

    @staticmethod
    def fits(wanted_bytes: int, slot_bytes: int) -> bool:
        """Whether a record of class ``wanted_bytes`` may be placed in a slot of ``slot_bytes``."""
        return wanted_bytes <= slot_bytes <= wanted_bytes * (1 + _FIT_SLACK)

    def give(self, segment: Segment, slot: int) -> None:
        """Add a void slot."""
        segment.used[slot] = False
        self._free.setdefault(segment.header.slot_bytes, []).append((segment, slot))

    def take(self, wanted_bytes: int) -> tuple[Segment, int] | None:
        """The smallest fitting slot, taken out; None when there is none."""
        fitting = [size for size, slots in self._free.items() if slots and self.fits(wanted_bytes, size)]
        return self._free[min(fitting)].pop() if fitting else None

    def forget(self, segment: Segment) -> None:
        """Remove all slots of ``segment``."""
        size = segment.header.slot_bytes
        if size in self._free:
            self._free[size] = [item for item in self._free[size] if item[0] is not segment]

    def clear(self) -> None:
        """Remove all slots."""
        self._free.clear()


def oldest_slots(segments: list[Segment]) -> list[tuple[Segment, int]]:
    """The least recently used slots of ``segments``, oldest first: a small batch, at least one if any is used."""
    if not segments:
        return []
    uses = np.concatenate([segment.last_use_us for segment in segments])
    used = np.flatnonzero(np.concatenate([segment.used for segment in segments]))
    if used.size == 0:
        return []
    count = min(_BATCH_LIMIT, max(1, int(used.size * _BATCH_FRACTION)))
    picked = used[np.argpartition(uses[used], count - 1)[:count]]
    picked = picked[np.argsort(uses[picked], kind="stable")]
    starts = np.cumsum([0] + [segment.header.slot_count for segment in segments])
    owners = np.searchsorted(starts, picked, side="right") - 1
    return [
        (segments[owner], int(index - starts[owner]))
        for owner, index in zip(owners.tolist(), picked.tolist(), strict=True)
    ]
