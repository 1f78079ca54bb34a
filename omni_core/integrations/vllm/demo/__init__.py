# SPDX-License-Identifier: Apache-2.0
"""The engine side of `omni-core demo`: runs one phase in its own process and holds the rows against the tap."""
