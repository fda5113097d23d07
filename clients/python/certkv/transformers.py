"""HF Transformers: decode steps of generate() through certified attention.

    import certkv.transformers
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype="float16", attn_implementation="certkv")
    with certkv.transformers.CertifiedCache(model, target=server.target) as cache:
        model.generate(**inputs, past_key_values=cache)
        cache.certificates()["worst_case_tv"].max(), cache.risk().risk_score

Importing this module registers the attention implementation "certkv". The prompt is computed as
with "sdpa". Then its keys and values go into the store, and every later token is read from there:
an output of a layer is certified within tolerance, or exact, or generate() raises a certkv.Error.
Whatever the certificate doesn't cover is refused by name, with [ENGINE_UNSUPPORTED].
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from typing import Any, Optional

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from certkv._client import Client, Sequence
from certkv._reads import CERTIFICATE_DTYPE, Attention
from certkv._request import RiskSummary
from certkv._spec import LayerSpec
from certkv._transformers_attention import check_call, token_major
from certkv._transformers_spec import MODEL_TYPES as MODEL_TYPES
from certkv._transformers_spec import TESTED_VERSIONS as TESTED_VERSIONS
from certkv._transformers_spec import check_version, spec_of, unsupported
from certkv._transformers_spec import fingerprint as fingerprint

IMPLEMENTATION = "certkv"
"""Name of the attention implementation, for attn_implementation=."""

class _Row:
    """One sequence of the batch.

    Attributes:
        padding: tokens in front of it, which are masked.
        token_ids: its own, with those of the forward that runs.
        sequence, attention: in the store; None until its prompt is complete.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding
        self.token_ids: list[int] = []
        self.sequence: Optional[Sequence] = None
        self.attention: Optional[Attention] = None
        self.records: list[np.ndarray] = []


