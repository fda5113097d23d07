"""Families of models, ways of generating, and what is refused: small models with random weights."""

import numpy as np
import pytest
import torch
from conftest import RecordedCache, RoundedCache, dense_attention, generate, make_cache
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import certkv
import certkv.transformers as plugin
from certkv import _transformers_spec

VOCABULARY = 128
WINDOW = 40


def tiny(config_class, model_class, dtype=torch.float32, **options):
    """Two layers, 4 query heads, 2 KV heads, d = 64; weights large enough for sharp attention."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.1,
        "eos_token_id": None,
        "attn_implementation": "certkv",
        **options,
    }
    torch.manual_seed(1)
    model = model_class(config_class(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they begin as zeros, which would test nothing
            torch.nn.init.normal_(parameter)
    return model.to(dtype).eval()


def tokens(count, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, count), generator=generator)


def rope(kind, **parameters):
    """RoPE whose frequencies are changed once and for all, for contexts of more than 64 tokens."""
    own = {"original_max_position_embeddings": 64} if kind != "linear" else {}
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **own, **parameters}


FAMILIES = {
    "llama": lambda: tiny(LlamaConfig, LlamaForCausalLM),
    "llama with linear RoPE": lambda: tiny(
        LlamaConfig, LlamaForCausalLM, rope_parameters=rope("linear")
    ),
    "llama with its own RoPE for long contexts": lambda: tiny(
        LlamaConfig,
        LlamaForCausalLM,
        rope_parameters=rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama with YaRN": lambda: tiny(
        LlamaConfig, LlamaForCausalLM, max_position_embeddings=256, rope_parameters=rope("yarn")
    ),
    "llama with biased projections": lambda: tiny(
        LlamaConfig, LlamaForCausalLM, attention_bias=True
    ),
    "llama with one KV head": lambda: tiny(LlamaConfig, LlamaForCausalLM, num_key_value_heads=1),
    "llama with as many KV heads": lambda: tiny(
        LlamaConfig, LlamaForCausalLM, num_key_value_heads=4
    ),
    "mistral": lambda: tiny(MistralConfig, MistralForCausalLM, sliding_window=None),
    "mistral with a window": lambda: tiny(MistralConfig, MistralForCausalLM, sliding_window=WINDOW),
    "qwen2": lambda: tiny(Qwen2Config, Qwen2ForCausalLM),
    "qwen2 with a window in one layer": lambda: tiny(
        Qwen2Config,
        Qwen2ForCausalLM,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3": lambda: tiny(Qwen3Config, Qwen3ForCausalLM),
    "gemma3": lambda: tiny(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=100,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_reads_give_the_logits_of_the_model_alone(server, family):
    model = FAMILIES[family]()
    # Both windows and a block of 64 end inside.
    prompt = tokens(100)
    ids, logits = generate(model, prompt, RoundedCache(model), 40)
    with make_cache(model, server, read_mode="EXACT") as cache:
        ours, our_logits = generate(model, prompt, cache, 40)
    assert ours.tolist() == ids.tolist()
    assert torch.allclose(our_logits, logits, atol=0.02, rtol=0), (our_logits - logits).abs().max()
    # The text depends on what attention reads: another prompt gives another.
    assert generate(model, tokens(100, seed=3), RoundedCache(model), 40)[0].tolist() != ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_reads_are_within_their_bounds(server, family):
    model = FAMILIES[family]()
    prompt = tokens(100)
    with make_cache(model, server, RecordedCache) as cache:
        generate(model, prompt, cache, 40)
        shares = []
        for layer, count, query, output, records in cache.reads:
            keys, values = cache.keys_and_values(layer, count)
            window = cache.spec.layers[layer].sliding_window
            dense = dense_attention(query, keys, values, cache.spec.logit_scale, window)
            error = np.linalg.norm(output - dense, axis=1)
            slack = 2e-5 * np.linalg.norm(values, axis=2).max()
            assert np.all(error <= records["output_error_bound"] + slack)
            shares.append(np.max(error / records["output_error_bound"]))
        assert len(shares) == 2 * 39 and max(shares) > 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits_are_read_to_their_precision(server, dtype):
    model = tiny(LlamaConfig, LlamaForCausalLM, dtype)
    prompt = tokens(100)
    with make_cache(model, server, RecordedCache, read_mode="EXACT") as cache:
        assert cache.spec.original_dtype == str(dtype).removeprefix("torch.")
        generate(model, prompt, cache, 40)
        for layer, count, query, output, _ in cache.reads:
            keys, values = cache.keys_and_values(layer, count)
            dense = dense_attention(query, keys, values, cache.spec.logit_scale)
            # Rounded once, to the model's dtype; float arithmetic before that is far below.
            error = np.linalg.norm(output - dense, axis=1) / np.linalg.norm(dense, axis=1)
            assert np.all(error <= torch.finfo(dtype).eps / 2 + 2e-5)
        assert len(cache.reads) == 2 * 39


def padded(prompts):
    """Left-padded ids and mask of prompts of different lengths."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sequences_of_a_padded_batch_are_read_apart(server, family):
    model = FAMILIES[family]()
    prompts = [tokens(100, seed=5), tokens(70, seed=6), tokens(1, seed=7)]
    alone = [generate(model, prompt, RoundedCache(model), 30)[0] for prompt in prompts]
    ids, mask = padded(prompts)
    with make_cache(model, server, read_mode="EXACT") as cache:
        ours, _ = generate(model, ids, cache, 30, attention_mask=mask)
        for row, (prompt, text) in enumerate(zip(prompts, alone)):
            assert ours[row].tolist() == text[0].tolist()
            positions = set(cache.certificates_of(row)["query_position"])
            assert positions == set(range(prompt.shape[1], prompt.shape[1] + 29))
        assert len(cache.certificates()) == 3 * len(cache.certificates_of(0))


