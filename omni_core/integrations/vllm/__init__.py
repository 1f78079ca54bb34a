# SPDX-License-Identifier: Apache-2.0
"""vLLM: workers given to it by name, hooks its runner adopts, and the thread that feeds the sink."""
