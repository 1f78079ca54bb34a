# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's V1 runner: the attributes and the two-call step of the real one, on a few kilobytes.

A hidden row says whose it is: `(token, position, sum of the tokens before)`. Rows are padded as a graph pads them.
"""

from types import SimpleNamespace

import numpy as np
import torch

BLOCK_SIZE = 4
HIDDEN_SIZE = 4
PADDING = 3
MAX_REQS = 8
MAX_LEN = 64
EOS_TOKEN_ID = 1
STOP_TOKEN_ID = 2


def ends(request, max_model_len):
    """The scheduler's rule, as vLLM 0.32 has it, without repetitions."""
    last, params = request.output_token_ids[-1], request.sampling_params
    full = request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens
    return last == params.eos_token_id or last in params.stop_token_ids or full


def row_of(tokens, position):
    """The hidden row of a token prefix at a position."""
    return [float(tokens[position]), float(position), float(sum(tokens[:position])), 1.0]


class FakeModel:
    """A model with one output per token beside its hidden state."""

    def __init__(self):
        self.taken = 0
        self.broken = self.wide = False
        self.codes = torch.empty(0)

    def take_stage_outputs(self):
        self.taken += 1
        if self.broken:
            raise RuntimeError("no codes today")
        return {"codes": self.codes} | ({"wide": torch.zeros(len(self.codes), 1 << 20)} if self.wide else {})