def test_a_padded_sequence_shares_blocks_with_one_that_is_not(server):
    model = FAMILIES["llama"]()
    prompts = [tokens(150, seed=8), tokens(100, seed=9)]
    with make_cache(model, server, model_name="padded-and-not") as cache:
        generate(model, prompts[1], cache, 2)
        assert cache.shared_block_count == 0
    ids, mask = padded(prompts)
    with make_cache(model, server, model_name="padded-and-not") as cache:
        generate(model, ids, cache, 2, attention_mask=mask)
        assert cache.shared_block_count == 1


def refused(call):
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        call()
    assert raised.value.reason == "ENGINE_UNSUPPORTED"
    return raised.value.message


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"]()


def test_models_that_are_not_covered_are_refused(server):
    def message(model):
        return refused(lambda: plugin.CertifiedCache(model, server.target))

    llama = (LlamaConfig, LlamaForCausalLM)
    assert "torch.float32" in message(tiny(*llama))
    half = torch.float16
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "'dynamic'" in message(tiny(*llama, half, rope_parameters=dynamic))
    longrope = rope("longrope", short_factor=[1.0] * 32, long_factor=[2.0] * 32)
    assert "'longrope'" in message(tiny(*llama, half, rope_parameters=longrope))
    gemma = (Gemma3TextConfig, Gemma3ForCausalLM)
    model = tiny(*gemma, half, attn_logit_softcapping=50.0)
    assert "attn_logit_softcapping is 50.0" in message(model)
    model = tiny(*gemma, half, use_bidirectional_attention=True)
    assert "use_bidirectional_attention" in message(model)
    model = tiny(Qwen2Config, Qwen2ForCausalLM, half)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "'chunked_attention'" in message(model)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=64, vocab_size=64)).half()
    gpt2.config._attn_implementation = "certkv"
    assert "'gpt2' is not known" in message(gpt2)
    with pytest.raises(certkv.InvalidArgumentError, match="head_dim"):
        plugin.CertifiedCache(tiny(*llama, half, head_dim=32), server.target)


def test_original_dtype_is_checked(server, llama):
    llama.set_attn_implementation("certkv")
    says = refused(lambda: plugin.CertifiedCache(llama, server.target, original_dtype="float8"))
    assert "float8" in says
    half = tiny(LlamaConfig, LlamaForCausalLM, torch.float16)
    says = refused(lambda: plugin.CertifiedCache(half, server.target, original_dtype="bfloat16"))
    assert "torch.float16" in says


