# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's second model runner: block tables and tokens on the device only, outputs always asynchronous.

Rows are those of `fake_runner`; a request keeps its row of the state, and the batch has an order of its own. Dummy runs
go through `execute_model` and leave a state behind, as the real ones do.
"""

from types import SimpleNamespace

import fake_runner as fake
import numpy as np
import torch
from async_runner import AsyncOutput

GROUP = 0


class BlockTables:
    """The device's table, which only this stand-in reads, and how many blocks of each row count."""

    def __init__(self):
        self.block_sizes = [fake.BLOCK_SIZE]
        self.num_blocks = SimpleNamespace(np=np.zeros((1, fake.MAX_REQS), np.int32))
        self.on_device = np.zeros((fake.MAX_REQS, fake.MAX_LEN // fake.BLOCK_SIZE), np.int32)

    def append_block_ids(self, req_index, new_block_ids, overwrite):
        held = 0 if overwrite else int(self.num_blocks.np[GROUP, req_index])
        stop = held + len(new_block_ids[GROUP])
        self.on_device[req_index, held:stop] = new_block_ids[GROUP]
        self.num_blocks.np[GROUP, req_index] = stop


class FakeRunnerV2:
    """Keeps requests in rows that stay theirs, and computes rows from the tokens on the device."""

    is_pooling_model = False
    lora_config = None
    use_aux_hidden_state_outputs = False

    def __init__(self, model=None):
        self.model = model or fake.FakeModel()
        self.device = torch.device("cpu")
        self.block_tables = BlockTables()
        self.execute_model_state = None
        self.max_model_len = fake.MAX_LEN
        self.waiting = []
        self.copy_error = None
        self.forwards = 0
        self.adapters_loaded = set()
        self._tokens = np.zeros((fake.MAX_REQS, fake.MAX_LEN), np.int32)
        self._num_tokens = np.zeros(fake.MAX_REQS, np.int32)
        self._computed = np.zeros(fake.MAX_REQS, np.int32)
        self._row_of = {}
        self._free = list(range(fake.MAX_REQS))

    def get_model(self):
        return self.model

    def list_loras(self):
        return set(self.adapters_loaded)

    @torch.inference_mode()
    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        if not dummy_run:
            self._update(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        if not counts:
            return "nothing to do"
        if dummy_run:
            rows, firsts, req_ids = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64), list(counts)
        else:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            req_ids = sorted(counts, key=lambda req_id: (not drafts.get(req_id), counts[req_id]))
            rows = np.array([self._row_of[req_id] for req_id in req_ids])
            firsts = self._computed[rows]
            for row, req_id in zip(rows, req_ids, strict=True):
                known = int(self._num_tokens[row])
                self._tokens[row, known : known + len(drafts.get(req_id, ()))] = drafts.get(req_id, ())
        scheduled = np.array([counts[req_id] for req_id in req_ids], np.int32)
        positions = [list(range(first, first + count)) for first, count in zip(firsts, scheduled, strict=True)]
        fed = [int(self._tokens[row, position]) for row, run in zip(rows, positions, strict=True) for position in run]
        self.execute_model_state = SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=req_ids,
                num_tokens=int(scheduled.sum()),
                num_scheduled_tokens=scheduled,
                num_computed_tokens_np=np.array(firsts, np.int32),
                idx_mapping_np=rows,
                query_start_loc_np=np.concatenate(([0], np.cumsum(scheduled))).astype(np.int32),
                input_ids=torch.tensor([*fed, *[0] * fake.PADDING], dtype=torch.int32),
                positions=torch.tensor([position for run in positions for position in run] + [0] * fake.PADDING),
            ),
            hidden_states=self._forward([self._tokens[row].tolist() for row in rows], positions),
            aux_hidden_states=None,
        )
        return None

    def sample_tokens(self, grammar_output):
        """As `FakeRunner.sample_tokens`; the output comes later."""
        batch, self.execute_model_state = self.execute_model_state.input_batch, None
        by_request = []
        for row, req_id in zip(batch.idx_mapping_np, batch.req_ids, strict=True):
            tokens = grammar_output.get(req_id, [])
            tokens = tokens if isinstance(tokens, list) else [tokens]
            known = int(self._num_tokens[row])
            self._tokens[row, known : known + len(tokens)] = tokens
            self._num_tokens[row] += len(tokens)
            by_request.append(tokens)
        order = {req_id: index for index, req_id in enumerate(batch.req_ids)}
        output = SimpleNamespace(sampled_token_ids=by_request, req_id_to_index=order)
        self.waiting.append(AsyncOutput(self.copy_error or output))
        return self.waiting[-1]

    def dummy_run(self):
        """What `_dummy_run` of the real one does: through `execute_model`, then the state is dropped."""
        counts = SimpleNamespace(num_scheduled_tokens={"_dummy_req_0": 3})
        self.execute_model(counts, intermediate_tensors=None, dummy_run=True)
        self.execute_model_state = None

    def slots_on_device(self, req_id, positions):
        """The slots that the device's own table gives a request's tokens."""
        blocks = self.block_tables.on_device[self._row_of[req_id], np.asarray(positions) // fake.BLOCK_SIZE]
        return (blocks * fake.BLOCK_SIZE + np.asarray(positions) % fake.BLOCK_SIZE).tolist()

    def _forward(self, tokens, positions):
        self.forwards += 1
        rows = [fake.row_of(tokens[index], position) for index, run in enumerate(positions) for position in run]
        hidden = torch.tensor([*rows, *[[-1.0] * fake.HIDDEN_SIZE] * fake.PADDING])
        if isinstance(self.model, fake.FakeModel):
            self.model.codes = (hidden[:, :2] * 7).to(torch.int32)
        return hidden

    def _update(self, scheduler_output):
        for req_id in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
            self._remove(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._remove(new.req_id)
            row = self._row_of[new.req_id] = self._free.pop()
            known = new.prefill_token_ids or new.prompt_token_ids
            self._tokens[row, : len(known)] = known
            self._num_tokens[row], self._computed[row] = len(known), new.num_computed_tokens
            self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._computed[self._row_of[req_id]] = computed
            if blocks is not None:
                self.block_tables.append_block_ids(self._row_of[req_id], blocks, overwrite=False)

    def _remove(self, req_id):
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._free.append(row)
