"""Certified decode in vLLM: which steps the scheduler's connector plans, and the worker reads."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
import torch

from certkv._block_io import EngineBlocks
from certkv._client import Client, Sequence
from certkv._decode_rows import DecodeRow, DecodeRows
from certkv._engine import unsupported
from certkv._spec import CacheSpec


@dataclasses.dataclass
class DecodeStep:
    """One token of a request that decodes.

    Attributes:
        request_id: vLLM's own.
        name: the user's, as gate is to know it where it is free.
        token_count: the request's tokens with this one.
        token_id: of it.
        slot: where vLLM keeps its key and value: block id * block tokens + place.
        prefix_ids: of all tokens before it, when the worker can't know them; else empty.
        block_ids: vLLM's blocks with these tokens; else empty.
    """

    request_id: str
    name: str
    token_count: int
    token_id: int
    slot: int
    prefix_ids: list[int]
    block_ids: list[int]


def user_name(request_id: str, is_random: bool) -> str:
    """The id that vLLM was given, of one to which it has appended random digits."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id) if is_random else request_id


class DecodePlan:
    """The scheduler's: which requests of a step decode.

    Args:
        block_tokens: of vLLM's blocks.
        has_random_ids: does vLLM append random digits to request ids?
    """

    def __init__(self, block_tokens: int, has_random_ids: bool) -> None:
        self._block_tokens = block_tokens
        self._has_random_ids = has_random_ids
        self._token_counts: dict[str, int] = {}  # of each request after its last step

    def add_step(
        self, request: Any, new_tokens: int, block_ids: list[int]
    ) -> Optional[DecodeStep]:
        """What a step does for a request, or None unless it computes one token after the prompt.

        Args:
            request: as of PrefixPlan; num_computed_tokens are those before the step.
            new_tokens: that the step computes.
            block_ids: all that the request has.
        """
        place = request.num_computed_tokens
        if new_tokens != 1 or place < request.num_prompt_tokens:
            return None
        ids = request.all_token_ids
        is_next = self._token_counts.get(request.request_id) == place
        self._token_counts[request.request_id] = place + 1
        block, offset = divmod(place, self._block_tokens)
        return DecodeStep(
            request.request_id,
            user_name(request.request_id, self._has_random_ids),
            place + 1,
            ids[place],
            block_ids[block] * self._block_tokens + offset,
            [] if is_next else list(ids[:place]),
            [] if is_next else list(block_ids[: -(-place // self._block_tokens)]),
        )

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._token_counts.pop(request_id, None)


class Decoder:
    """The worker's: reads decode steps from the store. For the worker's thread alone.

    Args:
        rows: of this engine.
        blocks: vLLM's cache.
        spec: of the store's.
        layer_names: vLLM's, in the order of the spec's layers.
    """

    def __init__(
        self,
        rows: DecodeRows,
        blocks: EngineBlocks,
        spec: CacheSpec,
        layer_names: list[str],
    ) -> None:
        self.rows = rows
        self._cache = blocks.paged(spec)
        self._layers = {name: index for index, name in enumerate(layer_names)}
        self._steps: dict[int, DecodeRow] = {}  # by slot, of the forward that runs

    def begin_forward(self, steps: Iterable[DecodeStep]) -> None:
        """Before a forward, whose decode steps these are."""
        self._steps = {
            step.slot: self.rows.begin_token(
                step.request_id,
                step.token_count,
                step.token_id,
                functools.partial(self._prefix, step),
                step.name,
            )
            for step in steps
        }

    def end_forward(self) -> None:
        self._steps = {}

    def read_layer(
        self, layer_name: str, query: Any, key: Any, value: Any, metadata: Any
    ) -> dict[int, torch.Tensor]:
        """Reads of the forward's decode steps, [query heads * d_v] by index of the token.

        Args:
            query, key, value: [tokens, heads, d] of the whole forward.
            metadata: vLLM's CPUAttentionMetadata.
        """
        if not self._steps:
            return {}
        reads = {}
        slots = metadata.slot_mapping[: metadata.num_actual_tokens].tolist()
        for index, slot in enumerate(slots):
            row = self._steps.get(slot)
            if row is None:
                continue
            read = self.rows.read(
                row, self._layers[layer_name], query[index], key[index], value[index]
            )
            if read is not None:
                reads[index] = read
        return reads

    def _prefix(self, step: DecodeStep, client: Client) -> Sequence:
        """The tokens before the step's, put straight from vLLM's cache."""
        if len(step.prefix_ids) != step.token_count - 1:
            # Its row is gone from here and not from the scheduler.
            raise unsupported("the request's tokens weren't sent again")
        return client.put_paged(step.prefix_ids, self._cache, step.block_ids)


_active: Optional[Decoder] = None


def active_decoder() -> Optional[Decoder]:
    """The one of this process's engine, or None."""
    return _active


def set_active_decoder(decoder: Optional[Decoder]) -> None:
    global _active
    _active = decoder


def check_layers(layers: dict[str, Any], spec: CacheSpec, backend: type) -> None:
    """Refuses attention that the certificate doesn't cover.

    Args:
        layers: vLLM's Attention by name.
        backend: class of their implementation.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED].
    """
    for name, layer in layers.items():
        impl = layer.impl
        if type(impl) is not backend:
            raise unsupported(
                f"{name} is computed by {type(impl).__name__}; certified decode needs "
                "`pip install ./clients/python` in vLLM's environment, and 'certkv' in "
                "VLLM_PLUGINS if that is set"
            )
        for what, seen, plain in (
            ("a sliding window", impl.sliding_window, -1),
            ("a soft cap", impl.logits_soft_cap, 0),
            ("ALiBi slopes", impl.alibi_slopes, None),
            ("attention sinks", impl.sinks, None),
            ("the cache of another layer", impl.kv_sharing_target_layer_name, None),
            ("attention of type", impl.attn_type, "decoder"),
            ("query heads", impl.num_heads, spec.query_head_count),
            ("KV heads", impl.num_kv_heads, spec.kv_head_count),
        ):
            is_plain = seen is None if plain is None else seen == plain
            if not is_plain:
                raise unsupported(
                    f"{name} has {what} ({seen}), which certified decode in vLLM doesn't cover; "
                    "leave \"decode\" out of kv_connector_extra_config"
                )
        if not np.isclose(impl.scale, spec.logit_scale, rtol=1e-6):
            raise unsupported(f"{name} scales logits by {impl.scale}, not by {spec.logit_scale}")


def decode_rows(link: Any, options: Any, log: logging.Logger) -> DecodeRows:
    """Of a connector's options."""
    return DecodeRows(link, "vllm", options.terms, options.certificates, log)
