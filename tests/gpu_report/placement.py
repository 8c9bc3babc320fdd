"""Where the tensors of one launch lie, what lies around them, and whether it is still there afterwards.

PLAIN            an allocation of exactly the tensor's size, for compute-sanitizer
CANARIES         4 KiB of a pattern in front and behind
FENCE_BEHIND     the tensor ends at an unmapped page; the pattern lies in front
FENCE_IN_FRONT   it begins behind one; the pattern lies behind
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy

from tests.gpu_report.memory import Bytes, Memory

GUARD_BYTES = 4096
_PATTERN = numpy.frombuffer(bytes((37 * i + 11) % 251 for i in range(GUARD_BYTES)), numpy.uint8)


class Layout(Enum):
    PLAIN = "plain"
    CANARIES = "canaries"
    FENCE_BEHIND = "a fence behind the tensors"
    FENCE_IN_FRONT = "a fence in front of the tensors"


@dataclass(frozen=True)
class _Slot:
    """One tensor, and the stretches of pattern around it as (address, bytes)."""

    address: int
    size: int
    guards: tuple[tuple[int, int], ...]
    contents: Bytes | None  # that the kernel must leave alone


class Placement:
    """The tensors of one launch. Memory is used again after `clear`, so make one for many launches."""

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.memory = memory
        self._layout = layout
        self._slots: dict[str, _Slot] = {}
        self._rooms: dict[str, tuple[int, int]] = {}

    def put(self, name: str, data: Bytes, *, read_only: bool, alignment: int = 16) -> int:
        """Copies `data` there and returns its address. With `read_only`, `damage` compares it afterwards."""
        size = data.nbytes
        address, guards = self._place(name, size, alignment)
        for start, length in guards:
            self.memory.write(start, _PATTERN[:length])
        self.memory.write(address, numpy.ascontiguousarray(data))
        self._slots[name] = _Slot(address, size, guards, data.copy() if read_only else None)
        return address

    def reserve(self, name: str, size: int, *, alignment: int) -> int:
        """Memory that nobody has written: compute-sanitizer's initcheck knows it as such."""
        address, guards = self._place(name, size, alignment)
        for start, length in guards:
            self.memory.write(start, _PATTERN[:length])
        self._slots[name] = _Slot(address, size, guards, None)
        return address

    def read(self, name: str) -> Bytes:
        slot = self._slots[name]
        return self.memory.read(slot.address, slot.size)

    def damage(self) -> list[str]:
        """What was written that should not have been; empty when all is as it was."""
        found = []
        for name, slot in self._slots.items():
            for start, length in slot.guards:
                changed = numpy.flatnonzero(self.memory.read(start, length) != _PATTERN[:length])
                if changed.size:
                    side = "in front of" if start < slot.address else "behind"
                    found.append(f"{changed.size} bytes {side} {name} were written, first {changed[0]}")
            if slot.contents is not None:
                changed = numpy.flatnonzero(self.read(name) != slot.contents)
                if changed.size:
                    found.append(f"{changed.size} bytes of the input {name} were written, first {changed[0]}")
        return found

    def clear(self) -> None:
        """Forgets the tensors of the last launch."""
        if self._layout is Layout.PLAIN:
            for slot in self._slots.values():
                self.memory.free(slot.address)
        self._slots.clear()

    def _place(self, name: str, size: int, alignment: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        if self._layout is Layout.PLAIN:
            return self.memory.allocate(max(size, 1)), ()
        first, room = self._room(name, size)
        if self._layout is Layout.CANARIES:
            address = first + GUARD_BYTES
            return address, ((first, GUARD_BYTES), (address + size, GUARD_BYTES))
        if self._layout is Layout.FENCE_IN_FRONT:
            return first, ((first + size, min(GUARD_BYTES, room - size)),)
        address = (first + room - size) // alignment * alignment
        behind = first + room - address - size  # less than the alignment
        in_front = min(GUARD_BYTES, address - first)
        return address, ((address - in_front, in_front), (address + size, behind))

    def _room(self, name: str, size: int) -> tuple[int, int]:
        """Memory for tensor `name`, with room for the pattern; kept from launch to launch."""
        needed = size + 2 * GUARD_BYTES
        room = self._rooms.get(name)
        if room is None or room[1] < needed:
            if self._layout is Layout.CANARIES:
                room = self.memory.allocate(2 * needed), 2 * needed
            else:
                room = self.memory.fenced(needed)
            self._rooms[name] = room
        return room
