"""What CertKVConnector takes of a vLLM engine and what it refuses, without starting one."""

import types

import certkv
import numpy as np
import pytest
import torch
import vllm
from certkv import _vllm_spec
from certkv.vllm import CertKVConnector, CertKVStats
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in (0, 1, 2, 10)]


@pytest.fixture()
def model_path(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(np.arange(300_000, dtype=np.uint32).tobytes())
    return tmp_path


def make_config(model_path, **changes):
    """The parts of a VllmConfig that are looked at; `changes` are "part.name": value."""
    hf_config = types.SimpleNamespace(to_json_string=lambda: '{"hidden_size": 576}')
    parts = {
        "model_config": dict(
            model=str(model_path),
            dtype=torch.bfloat16,
            quantization=None,
            hf_config=hf_config,
            get_num_attention_heads=lambda _: 9,
        ),
        "parallel_config": dict(tensor_parallel_size=1, pipeline_parallel_size=1),
        "cache_config": dict(
            prefix_caching_hash_algo="sha256", enable_prefix_caching=True, cache_dtype="auto"
        ),
        "kv_transfer_config": dict(
            is_kv_producer=True,
            is_kv_consumer=True,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={},
        ),
    }
    config = types.SimpleNamespace(speculative_config=None)
    for part, fields in parts.items():
        setattr(config, part, types.SimpleNamespace(**fields))
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        setattr(getattr(config, part) if part else config, field, value)
    return config


def make_cache(kind=FullAttentionSpec, groups=1, hash_block_size=None, **changes):
    spec = dict(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, **changes)
    if kind is SlidingWindowSpec:
        spec["sliding_window"] = 512
    group = types.SimpleNamespace(layer_names=LAYERS[::-1], kv_cache_spec=kind(**spec))
    return types.SimpleNamespace(kv_cache_groups=[group] * groups, hash_block_size=hash_block_size)


def shape_of(model_path, cache=None, options=None, **changes):
    return _vllm_spec.shape_of(
        make_config(model_path, **changes),
        cache or make_cache(),
        _vllm_spec.ConnectorOptions.of(options or {}),
    )


def test_the_shape_of_an_engine(model_path):
    shape = shape_of(model_path)
    spec = shape.spec
    assert shape.layer_names == LAYERS  # in their order, 10 after 2
    assert (spec.kv_head_count, spec.group_size, spec.head_dim, len(spec.layers)) == (3, 3, 64, 4)
    assert (spec.block_tokens, spec.original_dtype) == (128, "bfloat16")
    assert (shape.engine_tokens, shape.store_tokens, shape.per_store_block) == (128, 128, 1)


def test_small_blocks_are_several_to_one_of_the_store(model_path):
    cache = make_cache()
    for tokens, store, parts in ((32, 64, 2), (96, 192, 2), (64, 64, 1), (1024, 1024, 1)):
        cache.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
            block_size=tokens, num_kv_heads=3, head_size=64, dtype=torch.bfloat16
        )
        shape = shape_of(model_path, cache)
        assert (shape.spec.block_tokens, shape.per_store_block) == (store, parts)


