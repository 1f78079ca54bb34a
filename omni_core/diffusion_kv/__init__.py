# SPDX-License-Identifier: Apache-2.0
"""KV pages of a diffusion transformer stage, reused across requests: the prefix before the image being generated.

    config, deploy   what an operator sets, and every combination that is refused
    rows             what one CFG row looks like: prefix, target, trailer, bidirectional spans
    identity         what decides that two prefixes are the same
    hooks            which model says how to identify its rows
    snapshot         what the scheduler tells the worker
    worker           pages, block tables, slots
    attention        one interface, several owners of keys and values
    reservations     what the engine asks of whoever hands out pages
    parallel         the ranks of one model
    pipeline         what a model brings to be run
    tiny_hunyuan     the reference model

Nothing here imports vLLM. The scheduler's side drives vLLM's KV manager, in `omni_core.integrations.diffusion`.
"""
