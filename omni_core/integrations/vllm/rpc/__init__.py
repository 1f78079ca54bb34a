# SPDX-License-Identifier: Apache-2.0
"""Flushes, rows and reports across processes: what clients call, and what workers answer."""
