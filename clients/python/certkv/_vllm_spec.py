"""What of a vLLM engine its connector covers, and the CacheSpec of such an engine's blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec

from certkv import _engine
from certkv._engine import read_options, unsupported, weights_fingerprint
from certkv._kv_layout import BlockLayout
from certkv._spec import CacheSpec
from certkv._vllm_versions import TESTED_VERSIONS as TESTED_VERSIONS

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TILE_TOKENS = 64
_BLOCK_TOKENS_MAX = 1024


@dataclasses.dataclass(frozen=True)
class ConnectorOptions:
    """What kv_connector_extra_config may hold.

    Attributes:
        target: of the store, as for certkv.Client; "" = certkvd's default socket.
        load: "exact" = the bits that were saved. "quantized" = what the quantized planes decode to:
            each key and value is within its format's proven bound of the original, but attention
            computed from them has no certificate and no repair, and text may differ. Blocks that
            engines with "quantized" save are kept apart from those of "exact" ones.
        key_format, value_format: how blocks are stored, see certkv.LayerSpec. "BF16" or "F16" (the
            engine's own dtype) keep no quantized copy and take any number.
        model_name: under which blocks are shared; "" = a fingerprint of config and weights, of a
            model that is a local folder or file.
        save_queue_mib: copies of blocks that wait to be saved, at most.
        rpc_timeout_ms: the longest that one question to the store may take.
        client: other options of certkv.Client: tenant, ca_file, token_file, ...
        decode: "engine" = vLLM's own attention. "certified" = every token after the prompt is read
            from the store: an output of a layer is certified within tolerance, or exact, or vLLM's
            own where the store can't answer, which is logged.
        spec: with certified decode, path of what `certkv calibrate --spec` wrote, whose layers are
            taken in place of key_format and value_format.
        terms: of certkv.Client.open_request, with certified decode: tv_tolerance, read_mode, ...
        certificates: folder into which a request's certificates go when it ends, as NAME.npy of
            certkv.CERTIFICATE_DTYPE; "" = nowhere.
    """

    target: str = ""
    load: str = "exact"
    key_format: str = "K8"
    value_format: str = "V4"
    model_name: str = ""
    save_queue_mib: int = 256
    rpc_timeout_ms: int = 10_000
    client: dict[str, Any] = dataclasses.field(default_factory=dict)
    decode: str = "engine"
    spec: str = ""
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)
    certificates: str = ""

    @property
    def is_certified(self) -> bool:
        return self.decode == "certified"

    @staticmethod
    def of(given: dict[str, Any]) -> ConnectorOptions:
        options = read_options(ConnectorOptions, given, "kv_connector_extra_config")
        if options.load not in ("exact", "quantized"):
            raise unsupported(f"load is '{options.load}', must be exact or quantized")
        if options.decode not in ("engine", "certified"):
            raise unsupported(f"decode is '{options.decode}', must be engine or certified")
        if options.is_certified and options.load != "exact":
            raise unsupported(
                f"load is '{options.load}' with certified decode, which would certify reads of "
                "keys that are no originals; must be exact"
            )
        for name in ("spec", "terms", "certificates"):
            if getattr(options, name) and not options.is_certified:
                raise unsupported(f"{name} is set, and decode is 'engine'; set it to 'certified'")
        for name in ("save_queue_mib", "rpc_timeout_ms"):
            if getattr(options, name) < 1:
                raise unsupported(f"{name} is {getattr(options, name)}, must be at least 1")
        return options


def check_version() -> None:
    _engine.check_version("vllm", vllm.__version__, TESTED_VERSIONS)


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """An engine's blocks.

    Attributes:
        spec: of the store's cache.
        engine_tokens, store_tokens: of a block; engines with small blocks have several in one of
            the store's.
        layer_names: in the order of the spec's layers.
        dtype: of keys and values.
        rank_count: tensor-parallel workers.
    """

    spec: CacheSpec
    engine_tokens: int
    store_tokens: int
    layer_names: list[str]
    dtype: torch.dtype
    rank_count: int

    @property
    def per_store_block(self) -> int:
        return self.store_tokens // self.engine_tokens


def shape_of(config: Any, cache: Any, options: ConnectorOptions) -> EngineShape:
    """The blocks of an engine with a VllmConfig and a KVCacheConfig.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], by name; [CACHE_SPEC_INVALID].
    """
    _check_features(config)
    if len(cache.kv_cache_groups) != 1:
        raise unsupported(
            f"the model has {len(cache.kv_cache_groups)} groups of layers with their own caches; "
            "start vLLM with --disable-hybrid-kv-cache-manager, which makes them one where all are "
            "attention, with and without a sliding window"
        )
    group = cache.kv_cache_groups[0]
    layers = group.kv_cache_spec
    if type(layers) is not FullAttentionSpec:
        raise unsupported(
            f"the cache is a {type(layers).__name__}; only keys and values of full attention, or "
            "of sliding windows kept in full, can be stored"
        )
    model = config.model_config
    if layers.dtype not in _DTYPES or layers.dtype != model.dtype:
        raise unsupported(
            f"the cache holds {layers.dtype} of a {model.dtype} model, and only 16 bits of the "
            "model's own dtype are stored; start vLLM with --dtype bfloat16 or float16 and "
            "--kv-cache-dtype auto"
        )
    tokens = layers.block_size
    if cache.hash_block_size not in (None, tokens):
        raise unsupported(f"block hashes are of {cache.hash_block_size} tokens, blocks of {tokens}")
    store_tokens = math.lcm(tokens, _TILE_TOKENS)
    if store_tokens > _BLOCK_TOKENS_MAX:
        raise unsupported(
            f"blocks of {tokens} tokens need blocks of {store_tokens} tokens in the store, at most "
            f"{_BLOCK_TOKENS_MAX}; start vLLM with --block-size 128"
        )
    parallel = config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    dtype = _DTYPES[layers.dtype]
    name = options.model_name or weights_fingerprint(
        model.model,
        model.hf_config.to_json_string(),
        "model_name in kv_connector_extra_config",
    )
    decode = ""
    if options.is_certified:
        if parallel.tensor_parallel_size != 1:
            raise unsupported(
                f"tensor_parallel_size is {parallel.tensor_parallel_size}, must be 1 with "
                "certified decode"
            )
        decode = " decode=certified"  # its later tokens are computed from certified outputs
    spec = CacheSpec.uniform(
        # What else tells blocks apart: ranks split heads, and what follows a quantized load is
        # computed from other keys and values.
        f"vllm {name} dtype={model.dtype} quantization={model.quantization} "
        f"ranks={parallel.tensor_parallel_size} load={options.load}{decode}",
        layer_count=len(group.layer_names),
        kv_head_count=layers.num_kv_heads,
        group_size=max(1, heads // layers.num_kv_heads),
        head_dim=layers.head_size,
        value_dim=layers.head_size_v,
        key_format=options.key_format,
        value_format=options.value_format,
        block_tokens=store_tokens,
        rope_pairing="none",  # of use for reads through the certifier alone
        original_dtype=dtype,
    )
    if options.spec:
        spec = dataclasses.replace(spec, layers=CacheSpec.from_file(options.spec).layers)
        if len(spec.layers) != len(group.layer_names):
            raise unsupported(
                f"{options.spec} has {len(spec.layers)} layers, the model {len(group.layer_names)}"
            )
    return EngineShape(
        spec,
        tokens,
        store_tokens,
        sorted(group.layer_names, key=_layer_order),
        layers.dtype,
        parallel.tensor_parallel_size,
    )


def _layer_order(name: str) -> list[Any]:
    """Layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _check_features(config: Any) -> None:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise unsupported(
            f"kv_load_failure_policy is '{transfer.kv_load_failure_policy}', with which a request "
            "fails when the store does; set it to 'recompute' in --kv-transfer-config"
        )
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            raise unsupported(f"{name} is {getattr(parallel, name)}, must be 1")
    if config.speculative_config is not None:
        raise unsupported("speculative decoding keeps caches of a second model; leave it out")
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash"):
        raise unsupported(
            f"block hashes are made by {algorithm}, whose collisions can be made; start vLLM with "
            "--prefix-caching-hash-algo sha256 or sha256_cbor"
        )
    if not config.cache_config.enable_prefix_caching:
        raise unsupported("prefix caching is off, so there are no block hashes; leave it on")


