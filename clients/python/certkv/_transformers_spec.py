"""What of a Transformers model the certificate covers, and the CacheSpec of such a model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence as AnySequence
from typing import Any, Optional

import torch
import transformers
from transformers import PreTrainedModel

from certkv import _engine
from certkv._engine import unsupported
from certkv._spec import CacheSpec, LayerSpec

TESTED_VERSIONS = "5.19"
"""Versions of Transformers that this was tested with: 5.19.x. CERTKV_ANY_VERSION=1 tries others."""

MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Models whose attention is softmax(scale * q.k) v over keys after RoPE, or a window of them."""

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Their frequencies depend on how long the prompt is, so equal tokens don't have equal keys.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Settings that change attention, and the values that don't.
_PLAIN_SETTINGS = {
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
}


def check_version() -> None:
    _engine.check_version("transformers", transformers.__version__, TESTED_VERSIONS)


def fingerprint(model: PreTrainedModel) -> str:
    """32 hex digits that differ between models: of the config and a sample of every weight.

    Blocks are shared between runs whose models have one name, so the name must tell weights apart.
    Of each tensor 1,024 numbers or more are hashed, evenly spaced: a fine-tune differs, a handful
    of numbers that were edited by hand may not; give CertifiedCache a `model_name` then.
    """
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:32]


def spec_of(
    model: PreTrainedModel,
    key_format: str = "K8",
    value_format: str = "V4",
    model_name: Optional[str] = None,
    original_dtype: Optional[str] = None,
    layers: Optional[AnySequence[LayerSpec]] = None,
) -> CacheSpec:
    """The cache of a model, every layer in these formats, or as `layers` says.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED | CACHE_SPEC_INVALID].
    """
    return spec_of_config(
        model.config,
        model.dtype,
        model_name or f"{model.config.model_type}-{fingerprint(model)}",
        key_format,
        value_format,
        original_dtype,
        layers,
    )


def spec_of_config(
    config: Any,
    dtype: torch.dtype,
    model_name: str,
    key_format: str,
    value_format: str,
    original_dtype: Optional[str] = None,
    layers: Optional[AnySequence[LayerSpec]] = None,
) -> CacheSpec:
    """The same of a model's config and dtype."""
    if config.model_type not in MODEL_TYPES:
        raise unsupported(
            f"model type '{config.model_type}' is not known to the certificate; known are "
            f"{', '.join(MODEL_TYPES)}"
        )
    for name, plain in _PLAIN_SETTINGS.items():
        if getattr(config, name, None) not in plain:
            raise unsupported(f"config.{name} is {getattr(config, name)}, must be {plain[0]}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    score_scalar = getattr(config, "query_pre_attn_scalar", None) or head_dim
    windows = _windows(config)
    if layers is None:
        witness_bands = 4 if key_format == "FP8_E4M3" else 0
        layers = [LayerSpec(key_format, value_format, witness_bands)] * len(windows)
    if len(layers) != len(windows):
        raise unsupported(f"formats of {len(layers)} layers are given, the model has {len(windows)}")
    return CacheSpec(
        model_name,
        kv_head_count=kv_heads,
        group_size=heads // kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        layers=tuple(
            dataclasses.replace(layer, sliding_window=window)
            for layer, window in zip(layers, windows)
        ),
        rope_pairing="half_split",
        rotary_dim=head_dim,
        rope_theta=_rope_theta(config),
        logit_scale=score_scalar**-0.5,
        original_dtype=_stored_dtype(dtype, original_dtype),
    )


def _windows(config: Any) -> list[int]:
    """Tokens that each layer's queries see, 0 = all."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:  # Mistral: every layer has the window
        return [window] * config.num_hidden_layers
    for index, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise unsupported(f"layer {index} is '{kind}', which is not softmax attention")
    return [window if kind == "sliding_attention" else 0 for kind in types]


def _rope_theta(config: Any) -> float:
    """Base of the frequencies; of the layers that see everything where there are two."""
    rope = config.rope_parameters
    kinds = [rope] if "rope_theta" in rope else list(rope.values())
    for kind in kinds:
        if kind["rope_type"] in _LENGTH_DEPENDENT_ROPE:
            raise unsupported(
                f"RoPE of type '{kind['rope_type']}' rotates by the prompt's length, so stored keys "
                "of a prefix don't fit a longer prompt; load the model with another rope_type"
            )
    return float(rope.get("full_attention", kinds[0])["rope_theta"])


def _stored_dtype(dtype: torch.dtype, original_dtype: Optional[str]) -> str:
    own = _DTYPES.get(dtype)
    if original_dtype is None and own is None:
        raise unsupported(
            f"model is {dtype}, and originals have 16 bits; load it with dtype=torch.float16 "
            "or torch.bfloat16, or pass original_dtype='float16' to round its keys and values"
        )
    if own is not None and original_dtype not in (None, own):
        raise unsupported(f"original_dtype is {original_dtype}, the model is {dtype}")
    if original_dtype not in (None, *_DTYPES.values()):
        raise unsupported(f"original_dtype is {original_dtype}, must be float16 or bfloat16")
    return original_dtype or own
