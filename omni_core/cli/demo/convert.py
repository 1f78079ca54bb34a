# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file into a model directory that vLLM reads: bfloat16 safetensors, configuration, tokenizer.

Run as `python -m omni_core.cli.demo.convert GGUF DIRECTORY PROGRESS_DESCRIPTOR`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO


def convert(gguf: Path, directory: Path, progress: TextIO) -> None:
    """Write the model of `gguf` into `directory`, which must exist. Blocks for the whole conversion."""
    _say(progress, "loading the conversion tools")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    _say(progress, "converting the tokenizer")
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    _say(progress, "unpacking the weights")
    packed = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    _say(progress, "writing the weights in bfloat16")
    # A fresh model of the same configuration: the one loaded from GGUF says that it is quantised.
    config = packed.config.__class__(**{**packed.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    config.dtype = torch.bfloat16
    dense = type(packed)(config).to(torch.bfloat16)
    dense.load_state_dict(packed.state_dict())
    dense.tie_weights()
    dense.save_pretrained(directory)


def _say(progress: TextIO, text: str) -> None:
    progress.write(json.dumps({"text": text, "done": 0, "total": 0}) + "\n")
    progress.flush()


def main(arguments: Sequence[str]) -> int:
    """Convert what the arguments name."""
    gguf, directory, descriptor = arguments
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as progress:
        convert(Path(gguf), Path(directory), progress)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