def layer_arrays(caches: dict[str, torch.Tensor], shape: EngineShape) -> list[np.ndarray]:
    """Views of an engine's cache tensors for EngineBlocks.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], a tensor isn't what the CPU attention back end
            allocates: [blocks, KV heads, block tokens, 2 * channels], contiguous.
    """
    spec = shape.spec
    if sorted(caches) != sorted(shape.layer_names):
        raise unsupported(
            f"the engine registers caches of {len(caches)} layers, its config names "
            f"{len(shape.layer_names)}"
        )
    arrays = []
    for name in shape.layer_names:
        tensor = caches[name]
        wanted = (spec.kv_head_count, shape.engine_tokens, spec.head_dim + spec.value_dim)
        if (
            tensor.device.type != "cpu"
            or tensor.dtype != shape.dtype
            or tensor.dim() != 4
            or tuple(tensor.shape[1:]) != wanted
            or not tensor.is_contiguous()
        ):
            raise unsupported(
                f"the cache of {name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                f"strides {tensor.stride()}; known is a contiguous (blocks, "
                f"{', '.join(map(str, wanted))}) {shape.dtype} on the CPU: KV heads, tokens, keys "
                "and values"
            )
        bits = tensor.view(torch.int16).numpy().view(np.uint16)
        arrays.append(bits.reshape(bits.shape[0], spec.kv_head_count, 2, -1))
    if len({array.__array_interface__["data"][0] for array in arrays}) != len(arrays):
        raise unsupported("several layers share one cache")
    return arrays


def probe_layout(config: Any, shape: EngineShape) -> BlockLayout:
    """The order inside a block, asked of the attention back end's own write."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    spec, tokens = shape.spec, shape.engine_tokens
    cache_dtype = config.cache_config.cache_dtype
    isa = cpu_attn._get_attn_isa(shape.dtype, tokens, spec.head_dim, cache_dtype)

    def write(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        # The second of two blocks, as CPUAttentionBackendImpl.do_kv_cache_update fills it.
        blocks = torch.zeros((2, spec.kv_head_count, 2 * tokens, spec.head_dim), dtype=shape.dtype)
        key_cache, value_cache = blocks.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            torch.from_numpy(np.ascontiguousarray(keys, np.float32)).to(shape.dtype),
            torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(shape.dtype),
            key_cache,
            value_cache,
            torch.arange(tokens, 2 * tokens, dtype=torch.int64),
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=cache_dtype,
        )
        if bool((blocks[0] != 0).any()):
            raise unsupported(f"the CPU attention for {isa} writes beside the block it was given")
        return blocks[1].float().numpy().reshape(spec.kv_head_count, 2, tokens * spec.head_dim)

    return BlockLayout.probe(write, tokens, spec.kv_head_count, spec.head_dim)
