"""CacheSpec: geometry and numerics of one model's KV cache."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any, Union

from certkv import _errors, _native


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """How one layer is stored.

    Attributes:
        key_format: "K8", "K8D", "K6", "K4", "FP8_E4M3" (needs witness_bands = 4), "F16" or "BF16".
        value_format: "V4", "V8", "F16" or "BF16".
        witness_bands: bytes of the token witness: 0, 1 or 4.
        fp8_key_scale: FP8_E4M3 only: the tensor's scale.
        sliding_window: tokens that a query sees, itself included; 0 = all.
        witness_weights: weight of each channel in the token witness, [kv_head_count][head_dim], in
            [1/256, 256]; empty: all 1. Any are sound; those chosen from a model's queries make
            bounds tighter. Needs witness_bands.
    """

    key_format: str = "K8"
    value_format: str = "V4"
    witness_bands: int = 0
    fp8_key_scale: float = 1.0
    sliding_window: int = 0
    witness_weights: tuple[tuple[float, ...], ...] = ()


# How the proto names the values of these fields: a prefix, then the name here.
_ENUMS = {
    "key_format": "KEY_FORMAT_",
    "value_format": "VALUE_FORMAT_",
    "rope_pairing": "ROPE_PAIRING_",
    "original_dtype": "ORIGINAL_DTYPE_",
}
_NAMES = {"F16": "float16", "BF16": "bfloat16"}  # of dtypes


def _rows(flat: Any, rows: int, columns: int) -> tuple[tuple[float, ...], ...]:
    """[rows * columns] -> [rows][columns]; nothing stays nothing."""
    if not flat:
        return ()
    if len(flat) != rows * columns:
        raise TypeError(f"{len(flat)} witness weights for {rows} heads of {columns} channels")
    return tuple(tuple(flat[row * columns :][:columns]) for row in range(rows))


def _from_proto(kind: Any, fields: dict[str, Any]) -> Any:
    """`kind` of a JSON object with the proto's names."""
    made = {}
    for name, value in fields.items():
        if name in _ENUMS:
            value = value.removeprefix(_ENUMS[name])
        if name == "rope_pairing":
            value = value.lower()
        if name == "original_dtype":
            value = _NAMES[value]
        made[name] = value
    return kind(**made)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything that changes what stored bytes mean. It is checked when it is made.

    Attributes:
        model: name and revision of the weights, 1 to 256 bytes. Caches of equal specs share blocks.
        kv_head_count: KV heads, [1, 256].
        group_size: query heads per KV head, [1, 16].
        head_dim: channels of a key, d: 64, 80, 96, 128 or 256.
        value_dim: channels of a value, d_v.
        layers: a LayerSpec for each layer, [1, 256].
        block_tokens: tokens of a block, a multiple of 64 in [64, 1024].
        rope_pairing: which channels RoPE rotates together: "interleaved" (2i, 2i+1), "half_split"
            (i, i + rotary_dim/2; the Llama models of Transformers) or "none". Keys are stored
            after RoPE.
        rotary_dim: rotated channels; 0 exactly when rope_pairing is "none".
        rope_theta: base of the rotary frequencies.
        logit_scale: what q.k is multiplied by, normally 1/sqrt(head_dim).
        soft_cap: cap * tanh(logit / cap), in nats; 0 = none.
        original_dtype: "float16" or "bfloat16", of the keys and values that are put.

    Raises:
        InvalidArgumentError: [CACHE_SPEC_INVALID], naming the field, the value and the limit.
    """

    model: str
    kv_head_count: int
    group_size: int
    head_dim: int
    value_dim: int
    layers: tuple[LayerSpec, ...]
    block_tokens: int = 64
    rope_pairing: str = "half_split"
    rotary_dim: int = 0
    rope_theta: float = 10000.0
    logit_scale: float = 0.0
    soft_cap: float = 0.0
    original_dtype: str = "float16"

    def __post_init__(self) -> None:
        _native.describe_spec(self)

    @staticmethod
    def uniform(
        model: str,
        *,
        layer_count: int,
        kv_head_count: int,
        group_size: int,
        head_dim: int,
        key_format: str = "K8",
        value_format: str = "V4",
        **others: Any,
    ) -> CacheSpec:
        """A spec with all layers alike, and the usual numbers where `others` says nothing.

        Defaults: value_dim = head_dim, logit_scale = 1/sqrt(head_dim), rotary_dim = head_dim (0
        with rope_pairing="none"); witness_bands = 4 for FP8_E4M3.
        """
        layer = LayerSpec(
            key_format,
            value_format,
            witness_bands=others.pop("witness_bands", 4 if key_format == "FP8_E4M3" else 0),
            fp8_key_scale=others.pop("fp8_key_scale", 1.0),
            sliding_window=others.pop("sliding_window", 0),
        )
        others.setdefault("value_dim", head_dim)
        others.setdefault("logit_scale", 1 / math.sqrt(head_dim))
        others.setdefault("rotary_dim", 0 if others.get("rope_pairing") == "none" else head_dim)
        return CacheSpec(
            model=model,
            kv_head_count=kv_head_count,
            group_size=group_size,
            head_dim=head_dim,
            layers=(layer,) * layer_count,
            **others,
        )

    @staticmethod
    def from_file(path: Union[str, pathlib.Path]) -> CacheSpec:
        """The spec that `certkv calibrate --spec` wrote: JSON of certkv.type.CacheSpec.

        Raises:
            InvalidArgumentError: [CACHE_SPEC_INVALID], the file has something else.
            OSError: it can't be read.
        """
        text = pathlib.Path(path).read_text(encoding="utf-8")
        try:
            fields = json.loads(text)
            heads, channels = fields["kv_head_count"], fields["head_dim"]
            layers = [
                _from_proto(
                    LayerSpec,
                    {**layer, "witness_weights": _rows(layer.get("witness_weights"), heads, channels)},
                )
                for layer in fields.pop("layers")
            ]
            return _from_proto(CacheSpec, {**fields, "layers": tuple(layers)})
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise _errors.error_of(
                "INVALID_ARGUMENT",
                "CACHE_SPEC_INVALID",
                f"{path} is not JSON of certkv.type.CacheSpec ({error!r}); write it with "
                "certkv calibrate --spec",
            ) from error

    @property
    def query_head_count(self) -> int:
        """Query heads: kv_head_count * group_size. Query head h reads KV head h // group_size."""
        return self.kv_head_count * self.group_size

    @property
    def digest(self) -> bytes:
        """SHA-256 over all fields, 32 bytes: part of every block's key."""
        return _native.digest_spec(self)

    def __str__(self) -> str:
        return _native.describe_spec(self)
