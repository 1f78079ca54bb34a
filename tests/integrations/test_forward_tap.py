# SPDX-License-Identifier: Apache-2.0
"""The tap tells apart rows that differ in a single bit, in their prefix or in their position."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omni_core.integrations.vllm.tap import ForwardTap
from omni_core.integrations.vllm.tapped_request import prefix_digests

TOKENS = [5, 6, 7]


def tapped(rows, tokens=TOKENS, req_id="a", first=0, tap=None, extra=None, pictures=(), lora=None, embeds=None):
    """A tap after one forward of one request whose rows are `rows`, from position `first` on."""
    tap = tap or ForwardTap()
    new = [
        SimpleNamespace(
            req_id=req_id,
            prompt_token_ids=None if embeds is not None else tokens,
            num_computed_tokens=first,
            mm_features=pictures,
            lora_request=lora,
            prompt_embeds=embeds,
            prompt_is_token_ids=None,
        )
    ]
    tap.step_begins(SimpleNamespace(scheduled_new_reqs=new))
    count = len(tokens) - first
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=[req_id]),
        query_start_loc=SimpleNamespace(np=np.array([0, count])),
        input_ids=SimpleNamespace(gpu=torch.tensor(tokens[first:])),
        positions=torch.arange(first, first + count),
        execute_model_state=SimpleNamespace(hidden_states=rows),
    )
    tap.forward_done(runner, extra or {})
    return tap


def rows(dtype=torch.float32):
    return torch.arange(6, dtype=torch.float32).view(3, 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_known_bit_for_bit(dtype):
    tap = tapped(rows(dtype))
    assert tap.equal_rows(TOKENS, rows(dtype)).all()
    assert tap.contains(TOKENS, 1, rows(dtype)[1])
    other = rows(dtype)
    other.view(torch.uint8)[1, 0] ^= 1
    assert tap.equal_rows(TOKENS, other).tolist() == [True, False, True]


def test_zeros_of_another_sign_and_another_dtype_are_other_rows():
    tap = tapped(torch.zeros(3, 2))
    assert not tap.contains(TOKENS, 0, -torch.zeros(2))
    assert not tap.contains(TOKENS, 0, torch.zeros(2, dtype=torch.int32))
    assert not tap.contains(TOKENS, 0, torch.zeros(1))


def test_a_row_at_another_position_or_behind_another_prefix_is_unknown():
    tap = tapped(rows())
    assert not tap.contains(TOKENS, 2, rows()[1])
    assert not tap.contains([5, 9, 7], 2, rows()[2])
    assert tap.rows_for([5, 9], 1) == []


def test_rows_of_one_prefix_are_kept_once_per_value():
    tap = tapped(rows())
    tapped(rows(), req_id="b", tap=tap)
    changed = rows() + 1
    tapped(changed, req_id="c", tap=tap)
    kept = tap.rows(prefix_digests(TOKENS)[2], 2)
    assert [row.tolist() for row in kept] == [[4.0, 5.0], [5.0, 6.0]]
    assert tap.contains(TOKENS, 2, rows()[2])
    assert tap.contains(TOKENS, 2, changed[2])


def test_it_counts_what_the_engine_computed_and_skipped():
    tap = tapped(rows()[2:], first=2)
    request = tap.requests["a"]
    assert (request.num_prompt_tokens, request.skipped_tokens, tap.computed_tokens("a")) == (3, 2, 1)
    assert tap.rows_for(TOKENS, 0) == []
    assert tap.contains(TOKENS, 2, rows()[2])


def test_padding_rows_are_not_kept_and_further_outputs_are():
    codes = torch.arange(3)
    tap = tapped(torch.cat((rows(), torch.full((2, 2), 9.0))), extra={"talker": {"codes": codes}, "note": "text"})
    assert tap.keys == {"__hidden_states__", "talker.codes"}
    assert tap.contains(TOKENS, 2, torch.tensor(2), "talker.codes")
    assert not any(tap.contains(TOKENS, position, torch.full((2,), 9.0)) for position in range(3))


def test_a_row_keeps_its_value_when_the_engine_overwrites_its_buffer():
    buffer = rows()
    tap = tapped(buffer)
    buffer.zero_()
    assert tap.equal_rows(TOKENS, rows()).all()


def test_a_token_that_contradicts_the_prompt_is_an_error():
    tap = tapped(rows())
    request = tap.requests["a"]
    with pytest.raises(ValueError, match="token 9 at 1"):
        request.learn(1, 9)
    with pytest.raises(ValueError, match="position 5 after 3 tokens"):
        request.learn(5, 9)


def test_a_draft_that_was_rejected_is_replaced_and_both_rows_are_kept():
    tap = tapped(rows())
    request = tap.requests["a"]
    request.learn(3, 40)
    request.learn(4, 41)
    request.learn(3, 50)
    assert request.token_ids == [*TOKENS, 50]
    assert request.digests == prefix_digests([*TOKENS, 50])
    assert request.num_drafts_replaced == 1


def test_rows_of_two_adapters_and_of_none_are_told_apart():
    tap = tapped(rows())
    tapped(rows() + 10, req_id="b", tap=tap, lora=SimpleNamespace(lora_int_id=1, lora_name="one"))
    tapped(rows() + 20, req_id="c", tap=tap, lora=SimpleNamespace(lora_int_id=2, lora_name="two"))
    for req_id, own in {"a": rows(), "b": rows() + 10, "c": rows() + 20}.items():
        digests = tap.requests[req_id].digests
        assert tap.equal_rows_at(digests, own).all()
        assert not any(tap.equal_rows_at(digests, own + other).any() for other in (10, -10, 20, -20))


def test_rows_behind_different_pictures_are_told_apart_from_where_they_stand():
    def picture(identifier):
        return [SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=1, length=1))]

    tap = tapped(rows(), pictures=picture("cat"))
    tapped(rows() + 10, req_id="b", tap=tap, pictures=picture("dog"))
    cat, dog = tap.requests["a"].digests, tap.requests["b"].digests
    assert cat[0] == dog[0]
    assert tap.equal_rows_at(cat, rows() + 10).tolist() == [True, False, False]
    assert tap.equal_rows_at(dog, rows() + 10).all()


def test_rows_behind_different_embeddings_are_told_apart_and_have_no_token():
    one, other = torch.zeros(3, 2), torch.zeros(3, 2)
    other[1, 0] = 1
    tap = tapped(rows(), embeds=one)
    tapped(rows() + 10, req_id="b", tap=tap, embeds=other)
    first, second = tap.requests["a"], tap.requests["b"]
    assert first.token_ids == second.token_ids == [-1, -1, -1]
    assert first.digests[0] == second.digests[0]
    assert tap.equal_rows_at(first.digests, rows() + 10).tolist() == [True, False, False]
    assert tap.equal_rows_at(second.digests, rows() + 10).all()


def test_rows_that_do_not_lie_side_by_side_are_kept_and_compared():
    wide = torch.arange(12, dtype=torch.float32).view(3, 4)
    tap = tapped(wide[:, ::2])
    assert tap.equal_rows(TOKENS, wide[:, ::2].contiguous()).all()
    assert tap.equal_rows(TOKENS, wide[:, ::2]).all()
    assert not tap.equal_rows(TOKENS, wide[:, 1::2]).any()