class _Layer(CacheLayerMixin):
    """One layer of a CertifiedCache, which does the work."""

    is_sliding = False  # windows are the reads' business: nothing is dropped
    supports_early_init = False

    def __init__(self, cache: CertifiedCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache._update_layer(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache._counts[self._index] + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache._counts[self._index]

    def get_max_length(self) -> int:
        return -1

    def _refuse(self, what: str) -> None:
        raise unsupported(f"a CertifiedCache can't be {what}; generate without that")

    def reset(self) -> None:
        self._refuse("used for a second generation; make another")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._refuse("reordered, as beam search does")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("cropped, as assisted generation does")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeated")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("split")

    def offload(self) -> None:
        self._refuse("offloaded")


class CertifiedCache(Cache):
    """The cache of one call of generate(): past_key_values=CertifiedCache(model, target=...).

    The batch's sequences are put into the store when their prompt is complete; blocks that are
    there already, from any process whose model is the same, are shared. Not for several threads.

    Args:
        model: loaded with attn_implementation="certkv", on the CPU, float16 or bfloat16.
        target: of the store, as for certkv.Client; "" = certkvd's default socket.
        key_format, value_format: how keys and values are stored, see certkv.LayerSpec.
        layers: a LayerSpec of each layer, in place of key_format and value_format, such as
            CacheSpec.from_file(...).layers of what `certkv calibrate` proposes. Windows are the
            model's own.
        original_dtype: "float16" or "bfloat16": a float32 model's keys and values are rounded to
            it before they are used and stored; None = the model's own.
        request_id: the request at gate; None = a random one.
        model_name: under which blocks are shared; None = fingerprint(model).
        client_options: of certkv.Client.
        terms: of Client.open_request: tv_tolerance, value_tolerance, label, ...

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], the model has a feature that the certificate
            doesn't cover, or another attention implementation.
        UnavailableError: no store at the target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: str = "",
        *,
        key_format: str = "K8",
        value_format: str = "V4",
        layers: Optional[AnySequence[LayerSpec]] = None,
        original_dtype: Optional[str] = None,
        request_id: Optional[str] = None,
        model_name: Optional[str] = None,
        client_options: Optional[dict[str, Any]] = None,
        **terms: Any,
    ) -> None:
        check_version()
        if model.config._attn_implementation != IMPLEMENTATION:
            raise unsupported(
                f"the model's attention is '{model.config._attn_implementation}'; load it with "
                f"attn_implementation='{IMPLEMENTATION}'"
            )
        self.spec = spec_of(model, key_format, value_format, model_name, original_dtype, layers)
        super().__init__(layers=[_Layer(self, i) for i in range(len(self.spec.layers))])
        self._client = Client(self.spec, target, **(client_options or {}))
        try:
            self._request = self._client.open_request(
                request_id or f"transformers-{uuid.uuid4().hex[:16]}", **terms
            )
        except BaseException:
            self._client.close()
            raise
        self._model_dtype = model.dtype
        self._rows: list[_Row] = []
        self._counts = [0] * len(self.spec.layers)  # tokens of each layer, with the padding
        self._prompt: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer, until it is put
        self._is_put = False
        self._unread: Optional[int] = None  # layer that was updated and not read
        self._failed = False
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def certificates(self) -> np.ndarray:
        """Rows of certkv.CERTIFICATE_DTYPE: by sequence, decode step, layer and query head.

        A sequence's query_position counts its own tokens, without padding in front.
        """
        return self._concatenate(self._rows)

    def certificates_of(self, row: int) -> np.ndarray:
        """Those of one sequence of the batch."""
        return self._concatenate([self._rows[row]])

    def risk(self) -> RiskSummary:
        """The request's account at gate, all reads so far included."""
        self._request.flush()
        return self._request.risk()

    @property
    def shared_block_count(self) -> int:
        """Blocks of all sequences that were in the store already."""
        return sum(row.sequence.shared_block_count for row in self._rows if row.sequence)

    def close(self) -> None:
        """Ends the request and the session, and takes the hook from the model. Idempotent."""
        self._hook.remove()
        self._client.close()

    def __enter__(self) -> CertifiedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        raise unsupported("a CertifiedCache has no tensors to iterate over; they are in the store")

    @staticmethod
    def _concatenate(rows: list[_Row]) -> np.ndarray:
        records = [record for row in rows for record in row.records]
        return np.concatenate(records) if records else np.empty(0, CERTIFICATE_DTYPE)

    # One forward: _before_forward, then for each layer _update_layer, read_layer (but for the
    # prompt), and note_read.

    def _before_forward(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named.get("past_key_values") is not self:
            return
        if self._failed:
            raise unsupported("an earlier step of this generation failed; make another cache")
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if ids is None:
            raise unsupported("inputs_embeds have no token ids, which name blocks; pass input_ids")
        if self._counts[0] > 0 and ids.shape[1] != 1:
            raise unsupported(
                f"a forward of {ids.shape[1]} tokens after the prompt (assisted generation, or a "
                "prompt in parts); only one token at a time is read from the store"
            )
        padding = self._padding_of(named.get("attention_mask"), ids)
        if not self._rows:
            self._rows = [_Row(count) for count in padding]
        if padding != [row.padding for row in self._rows]:
            raise unsupported(
                f"the batch began with {[row.padding for row in self._rows]} tokens of padding in "
                f"front of its sequences and has {padding} now"
            )
        self._check_positions(named.get("position_ids"), ids.shape[1])
        # What fails from here on leaves a token half written; note_read takes it back.
        self._failed = True
        if self._is_put:
            # Ends the token that the last forward wrote; a full block is sealed here.
            for row in self._rows:
                row.sequence.finish_token()
        for row, new in zip(self._rows, ids.tolist()):
            row.token_ids.extend(new if self._counts[0] else new[row.padding :])

    def _padding_of(self, mask: Any, ids: torch.Tensor) -> list[int]:
        """Masked tokens in front of each sequence."""
        if mask is None:
            return [0] * ids.shape[0]
        wanted = (ids.shape[0], self._counts[0] + ids.shape[1])
        if not (isinstance(mask, torch.Tensor) and tuple(mask.shape) == wanted):
            raise unsupported(
                f"the attention mask is {getattr(mask, 'shape', type(mask).__name__)}, must be "
                f"{wanted}: sequences, tokens; a mask of one's own isn't read"
            )
        kept = mask != 0
        padding = (~kept).sum(dim=1)
        if bool((kept != (torch.arange(wanted[1], device=mask.device) >= padding[:, None])).any()):
            raise unsupported(
                "the attention mask leaves out tokens between others or at the end; pad on the "
                "left (padding_side='left')"
            )
        if int(padding.max()) >= wanted[1]:
            raise unsupported("the attention mask leaves a sequence without tokens")
        return padding.tolist()

    def _check_positions(self, positions: Optional[torch.Tensor], count: int) -> None:
        if positions is None:
            if any(row.padding for row in self._rows):
                raise unsupported(
                    "a padded batch without position_ids rotates equal prefixes differently; pass "
                    "position_ids, as generate() does"
                )
            return
        wanted = torch.arange(self._counts[0], self._counts[0] + count, device=positions.device)
        for row, given in zip(self._rows, positions.expand(len(self._rows), count)):
            places = wanted - row.padding
            if not bool(((given == places) | (places < 0)).all()):
                raise unsupported(
                    f"position_ids don't count on from {len(row.token_ids)}, which names the blocks"
                )

    def _update_layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._unread is not None:
            raise unsupported(
                f"layer {self._unread} was computed by another attention than '{IMPLEMENTATION}'"
            )
        if keys.dtype != self._model_dtype:
            raise unsupported(f"keys are {keys.dtype}, the cache was made for {self._model_dtype}")
        seen = self._rows[0].padding + len(self._rows[0].token_ids) if self._rows else 0
        if self._counts[layer] + keys.shape[2] != seen:
            raise unsupported(
                f"layer {layer} gets {keys.shape[2]} tokens after {self._counts[layer]}, the model "
                f"has seen {seen}; call the model that the cache was made with"
            )
        stored = [tensor.to(getattr(torch, self.spec.original_dtype)) for tensor in (keys, values)]
        if self._counts[layer] == 0:
            self._prompt.append((stored[0].detach(), stored[1].detach()))
        else:
            if layer == 0:
                self._begin_step()
            for row, pair in zip(self._rows, zip(*stored)):
                row.sequence.write_layer(layer, *(token_major(tensor)[0] for tensor in pair))
        self._counts[layer] += keys.shape[2]
        self._unread = layer
        keys, values = (tensor.to(self._model_dtype) for tensor in stored)
        keys.certkv_cache = self  # finds its way to the attention function with the keys
        return keys, values

    def _begin_step(self) -> None:
        if not self._is_put:
            self._put_prompts()
        for row in self._rows:
            row.sequence.begin_token(row.token_ids[-1])

    def _put_prompts(self) -> None:
        for index, row in enumerate(self._rows):
            layers = [
                (
                    token_major(keys[index])[row.padding :],
                    token_major(values[index])[row.padding :],
                )
                for keys, values in self._prompt
            ]
            row.sequence = self._client.put_sequence(row.token_ids[:-1], layers)
            row.attention = self._client.attention(row.sequence, self._request)
        self._prompt.clear()
        self._is_put = True

    def read_layer(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """[batch, query heads, 1, d] -> [batch, 1, query heads, d_v], certified or exact."""
        outputs = []
        for row, query in zip(self._rows, queries.detach()):
            borrowed = query[:, 0].float().contiguous().cpu()
            read = row.attention.attend(layer, len(row.token_ids) - 1, borrowed)
            row.records.append(read.certificates)
            outputs.append(torch.from_numpy(read.outputs))
        return torch.stack(outputs)[:, None].to(device=queries.device, dtype=queries.dtype)

    def note_read(self, layer: int) -> None:
        """The attention function has read what _update_layer gave."""
        self._unread = None
        if layer == len(self.spec.layers) - 1:
            self._failed = False

    @property
    def is_prompt(self) -> bool:
        """Is this the forward of the prompt, whose keys are all in its arguments?"""
        return not self._is_put


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention "certkv": as sdpa for the prompt, from the store for every later token."""
    cache = getattr(key, "certkv_cache", None)
    if not isinstance(cache, CertifiedCache):
        raise unsupported(
            f"attention '{IMPLEMENTATION}' reads from a CertifiedCache; pass "
            "past_key_values=certkv.transformers.CertifiedCache(model)"
        )
    check_call(cache.spec, module, scaling, others)
    if cache.is_prompt:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    else:
        output = cache.read_layer(module.layer_idx, query)
    cache.note_read(module.layer_idx)
    return output, None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
