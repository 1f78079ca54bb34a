# SPDX-License-Identifier: Apache-2.0
"""The driver's books of page-locked host memory."""


class PinnedRanges:
    """What was registered."""

    def __init__(self):
        self.pinned = {}
        """Page-locked ranges: address -> bytes."""
        self.pins = []
        """Every range that was page-locked, as (address, bytes)."""
        self.max_pin_bytes = None
        """Most bytes of one range; `None`: no limit."""

    def register(self, address, nbytes):
        """Whether the driver takes the range."""
        if self.max_pin_bytes is not None and nbytes > self.max_pin_bytes:
            return False
        self.pinned[address] = nbytes
        self.pins.append((address, nbytes))
        return True

    def unregister(self, address):
        """Whether the driver knew the range."""
        return self.pinned.pop(address, None) is not None

    def is_pinned(self, tensor):
        """Whether every byte of a tensor is page-locked."""
        return self.ranges_under(tensor) > 0

    def ranges_under(self, tensor):
        """How many page-locked ranges a tensor lies on; 0 if a byte of it lies on none."""
        start = tensor.data_ptr()
        stop = start + max(1, tensor.numel() * tensor.element_size())
        count = 0
        while start < stop:
            end = next((at + size for at, size in self.pinned.items() if at <= start < at + size), None)
            if end is None:
                return 0
            start = end
            count += 1
        return count
