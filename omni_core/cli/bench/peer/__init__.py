# SPDX-License-Identifier: Apache-2.0
"""The peer, vllm-omni 0.30.0, measured beside ours: found or installed, loaded alone, driven as its engine does."""
