# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the diffusion KV: it holds pages and never hands one out.

device_memory     tensors through the device's backend, at start-up only
page_pool         keys and values, one tensor per layer
block_tables      which pages each row has, in order
snapshot_checks   what is refused of a snapshot
install_rules     what a snapshot means beside the one already held
kv_worker         install and remove
slot_mapping      where each token is written
step_workers      what the engine loop calls, paged or dense
"""