def test_whatever_changes_numbers_changes_the_spec(model_path):
    digests = [shape_of(model_path).spec.digest]
    digests.append(shape_of(model_path, options={"load": "quantized"}).spec.digest)
    digests.append(shape_of(model_path, options={"model_name": "m@1"}).spec.digest)
    digests.append(shape_of(model_path, options={"key_format": "K6"}).spec.digest)
    digests.append(shape_of(model_path, **{"model_config.quantization": "awq"}).spec.digest)
    digests.append(shape_of(model_path, **{"parallel_config.tensor_parallel_size": 2}).spec.digest)
    config = types.SimpleNamespace(to_json_string=lambda: '{"rope_theta": 1}')
    digests.append(shape_of(model_path, **{"model_config.hf_config": config}).spec.digest)
    weights = model_path / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    for at in range(0, len(changed), 5000):  # a fine-tune, not one number
        changed[at] ^= 1
    weights.write_bytes(changed)
    digests.append(shape_of(model_path).spec.digest)
    (model_path / "model.safetensors").rename(model_path / "other.safetensors")
    digests.append(shape_of(model_path).spec.digest)
    assert len(set(digests)) == len(digests)
    assert shape_of(model_path).spec.digest == digests[-1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_transfer_config.kv_load_failure_policy": "fail"}, "set it to 'recompute'"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config.decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"cache_config.prefix_caching_hash_algo": "xxhash_cbor"}, "sha256 or sha256_cbor"),
        ({"cache_config.enable_prefix_caching": False}, "prefix caching is off"),
        ({"model_config.model": "someone/some-model"}, "set model_name"),
        ({"model_config.dtype": torch.float16}, "bfloat16 of a torch.float16 model"),
    ],
)
def test_settings_that_are_refused_by_name(model_path, changes, message):
    with pytest.raises(certkv.InvalidArgumentError, match=message) as raised:
        shape_of(model_path, **changes)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


@pytest.mark.parametrize(
    "cache, message",
    [
        (make_cache(groups=2), "--disable-hybrid-kv-cache-manager"),
        (make_cache(SlidingWindowSpec), "SlidingWindowSpec"),
        (make_cache(hash_block_size=64), "block hashes are of 64 tokens"),
    ],
)
def test_caches_that_are_refused_by_name(model_path, cache, message):
    with pytest.raises(certkv.InvalidArgumentError, match=message) as raised:
        shape_of(model_path, cache)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def test_a_cache_of_32_bits_or_of_long_blocks_is_refused(model_path):
    for field, value, message in (
        ("dtype", torch.float32, "--dtype bfloat16 or float16"),
        ("block_size", 2048, "--block-size 128"),
    ):
        cache = make_cache()
        spec = dict(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        cache.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(**{**spec, field: value})
        with pytest.raises(certkv.InvalidArgumentError, match=message):
            shape_of(model_path, cache)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"taget": "unix:/x"}, "has 'taget'; known are target"),
        ({"load": "lossy"}, "must be exact or quantized"),
        ({"save_queue_mib": 0}, "must be at least 1"),
        ({"save_queue_mib": "256"}, "must be a int"),
        ({"client": "x"}, "must be a dict"),
    ],
)
def test_options_that_are_refused_by_name(options, message):
    with pytest.raises(certkv.InvalidArgumentError, match=message):
        _vllm_spec.ConnectorOptions.of(options)


def test_another_version_is_refused_with_the_range_and_a_way_out(monkeypatch):
    _vllm_spec.check_version()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        _vllm_spec.check_version()
    assert raised.value.reason == "ENGINE_UNSUPPORTED"
    assert "tested is 0.32.x" in raised.value.message
    assert "CERTKV_ANY_VERSION=1" in raised.value.message
    monkeypatch.setenv("CERTKV_ANY_VERSION", "1")
    _vllm_spec.check_version()


def make_tensors(shape, change=lambda tensor: tensor):
    wanted = (6, 3, shape.engine_tokens, 128)
    return {name: change(torch.zeros(wanted, dtype=torch.bfloat16)) for name in LAYERS}


