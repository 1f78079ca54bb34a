# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases this integration runs on, and what it rests on in their source text."""
