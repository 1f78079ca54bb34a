# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of a diffusion stage: who runs next, on which pages of vLLM's KV manager.

admission        the largest request the stage was profiled for
request_states   where a request stands, and the legal moves
waves            requests that share a forward, and what their end tells the worker
scheduler        first come, first served: waves out of reservations
row_request      what vLLM's KV manager takes for a request: one CFG row
block_hashing    the hash chain of a row's full prefix blocks
kv_manager       all rows of a request or none, over one native KV manager
row_checks       what is refused before anything changes
sizing           how many pages the memory holds, by vLLM's own functions

What has to do with vLLM imports it; admission, states, waves and the scheduler run without.
"""