def test_cache_tensors_are_viewed_and_not_copied(model_path):
    shape = shape_of(model_path)
    tensors = make_tensors(shape)
    arrays = _vllm_spec.layer_arrays(tensors, shape)
    arrays[3][5, 2, 1, 7] = 0x3F80
    assert tensors[LAYERS[3]].view(6, 3, 2, -1)[5, 2, 1, 7] == 1
    assert all(int((tensors[name] != 0).sum()) == 0 for name in LAYERS[:3])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.float(),
        lambda tensor: tensor.transpose(1, 2),
        lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
        lambda tensor: tensor[:, :2].contiguous(),
        lambda tensor: tensor.view(6, 3, 2, -1),
        lambda tensor: tensor.view(2, 3, 3, 128, 128),
        lambda tensor: tensor.to("meta"),
    ],
)
def test_cache_tensors_that_are_not_recognized_are_refused(model_path, change):
    shape = shape_of(model_path)
    with pytest.raises(certkv.InvalidArgumentError, match="the cache of model.layers.0") as raised:
        _vllm_spec.layer_arrays(make_tensors(shape, change), shape)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def test_layers_that_share_a_cache_or_are_missing_are_refused(model_path):
    shape = shape_of(model_path)
    tensors = make_tensors(shape)
    tensors[LAYERS[1]] = tensors[LAYERS[0]]
    with pytest.raises(certkv.InvalidArgumentError, match="share one cache"):
        _vllm_spec.layer_arrays(tensors, shape)
    del tensors[LAYERS[1]]
    with pytest.raises(certkv.InvalidArgumentError, match="caches of 3 layers"):
        _vllm_spec.layer_arrays(tensors, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, head_dim", [(32, 64), (64, 128), (128, 64), (128, 80)])
def test_the_layout_that_is_learnt_is_that_of_the_attention(model_path, dtype, tokens, head_dim):
    config = make_config(model_path, **{"model_config.dtype": dtype})
    cache = make_cache()
    cache.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=3, head_size=head_dim, dtype=dtype
    )
    shape = _vllm_spec.shape_of(config, cache, _vllm_spec.ConnectorOptions())
    layout = _vllm_spec.probe_layout(config, shape)
    # What the attention writes of two sequences of one block, token by token.
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2 * tokens, 3, head_dim).to(dtype)
    blocks = torch.zeros(4, 3, 2 * tokens, head_dim, dtype=dtype)
    slots = torch.cat([torch.arange(tokens), torch.arange(3 * tokens, 4 * tokens)])
    isa = cpu_attn._get_attn_isa(dtype, tokens, head_dim, "auto")
    for token in range(2 * tokens):
        one = slice(token, token + 1)
        ops.cpu_attn_reshape_and_cache(
            keys[one], values[one], *blocks.chunk(2, dim=2), slots[one], isa, 1.0, 1.0, "auto"
        )
    bits = blocks.view(torch.int16).numpy().view(np.uint16).reshape(4, 3, 2, tokens * head_dim)
    stored = np.empty_like(bits[0])
    for block, first in ((0, 0), (3, tokens)):
        for part, (rows, channels) in enumerate((layout.key_order, layout.value_order)):
            stored[:, part] = bits[block][:, part, (rows[:, None] + channels).reshape(-1)]
        for part, truth in enumerate((keys, values)):
            wanted = truth[first : first + tokens].transpose(0, 1).reshape(3, -1)
            seen = torch.from_numpy(stored[:, part].view(np.int16).copy()).view(dtype)
            torch.testing.assert_close(seen, wanted, rtol=0, atol=0)


def test_counters_add_up():
    stats = CertKVConnector.build_kv_connector_stats({"saved_blocks": 2})
    assert isinstance(stats, CertKVStats) and not stats.is_empty()
    stats.aggregate(CertKVStats(data={"saved_blocks": 1, "loaded_blocks": 4}))
    assert stats.reduce() == {"saved_blocks": 3, "loaded_blocks": 4}
    stats.reset()
    assert stats.is_empty()


def test_a_connector_of_a_store_that_is_away_starts_and_says_so(model_path, tmp_path, caplog):
    options = {"target": f"unix:{tmp_path}/none.sock"}
    config = make_config(
        model_path, **{"kv_transfer_config.kv_connector_extra_config": options}
    )
    connector = CertKVConnector(config, KVConnectorRole.SCHEDULER, make_cache())
    request = types.SimpleNamespace(
        request_id="r",
        num_tokens=300,
        num_computed_tokens=0,
        all_token_ids=list(range(300)),
        block_hashes=[b"a" * 32, b"b" * 32],
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
    )
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.get_kv_connector_stats().reduce() == {"lookups_without_store": 1}
    assert connector.get_kv_connector_stats() is None
    connector.request_finished_all_groups(request, ([],))
    connector.shutdown()
    assert caplog.text.count("the store is away") == 1