def test_attention_that_is_more_than_a_softmax_is_refused(server, llama):
    with make_cache(llama, server) as cache, torch.inference_mode():
        keys = torch.zeros(1, 2, 1, 64)
        keys.certkv_cache = cache
        module = llama.model.layers[0].self_attn

        def message(**options):
            options = {"scaling": 0.125, **options}
            query = torch.zeros(1, 4, 1, 64)
            return refused(
                lambda: plugin.attention_forward(module, query, keys, keys, None, **options)
            )

        assert "position_bias" in message(position_bias=torch.zeros(1, 4, 1, 1))
        assert "s_aux" in message(s_aux=torch.zeros(4))
        assert "softcap is 30.0" in message(softcap=30.0)
        assert "dropout is 0.1" in message(dropout=0.1)
        assert "is_causal is False" in message(is_causal=False)
        assert "window of 7 tokens" in message(sliding_window=7)
        assert "scale is 0.25" in message(scaling=0.25)


def test_masks_that_are_no_left_padding_are_refused(server, llama):
    prompt = tokens(20)
    masks = {"on the left": torch.ones_like(prompt), "without tokens": torch.zeros_like(prompt)}
    masks["on the left"][0, 10] = 0
    right = torch.ones_like(prompt)
    right[0, -1] = 0
    for says, mask in [*masks.items(), ("on the left", right), ("of one's own", right[None, None])]:
        with make_cache(llama, server) as cache, torch.inference_mode():
            call = lambda: llama(input_ids=prompt, attention_mask=mask, past_key_values=cache)
            assert says in refused(call)


def test_ways_of_generating_that_are_not_covered_are_refused(server, llama):
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 8}):
        with make_cache(llama, server) as cache:
            # Some are refused by Transformers itself, before they reach the cache.
            with pytest.raises((certkv.InvalidArgumentError, ValueError)) as raised:
                generate(llama, tokens(20), cache, 8, **options)
            if isinstance(raised.value, certkv.Error):
                assert raised.value.reason == "ENGINE_UNSUPPORTED", options


def test_forwards_that_are_not_covered_are_refused(server, llama):
    prompt = tokens(60)
    with make_cache(llama, server) as cache, torch.inference_mode():
        embeds = llama.get_input_embeddings()(prompt)
        says = refused(lambda: llama(inputs_embeds=embeds, past_key_values=cache))
        assert "inputs_embeds" in says
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        says = refused(lambda: llama(input_ids=prompt, attention_mask=mask, past_key_values=cache))
        assert "without position_ids" in says
    with make_cache(llama, server) as cache, torch.inference_mode():
        llama(input_ids=prompt[:, :50], past_key_values=cache)
        says = refused(lambda: llama(input_ids=prompt[:, 50:], past_key_values=cache))
        assert "after the prompt" in says
        wrong = torch.tensor([[7]])
        says = refused(
            lambda: llama(input_ids=prompt[:, 50:51], position_ids=wrong, past_key_values=cache)
        )
        assert "position_ids" in says
        # None of these changed the cache: the right step goes on.
        llama(input_ids=prompt[:, 50:51], past_key_values=cache)
        assert len(cache.certificates()) == 2 * 4


def test_attention_and_cache_go_together(server, llama):
    prompt = tokens(20)
    llama.set_attn_implementation("certkv")
    assert "pass past_key_values=" in refused(lambda: llama(input_ids=prompt))
    with make_cache(llama, server) as cache:
        says = refused(lambda: generate(llama, prompt, cache, 2, implementation="sdpa"))
        assert "another attention" in says
    llama.set_attn_implementation("sdpa")
    says = refused(lambda: plugin.CertifiedCache(llama, server.target, original_dtype="float16"))
    assert "attn_implementation='certkv'" in says


def test_other_weights_have_another_fingerprint():
    one, two = (tiny(LlamaConfig, LlamaForCausalLM) for _ in range(2))
    assert plugin.fingerprint(one) == plugin.fingerprint(two)
    with torch.no_grad():
        two.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    assert plugin.fingerprint(one) != plugin.fingerprint(two)


def test_versions_that_were_not_tested_are_refused(server, llama, monkeypatch):
    # Of the module that the client holds: Transformers puts another object into sys.modules when
    # some of its parts are imported late.
    monkeypatch.setattr(_transformers_spec.transformers, "__version__", "4.57.1")
    says = refused(lambda: make_cache(llama, server))
    assert "4.57.1" in says and "5.19.x" in says
    monkeypatch.setenv("CERTKV_ANY_VERSION", "1")
    make_cache(llama, server).close()
