# SPDX-License-Identifier: Apache-2.0
"""Vendors' runtimes without hardware: fake device modules that behave, traps included, as the real ones are known to.

"Device" memory is ordinary memory, streams are threads, and `torch.Tensor.copy_` is replaced while a test runs. Names
such as "A1" are sections of backend-facts, where the sources stand.
"""
