# SPDX-License-Identifier: Apache-2.0
"""Where delivered rows go: memory, safetensors files, or a sink of your own."""
