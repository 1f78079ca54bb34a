# SPDX-License-Identifier: Apache-2.0
"""Attention of a DiT whose keys and values someone else may own: one interface, several owners."""
