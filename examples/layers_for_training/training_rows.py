# SPDX-License-Identifier: Apache-2.0
"""Reads captured layers back, one training example per request. Needs neither vLLM nor an accelerator."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_core.integrations.vllm.chosen_layers import layer_key
from omni_core.sinks.safetensors_files import read_request_file, request_files


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One request: what a drafter sees of the target model at each token."""

    req_id: str
    token_ids: npt.NDArray[np.int64]
    """`(num_tokens,)`: the token fed at each position; the next one is what the drafter shall guess."""
    positions: npt.NDArray[np.int64]
    """`(num_tokens,)`: 0, 1, 2, and so on."""
    layers: Mapping[int, torch.Tensor]
    """Layer → `(num_tokens, hidden_size)`, in the dtype the engine computed."""


def training_examples(
    directory: str | os.PathLike[str], layers: Sequence[int], incomplete: list[str]
) -> Iterator[TrainingExample]:
    """Every whole request of a safetensors sink's directory.

    Args:
        directory: where the sink wrote.
        layers: the layers each example shall have.
        incomplete: gets the ids of the requests that are left out because they miss a row.

    Raises:
        KeyError: a request was captured without one of the layers.
    """
    for path in request_files(directory):
        request = read_request_file(path)
        rows = {layer: request.rows[layer_key(layer)] for layer in layers}
        covered = [request.ranges_of(layer_key(layer)) for layer in layers]
        if request.complete and all(ranges == ((0, len(request.token_ids)),) for ranges in covered):
            yield TrainingExample(request.req_id, request.token_ids, request.positions, rows)
        else:
            incomplete.append(request.req_id)
