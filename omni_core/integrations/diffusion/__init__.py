# SPDX-License-Identifier: Apache-2.0
"""A diffusion stage on vLLM's KV manager: the scheduler's side, and the engine loop that drives it and the worker.

admission        the largest request the stage was profiled for
request_states   where a request stands, and the legal moves
waves            requests that share a forward, and what their end tells the worker
scheduler        first come, first served: waves out of reservations
row_request      what vLLM's KV manager takes for a request: one CFG row
block_hashing    the hash chain of a row's full prefix blocks
kv_manager       all rows of a request or none, over one native KV manager
row_checks       what is refused before anything changes
sizing           how many pages the memory holds, by vLLM's own functions

intake           requests arrive: laid out and identified by any thread
twins            how much of a waiting request another one is about to compute
step_worker      what the engine asks of the worker
wave_execution   one wave on the worker
wave_loop        the books of the engine: queued, running, ended
engine           the loop itself
results, loras   what clients are told, and the adapters they name

What has to do with vLLM imports it; admission, states, waves and the scheduler run without.
"""
