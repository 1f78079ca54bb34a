# SPDX-License-Identifier: Apache-2.0
"""Whole-prompt stage outputs from vLLM with prefix caching on, on any accelerator."""

__version__ = "0.1.0"
