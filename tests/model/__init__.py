# SPDX-License-Identifier: Apache-2.0
"""Explicit-state models of the cache's protocol: every interleaving of small worlds, and the shortest way to a flaw."""
