# SPDX-License-Identifier: Apache-2.0
"""What the hooks read of vLLM's model runners: a module for each runner, and what they have in common."""
