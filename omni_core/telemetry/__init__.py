# SPDX-License-Identifier: Apache-2.0
"""Metrics and traces. Subscribes to what the other parts report; nothing imports it."""
