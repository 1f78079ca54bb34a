# SPDX-License-Identifier: Apache-2.0
"""What is refused of a model's hook, each request by itself, and what identifying has cost."""

from dataclasses import dataclass

import pytest
from diffusion_kv.scheduled_requests import adapter, prepared

from omni_core.diffusion_kv.errors import RowError
from omni_core.diffusion_kv.hooks import HashingStats, RowIdentifier
from omni_core.diffusion_kv.identity.namespace import ModelIdentity
from omni_core.diffusion_kv.rows import ImageFeature, RowIdentity
from omni_core.runtime import ThreadingRuntime

MODEL = ModelIdentity(architecture="toy", path="/models/toy", revision=None, dtype="float32", layout_version=1)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Held:
    """What a request is after preprocessing, with the weak reference an identifier keeps."""

    request: object
    rows: tuple


@dataclass(frozen=True, slots=True)
class Unwatched:
    """The same without a weak reference."""

    request: object
    rows: tuple


def held(request_id="a", **shape):
    plain = prepared(request_id, **shape)
    return Held(plain.request, plain.rows)


@dataclass
class Hook:
    """Identifies every row by its tokens, or as a test says."""

    architecture = "toy"
    identities: tuple | None = None

    def identify(self, of, context):
        if self.identities is not None:
            return self.identities
        return [RowIdentity(row.token_ids, (), context.namespace(MODEL)) for row in of.rows]


def identifier(*identities):
    return RowIdentifier(Hook(identities or None), ThreadingRuntime())


ROW = RowIdentity(tuple(range(113)), (), b"toy")


@pytest.mark.parametrize(
    ("identities", "says"),
    [
        ((ROW,), "'toy' gave 1 identities for 2 rows"),
        ((ROW, ROW, ROW), "'toy' gave 3 identities for 2 rows"),
        ((ROW, "row"), "'toy', row 1: a str, not a RowIdentity"),
        ((ROW, RowIdentity((1, 2), (), b"toy")), "'toy', row 1: 2 token ids identify a prefix of 70"),
        (
            (ROW, RowIdentity(ROW.token_ids, (ImageFeature("fox", 60, 114),), b"toy")),
            r"'toy', row 1: image feature \[60, 114\) ends beyond the row of 113",
        ),
    ],
)
def test_a_hook_that_does_not_identify_the_rows_refuses_their_request_alone(identities, says):
    asked = identifier(*identities)
    with pytest.raises(RowError, match=says):
        asked.identify(held(), 0)
    assert asked.stats == HashingStats()


def test_a_request_is_identified_once_for_each_state_of_the_weights():
    asked, request = identifier(), held()
    first = asked.identify(request, 0)
    with pytest.raises(RowError, match="'a' was identified before, with weights of epoch 0"):
        asked.identify(request, 0)
    second = asked.identify(request, 1)
    with pytest.raises(RowError, match="with weights of epoch 1"):
        asked.identify(request, 0)
    assert first[0].namespace != second[0].namespace
    assert (asked.stats.requests, asked.stats.rows) == (2, 4)
    assert asked.stats.hash_s > 0.0


def test_an_equal_request_that_comes_later_is_another_one():
    asked = identifier()
    for _ in range(3):
        asked.identify(held(), 0)
    assert asked.stats.requests == 3


def test_a_request_that_cannot_be_watched_is_refused():
    with pytest.raises(RowError, match="Unwatched allows no weak reference"):
        identifier().identify(Unwatched(held().request, held().rows), 0)


def test_the_adapter_of_the_request_is_in_its_namespace():
    asked = identifier()
    namespaces = {asked.identify(held(lora=lora), 0)[0].namespace for lora in (None, adapter(), adapter(scale=0.5))}
    assert len(namespaces) == 3
