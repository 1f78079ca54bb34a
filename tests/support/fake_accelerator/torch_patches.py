# SPDX-License-Identifier: Apache-2.0
"""torch with a fake machine under it, for as long as a test runs."""

from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def torch_on(machine):
    """Copies go to the machine's streams, page-locked memory comes from it, and launches report its last error."""
    copy, fill, empty = torch.Tensor.copy_, torch.Tensor.fill_, torch.empty

    def copy_on_machine(self, src, non_blocking=False):
        return machine.copy(self, src, non_blocking=non_blocking, original=copy)

    def fill_on_machine(self, value):
        machine.report_last_error()
        return fill(self, value)

    def is_pinned(self, device=None):
        machine.calls["Tensor.is_pinned"] += 1
        return machine.is_pinned(self)

    def empty_on_machine(*size, pin_memory=False, **options):
        if not pin_memory:
            return empty(*size, **options)
        # at::CachingHostAllocator rounds up to a power of two (faults.md, row 87).
        block = empty(1 << (size[0] - 1).bit_length(), **options)
        if not machine.register(block.data_ptr(), block.numel()):
            raise RuntimeError("the driver refused")
        return block[: size[0]]

    with (
        mock.patch.object(torch.Tensor, "copy_", copy_on_machine),
        mock.patch.object(torch.Tensor, "fill_", fill_on_machine),
        mock.patch.object(torch.Tensor, "is_pinned", is_pinned),
        mock.patch.object(torch, "empty", empty_on_machine),
    ):
        yield