class FakeRunner:
    """Keeps a persistent batch the way vLLM's runner does, and computes rows from it."""

    is_pooling_model = False
    lora_config = None
    _kernel_blocks = 1  # per block of the scheduler's

    def __init__(self, model=None):
        self.model = model or FakeModel()
        self.device = torch.device("cpu")
        table = SimpleNamespace(
            block_size=BLOCK_SIZE // self._kernel_blocks,
            block_table=SimpleNamespace(np=np.zeros((MAX_REQS, MAX_LEN // BLOCK_SIZE * self._kernel_blocks), np.int32)),
            num_blocks_per_row=np.zeros(MAX_REQS, np.int32),
        )
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_computed_tokens_cpu=np.zeros(MAX_REQS, np.int32),
            token_ids_cpu=np.zeros((MAX_REQS, MAX_LEN), np.int32),
            is_token_ids=np.ones((MAX_REQS, MAX_LEN), np.bool_),
            block_table=[table],
        )
        self.query_start_loc = SimpleNamespace(np=np.zeros(MAX_REQS + 1, np.int32))
        self.positions = torch.zeros(MAX_LEN * MAX_REQS, dtype=torch.int64)
        self.input_ids = SimpleNamespace(gpu=torch.zeros(MAX_LEN * MAX_REQS, dtype=torch.int32))
        self.input_batch.lora_id_to_lora_request = {}
        self.loaded_adapters = set()
        self.execute_model_state = None
        self.forwards = 0
        self.row_offset = 0.0
        self.max_model_len = MAX_LEN
        self.requests = {}
        self._num_tokens = {}
        self._device_tokens = self.input_batch.token_ids_cpu

    def get_model(self):
        return self.model

    def list_loras(self):
        return set(self.loaded_adapters)

    def dummy_run(self):
        self._forward([[9]], [[0]])

    @torch.inference_mode()
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        assert self.execute_model_state is None
        self._update(scheduler_output)
        batch = self.input_batch
        counts = [scheduler_output.num_scheduled_tokens[req_id] for req_id in batch.req_ids]
        if not counts:
            return "nothing to do"
        firsts = [int(batch.num_computed_tokens_cpu[index]) for index in range(len(counts))]
        positions = [list(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
        tokens = [self._device_tokens[index].tolist() for index in range(len(counts))]
        flat = [position for run in positions for position in run]
        fed = [tokens[index][position] for index, run in enumerate(positions) for position in run]
        self.query_start_loc.np[: len(counts) + 1] = np.concatenate(([0], np.cumsum(counts)))
        self.positions[: len(flat)] = torch.tensor(flat)
        self.input_ids.gpu[: len(flat)] = torch.tensor(fed, dtype=torch.int32)
        self.execute_model_state = SimpleNamespace(
            hidden_states=self._forward(tokens, positions), aux_hidden_states=None
        )
        return None

    def sample_tokens(self, grammar_output):
        """Use the state up. The argument maps a request to its next token, or its tokens where it had drafts."""
        self.execute_model_state = None
        batch = self.input_batch
        by_request = []
        for index, req_id in enumerate(batch.req_ids):
            tokens = grammar_output.get(req_id, [])
            tokens = tokens if isinstance(tokens, list) else [tokens]
            self._keep_sampled(index, self._num_tokens[req_id], tokens)
            self._num_tokens[req_id] += len(tokens)
            self.requests[req_id].output_token_ids.extend(tokens)
            by_request.append(tokens)
        order = {req_id: index for index, req_id in enumerate(batch.req_ids)}
        return self._output(SimpleNamespace(sampled_token_ids=by_request, req_id_to_index=order))

    def _keep_sampled(self, index, first, tokens):
        self.input_batch.token_ids_cpu[index, first : first + len(tokens)] = tokens

    def _output(self, output):
        return output

    def _append_blocks(self, index, block_ids):
        table, split = self.input_batch.block_table[0], self._kernel_blocks
        ids = [block_id * split + part for block_id in block_ids for part in range(split)]
        held = table.num_blocks_per_row[index]
        table.block_table.np[index, held : held + len(ids)] = ids
        table.num_blocks_per_row[index] += len(ids)

    def _forward(self, tokens, positions):
        self.forwards += 1
        rows = [row_of(tokens[index], position) for index, run in enumerate(positions) for position in run]
        rows += [[-1.0] * HIDDEN_SIZE] * PADDING
        hidden = torch.tensor(rows) + self.row_offset
        if isinstance(self.model, FakeModel):
            self.model.codes = (hidden[:, :2] * 7).to(torch.int32)
        return hidden

    def _update(self, scheduler_output):
        batch = self.input_batch
        table, lengths = batch.block_table[0].block_table.np, batch.block_table[0].num_blocks_per_row
        for req_id in scheduler_output.finished_req_ids & set(batch.req_ids):
            index = batch.req_ids.index(req_id)
            batch.req_ids.pop(index)
            rows = {id(array): array for array in (batch.token_ids_cpu, self._device_tokens)}
            for array in (batch.num_computed_tokens_cpu, table, lengths, *rows.values()):
                array[index:-1] = array[index + 1 :].copy()
        for new in scheduler_output.scheduled_new_reqs:
            index = len(batch.req_ids)
            batch.req_ids.append(new.req_id)
            for array in (batch.token_ids_cpu, self._device_tokens):
                array[index, : len(new.prompt_token_ids)] = new.prompt_token_ids
            batch.num_computed_tokens_cpu[index] = new.num_computed_tokens
            lengths[index] = 0
            self._append_blocks(index, new.block_ids[0])
            self._num_tokens[new.req_id] = len(new.prompt_token_ids)
            self.requests[new.req_id] = SimpleNamespace(
                num_prompt_tokens=len(new.prompt_token_ids), output_token_ids=[], sampling_params=new.sampling_params
            )
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            index = batch.req_ids.index(req_id)
            batch.num_computed_tokens_cpu[index] = computed
            if blocks:
                self._append_blocks(index, blocks[0])
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            first = self._num_tokens[req_id]
            batch.token_ids_cpu[batch.req_ids.index(req_id), first : first + len(drafts)] = drafts


def scheduled(
    new=(), running=(), finished=(), drafts=None, max_tokens=MAX_LEN, lora_request=None, preempted=(), outputs=None
):
    """A scheduler output. `lora_request`: the adapter of its new requests.

    `new`: (req_id, prompt, block ids, computed, scheduled). `running`: (req_id, computed, scheduled, new block ids).
    `drafts`: request to its draft tokens, which its scheduled tokens include. `outputs`: in the form of the second
    model runner, what those of the new requests that were preempted had generated.
    """
    outputs = outputs or {}
    counts = {req_id: count for req_id, _, _, _, count in new} | {req_id: count for req_id, _, count, _ in running}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=req_id,
                prompt_token_ids=prompt,
                prefill_token_ids=[*prompt, *outputs[req_id]] if req_id in outputs else None,
                block_ids=(blocks,),
                num_computed_tokens=computed,
                mm_features=[],
                lora_request=lora_request,
                prompt_embeds=None,
                prompt_is_token_ids=None,
                sampling_params=SimpleNamespace(
                    max_tokens=max_tokens,
                    eos_token_id=EOS_TOKEN_ID,
                    stop_token_ids=[STOP_TOKEN_ID],
                    min_tokens=0,
                    repetition_detection=None,
                ),
            )
            for req_id, prompt, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[req_id for req_id, _, _, _ in running],
            new_block_ids=[(blocks,) if blocks else None for _, _, _, blocks in running],
            num_computed_tokens=[computed for _, computed, _, _ in running],
            resumed_req_ids=set(),
            all_token_ids={},
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
        kv_cache_block_copies=None,
        scheduled_spec_decode_tokens=drafts or {},
    )
