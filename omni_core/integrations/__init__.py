# SPDX-License-Identifier: Apache-2.0
"""The only code that knows an engine. Nothing in the rest of the library imports it."""
