"""vLLM's CPU attention, but for the decode steps of an engine whose connector certifies them."""

from __future__ import annotations

from typing import Any, Optional

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from certkv import _vllm_decode


class CertKVAttentionImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Optional[torch.Tensor] = None,
        output_block_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """As vLLM's: query, key, value, output are [tokens, heads, d]; `output` is written."""
        decoder = _vllm_decode.active_decoder()
        reads = {}
        if decoder is not None and attn_metadata is not None:
            reads = decoder.read_layer(layer.layer_name, query, key, value, attn_metadata)
        # Prompts, and decode steps that go on without the store.
        if attn_metadata is None or len(reads) < attn_metadata.num_actual_tokens:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        for index, read in reads.items():
            output[index] = read.view_as(output[index])
        return output


class CertKVAttentionBackend(CPUAttentionBackend):
    """What certkv._vllm_plugin registers."""

    @staticmethod
    def get_impl_cls() -> type[CertKVAttentionImpl]:
        return CertKVAttentionImpl
