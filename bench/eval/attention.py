"""Attention through CertKV for a whole text at once, token for token as decode steps read it.

A decode step at position p reads the whole blocks before it as they are stored, and the tokens of
its own block from their originals. For a text that is given, all positions of a layer can be read
before the next layer is computed: the reads are those of decoding the text token by token.

Each layer is put as a sequence of its own, told apart by its first token id, into a cache of one
layer.
"""

import contextlib
import copy

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import certkv

IMPLEMENTATION = "certkv_eval"
BLOCK = 64
_LAYERS_MAX = 256


def spec_for(config, key_format, value_format, **others):
    return certkv.CacheSpec.uniform(
        "evaluation",
        layer_count=1,
        kv_head_count=config.num_key_value_heads,
        group_size=config.num_attention_heads // config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        key_format=key_format,
        value_format=value_format,
        **others,
    )


class Reader:
    """Reads a model's attention from CertKV while it is `current`, and keeps the certificates."""

    current = None

    def __init__(self, caches, salt):
        """`caches`: (client, request) of each layer, or one for all of them.

        `salt` > 0 tells runs apart whose keys differ for equal token ids.
        """
        self._caches = caches
        self._salt = salt
        self.token_ids = []
        self.certificates = []  # of each layer, then position
        self.read_ns = 0

    def __enter__(self):
        Reader.current = self
        return self

    def __exit__(self, *_):
        Reader.current = None

    def attend(self, layer, queries, keys, values):
        """Queries of the last tokens.

        [queries or tokens, heads, d] each, keys and values float16 -> [queries, query heads, d].
        """
        count, first = len(keys), len(keys) - len(queries)
        client, request = self._caches[layer if len(self._caches) > 1 else 0]
        # The first id says which run and layer: block keys chain from it.
        ids = [self._salt * _LAYERS_MAX + layer, *self.token_ids[1:]]
        outputs = np.empty(queries.shape, np.float32)
        put = max(first, 1)
        waiting = list(range(first, put))  # positions whose token is in the sequence
        with client.put_sequence(
            ids[:put], [(keys[:put], values[:put])]
        ) as sequence, client.attention(sequence, request) as attention:

            def read():
                reads = attention.attend_many([(0, p, queries[p - first]) for p in waiting])
                for position, one in zip(waiting, reads):
                    outputs[position - first] = one.outputs
                    self.certificates.append(one.certificates)
                    self.read_ns += one.read_time_ns
                waiting.clear()

            for token in range(put, count):
                waiting.append(token)
                if token % BLOCK < BLOCK - 1:
                    sequence.append(ids[token], [(keys[token], values[token])])
                    continue
                # This one fills the block: it and those before it are read before it is sealed.
                waiting.pop()
                read()
                sequence.begin_token(ids[token])
                sequence.write_layer(0, keys[token], values[token])
                waiting.append(token)
                read()
                sequence.finish_token()
            read()
        return outputs


def attention_forward(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention "certkv_eval": Reader.current's, or plain attention over 16-bit keys and values."""
    stored = [tensor.to(torch.float16) for tensor in (key, value)]
    if Reader.current is None:
        rounded = [tensor.to(query.dtype) for tensor in stored]
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            *rounded,
            attn_mask=causal.tril(key.shape[2] - query.shape[2]),
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2).contiguous(), None
    arrays = [t[0].transpose(0, 1).contiguous().numpy() for t in (query, *stored)]
    output = Reader.current.attend(module.layer_idx, *arrays)
    return torch.from_numpy(output)[None], None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def logits_of(model, ids, reader=None, prompt=None):
    """[tokens, vocabulary] of the last tokens of a text: those that `prompt`, a cache, hasn't."""
    model.set_attn_implementation(IMPLEMENTATION)
    past = copy.deepcopy(prompt)
    new = ids[past.get_seq_length() :] if past is not None else ids
    with torch.inference_mode(), reader or contextlib.nullcontext():
        if reader is not None:
            reader.token_ids = ids.tolist()
        call = model(input_ids=new[None], past_key_values=past, use_cache=past is not None)
        return call.logits[0]


def cache_of(model, ids):
    """The cache of a prompt that was computed without CertKV, as prefill is."""
    model.set_attn_implementation(IMPLEMENTATION)
    with torch.inference_mode():
        return model(input_ids=ids[None], use_cache=True).past_key_values
