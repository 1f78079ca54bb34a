# SPDX-License-Identifier: Apache-2.0
"""tiny-hunyuan: the reference model of the diffusion KV, a HunyuanImage3-like diffusion transformer.

Its weights are random, drawn from a seed; nothing was ever trained, so a prompt steers its pictures without meaning
anything to it. What is real: the layout, the encoders that draw from the request's generator, the transformer, CFG,
the schedule and the decoder. It exists to prove reuse of keys and values exact, and to measure it.

    layouts, options   sizes as data
    tokenizer          bytes and special tokens
    pictures           pixels to what the encoders take, and back
    preprocessing      a request to its rows
    encoders           VAE (sampled) and ViT
    rope               positions in one and two dimensions
    transformer        layers, with or without an adapter, on one or several ranks
    forward            one denoise step of a wave of requests
    flow_matching      noise levels and the Euler step
    pipeline           all of it, as the engine runs it
    hook               what identifies a row; imported when prefix caching is on
"""

from omni_core.diffusion_kv.tiny_hunyuan.lora import make_adapter
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.diffusion_kv.tiny_hunyuan.pipeline import TinyHunyuanPipeline
from omni_core.diffusion_kv.tiny_hunyuan.state import TinyHunyuanRequest, TinyHunyuanState

__all__ = ["TinyHunyuanOptions", "TinyHunyuanPipeline", "TinyHunyuanRequest", "TinyHunyuanState", "make_adapter"]
