"""Free slots by size."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvtier.store.segment import Segment

#: A record may take a slot this much larger than its own class before another segment is opened for it.
_FIT_SLACK = 1 / 64


class SlotPool:
    """Void slots of owned segments, by slot size."""

    def __init__(self) -> None:
        """An empty pool."""
        self._free: dict[int, dict[Segment, list[int]]] = {}
        #: Size of all free slots in bytes.
        self.free_bytes = 0

    @staticmethod
    def fits(wanted_bytes: int, slot_bytes: int) -> bool:
        """Whether a record of class ``wanted_bytes`` may be placed in a slot of ``slot_bytes``."""
        return wanted_bytes <= slot_bytes <= wanted_bytes * (1 + _FIT_SLACK)

    def give(self, segment: Segment, slots: Sequence[int]) -> None:
        """Add void slots."""
        if slots:
            segment.used[slots] = False
            self.free_bytes += segment.header.slot_bytes * len(slots)
            # Taken from the end: neighbours are handed out in rising order, so that a chain lies in one piece.
            self._free.setdefault(segment.header.slot_bytes, {}).setdefault(segment, []).extend(
                sorted(slots, reverse=True)
            )

    def take(self, wanted_bytes: int) -> tuple[Segment, int] | None:
        """The smallest fitting slot, taken out; None when there is none."""
        size = min((size for size in self._free if self.fits(wanted_bytes, size)), default=None)
        return self.take_exactly(size) if size is not None else None

    def take_exactly(self, size: int) -> tuple[Segment, int] | None:
        """A slot of ``size`` bytes, taken out; None when there is none."""
        by_segment = self._free.get(size)
        if by_segment is None:
            return None
        segment, slots = next(iter(by_segment.items()))
        slot = slots.pop()
        self.free_bytes -= size
        if not slots:
            del by_segment[segment]
            if not by_segment:
                del self._free[size]
        return segment, slot

    def withdraw(self, segment: Segment, slot: int) -> None:
        """Take one slot out of the pool, if it is there."""
        size = segment.header.slot_bytes
        slots = self._free.get(size, {}).get(segment, [])
        if slot in slots:
            slots.remove(slot)
            self.free_bytes -= size
            if not slots:
                del self._free[size][segment]
                if not self._free[size]:
                    del self._free[size]

    def forget(self, segment: Segment) -> None:
        """Remove all slots of ``segment``."""
        size = segment.header.slot_bytes
        by_segment = self._free.get(size)
        if by_segment is not None:
            self.free_bytes -= size * len(by_segment.pop(segment, ()))
            if not by_segment:
                del self._free[size]

    def clear(self) -> None:
        """Remove all slots."""
        self._free.clear()
        self.free_bytes = 0
