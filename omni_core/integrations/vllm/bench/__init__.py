# SPDX-License-Identifier: Apache-2.0
"""The engine side of `omni-core bench vllm`: one engine in a process of its own, driven by loads it is told."""
