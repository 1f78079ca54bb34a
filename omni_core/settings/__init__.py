# SPDX-License-Identifier: Apache-2.0
"""Every setting of an operator: its name, what it may be, where it may be given, where a value came from."""
