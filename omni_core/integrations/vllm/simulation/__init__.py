# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and KV-cache manager under the simulated engine: no model, no forward, no engine process."""
