"""Traces: real keys, values and queries of one prompt, recorded from a Transformers model.

    python -m certkv.trace record --model DIR --prompt FILE --out prompt.safetensors

writes a "certkv-trace-1" file (docs/formats.md), which `certkv demo`, `certkv calibrate` and the
benchmarks read. Keys, values and queries are rounded to float16 before the model's attention uses
them, so the file has what was used, bit for bit.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence as AnySequence
from typing import Any, Optional, Union

import numpy as np
import safetensors.numpy
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from certkv import _errors
from certkv._engine import unsupported
from certkv._spec import CacheSpec
from certkv._transformers_attention import check_call, token_major
from certkv._transformers_spec import check_version, spec_of

FORMAT = "certkv-trace-1"
IMPLEMENTATION = "certkv_record"
"""Name of the attention implementation that records."""


def _invalid(message: str) -> _errors.Error:
    return _errors.error_of("INVALID_ARGUMENT", "TRACE_INVALID", message)


class _Recorder:
    """Tensors of one forward: name -> array."""

    def __init__(self, spec: CacheSpec, layers: AnySequence[int], query_count: int) -> None:
        self.spec = spec
        self.tensors: dict[str, np.ndarray] = {}
        self._layers = frozenset(layers)
        self._query_count = query_count

    def keep(self, layer: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, d] as float16 has it, in the model's dtype."""
        rounded = tensor.to(torch.float16)
        if not bool(torch.isfinite(rounded).all()):
            raise _invalid(
                f"layer {layer}: the largest {name} is {float(tensor.abs().max()):g}, float16 ends "
                "at 65504; a trace can't hold this prompt of this model"
            )
        if layer in self._layers:
            last = rounded[0, :, -self._query_count :] if name == "query" else rounded[0]
            self.tensors[f"layers.{layer}.{name}"] = token_major(last).numpy()
        return rounded.to(tensor.dtype)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    certkv_recorder: Optional[_Recorder] = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention "certkv_record": sdpa over keys, values and queries of 16 bits, kept."""
    if certkv_recorder is None:
        raise unsupported(f"attention '{IMPLEMENTATION}' is certkv.trace.record's alone")
    check_call(certkv_recorder.spec, module, scaling, others)
    query, key, value = (
        certkv_recorder.keep(module.layer_idx, name, tensor)
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def record(
    model: PreTrainedModel,
    token_ids: AnySequence[int],
    path: Union[str, pathlib.Path],
    *,
    query_count: int = 64,
    layers: Optional[AnySequence[int]] = None,
    model_name: Optional[str] = None,
    model_license: str = "not stated",
) -> CacheSpec:
    """Runs the prompt through the model and writes the trace.

    Args:
        model: of a type that certkv.transformers knows, of any float dtype. Its attention
            implementation is as before when the call returns.
        token_ids: the prompt, [tokens].
        path: of the file; it is replaced when the trace is complete.
        query_count: queries of so many last positions are kept, in [1, tokens].
        layers: numbers of those that are kept, rising; None = all.
        model_name: None = the name under which certkv.transformers shares blocks of the model.
        model_license: free text.

    Returns:
        The cache of the whole model, with the default formats.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], the model has a feature that the certificate or
            the file doesn't know; [TRACE_INVALID], an argument is out of range, or a number is too
            large for float16.
        OSError: the file can't be written.
    """
    check_version()
    spec = spec_of(model, model_name=model_name, original_dtype=_rounded_dtype(model))
    count = len(token_ids)
    if not 1 <= query_count <= count:
        raise _invalid(f"queries of {query_count} positions are asked, must be in [1, {count}]")
    longest = getattr(model.config, "max_position_embeddings", count)
    if count > longest:
        raise _invalid(f"the prompt has {count} tokens, the model takes {longest}; take fewer")
    kept = list(range(len(spec.layers))) if layers is None else list(layers)
    if not kept or kept != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < len(spec.layers):
        raise _invalid(f"layers are {kept}, must be rising numbers in [0, {len(spec.layers) - 1}]")
    for layer in kept:
        window = spec.layers[layer].sliding_window
        if 0 < window < count:
            raise unsupported(
                f"layer {layer} sees the last {window} tokens of {count}, and a trace has no "
                "windows; take a shorter prompt or other layers"
            )
    recorder = _Recorder(spec, kept, query_count)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        with torch.inference_mode():
            model.base_model(
                input_ids=torch.tensor([list(token_ids)], device=model.device),
                past_key_values=DynamicCache(config=model.config),
                use_cache=True,
                certkv_recorder=recorder,
            )
    finally:
        model.set_attn_implementation(before)
    lacking = len(kept) * 3 - len(recorder.tensors)
    if lacking:
        raise unsupported(f"{lacking} arrays of keys, values or queries were not seen")
    _write(path, recorder.tensors, token_ids, spec, kept, query_count, model_license)
    return spec


def _rounded_dtype(model: PreTrainedModel) -> Optional[str]:
    """What spec_of is told: a float32 model's numbers are rounded to float16."""
    return "float16" if model.dtype == torch.float32 else None


def _write(
    path: Union[str, pathlib.Path],
    tensors: dict[str, np.ndarray],
    token_ids: AnySequence[int],
    spec: CacheSpec,
    layers: list[int],
    query_count: int,
    model_license: str,
) -> None:
    count = len(token_ids)
    tensors = {
        "token_ids": np.array(token_ids, np.int32),
        "query_positions": np.arange(count - query_count, count, dtype=np.int32),
        **tensors,
    }
    metadata = {
        "format": FORMAT,
        "model": spec.model,
        "model_license": model_license,
        "layers": ",".join(map(str, layers)),
        "head_dim": str(spec.head_dim),
        "kv_heads": str(spec.kv_head_count),
        "query_heads": str(spec.query_head_count),
        "rope": spec.rope_pairing,
        "rotary_dim": str(spec.rotary_dim),
        "rope_theta": repr(spec.rope_theta),
        "logit_scale": repr(spec.logit_scale),
        "dtype": "float16",
    }
    target = pathlib.Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        safetensors.numpy.save_file(tensors, partial, metadata)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="certkv trace", description="Traces of real models")
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser(
        "record",
        help="write the keys, values and queries of one prompt",
        description="Runs a prompt through a Transformers model on the CPU and writes its keys "
        "and queries (after RoPE) and values to a safetensors file.",
    )
    make.add_argument("--model", required=True, metavar="DIR", help="folder of a Transformers model")
    make.add_argument("--prompt", required=True, metavar="FILE", help="text, UTF-8")
    make.add_argument("--out", required=True, metavar="FILE", help="the trace")
    make.add_argument("--tokens", type=int, metavar="N", help="only the prompt's first N tokens")
    make.add_argument(
        "--queries", type=int, default=64, metavar="N", help="of the last N positions (64)"
    )
    make.add_argument("--layers", type=_numbers, metavar="0,9,...", help="only these layers")
    make.add_argument("--name", help="the model's name (a fingerprint of config and weights)")
    make.add_argument("--license", default="not stated", help="the model's licence, free text")
    make.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="that the model is computed in (float32)",
    )
    return parser


def main(arguments: Optional[AnySequence[str]] = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        text = pathlib.Path(options.prompt).read_text(encoding="utf-8")
        token_ids = tokenizer(text)["input_ids"][: options.tokens]
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        spec = record(
            model,
            token_ids,
            options.out,
            query_count=options.queries,
            layers=options.layers,
            model_name=options.name,
            model_license=options.license,
        )
    except (_errors.Error, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(token_ids)} tokens of {spec}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
