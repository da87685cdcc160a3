"""Host-side free lists: KV pages, request rows and state slots. No device value is ever read here."""

from __future__ import annotations

from collections import deque


class OutOfSlotsError(RuntimeError):
    """A free list is shorter than what was asked for."""


class SlotAllocator:
    """Free list of the numbers 1..total (0 is the dummy). Used for request rows and KDA state slots."""

    def __init__(self, total: int):
        self.total = total
        self._free = deque(range(1, total + 1))
        self._used: set[int] = set()

    @property
    def available(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def alloc(self) -> int:
        """Take one slot; raises :class:`OutOfSlotsError` when none is free."""
        if not self._free:
            raise OutOfSlotsError("no free slot")
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; a slot that is not in use is a bug and raises ``ValueError``."""
        if slot not in self._used:
            raise ValueError(f"slot {slot} is not in use")
        self._used.remove(slot)
        self._free.append(slot)

    @property
    def used(self) -> int:
        """How many slots are taken."""
        return len(self._used)


class TokenToKVPoolAllocator:
    """KV slots in pages of ``page_size`` tokens; page 0's slot 0 is the dummy.

    Page p (from 1) owns slots ``(p-1)*page_size + 1 .. p*page_size``. A request owns whole pages, so the n-th token of
    a request lies in its page ``n // page_size``.
    """

    def __init__(self, num_slots: int, page_size: int):
        self.page_size = page_size
        self._pages = SlotAllocator(num_slots // page_size)

    @property
    def total(self) -> int:
        """Slots that can be handed out."""
        return self._pages.total * self.page_size

    @property
    def available(self) -> int:
        """Free slots."""
        return self._pages.available * self.page_size

    @property
    def used(self) -> int:
        """Slots handed out."""
        return self._pages.used * self.page_size

    def pages_needed(self, allocated: int, target: int) -> int:
        """Pages missing for a request that holds ``allocated`` slots (whole pages) and needs ``target``."""
        return max(0, -(-target // self.page_size) - allocated // self.page_size)

    def alloc_pages(self, count: int) -> list[int]:
        """Slot numbers of ``count`` new pages, in order; all or nothing."""
        if count > self._pages.available:
            raise OutOfSlotsError(f"{count} KV pages wanted, {self._pages.available} free")
        slots: list[int] = []
        for _ in range(count):
            first = (self._pages.alloc() - 1) * self.page_size + 1
            slots.extend(range(first, first + self.page_size))
        return slots

    def free_slots(self, slots: list[int]) -> None:
        """Give back whole pages; ``slots`` is what :meth:`alloc_pages` returned, concatenated."""
        for first in slots[:: self.page_size]:
            self._pages.free((first - 1) // self.page_size + 1)
