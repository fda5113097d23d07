"""SGLang: decode steps through certified attention, --attention-backend certkv on a CPU.

Prompts are computed as with "torch_native". When a request decodes its first token, its keys and
values go into the store, and every later token is read from there: an output of a layer is
certified within tolerance, or exact. When the store fails, or a token's id isn't known, the request
goes on with the engine's own dense attention over its own keys and values, without certificates;
that is logged. Settings are JSON in the environment variable CERTKV_SGLANG, see AttentionOptions.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import logging
import os
import threading
import time
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from certkv import _engine, _errors, _native
from certkv._client import Client, Sequence
from certkv._decode_rows import DecodeRow, DecodeRows
from certkv._engine import read_options, unsupported, weights_fingerprint
from certkv._spec import CacheSpec
from certkv._store_link import StoreLink
from certkv._transformers_spec import spec_of_config
from certkv.sglang import TESTED_VERSIONS

ENVIRONMENT = "CERTKV_SGLANG"
_log = logging.getLogger("sglang.certkv")
_UNKNOWN = -1  # id of a token that no forward of this engine has computed
# SGLang doesn't tell its attention that a request has ended: it has when a step runs without it, or
# when none has run for so long.
_IDLE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What CERTKV_SGLANG may hold.

    Attributes:
        target: of the store, as for certkv.Client; "" = certkvd's default socket.
        key_format, value_format: how keys and values are stored, see certkv.LayerSpec.
        spec: path of what `certkv calibrate --spec` wrote, whose layers are taken instead.
        model_name: under which blocks are shared; "" = a fingerprint of config and weights.
        certificates: folder into which a request's certificates go when it ends, as REQUEST.npy
            of certkv.CERTIFICATE_DTYPE; "" = nowhere.
        terms: of certkv.Client.open_request: tv_tolerance, read_mode, tenant, ...
        client: other options of certkv.Client: ca_file, token_file, ...
    """

    target: str = ""
    key_format: str = "K8"
    value_format: str = "V4"
    spec: str = ""
    model_name: str = ""
    certificates: str = ""
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)
    client: dict[str, Any] = dataclasses.field(default_factory=dict)


def _options() -> AttentionOptions:
    text = os.environ.get(ENVIRONMENT) or "{}"
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise unsupported(f"{ENVIRONMENT} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise unsupported(f"{ENVIRONMENT} is {text}, must be a JSON object")
    return read_options(AttentionOptions, given, ENVIRONMENT)


def _check_runner(runner: Any) -> None:
    """Refuses what would be computed past the certificate, or wasn't tested."""
    arguments = runner.server_args
    for what, given, plain in (
        ("device", str(runner.device), "cpu"),
        ("--tp-size", arguments.tp_size, 1),
        ("--pp-size", arguments.pp_size, 1),
        ("--page-size", runner.token_to_kv_pool.page_size, 1),
        ("--enable-mixed-chunk", bool(arguments.enable_mixed_chunk), False),
        ("--enable-lora", bool(arguments.enable_lora), False),
        ("--enable-hierarchical-cache", bool(arguments.enable_hierarchical_cache), False),
        ("--speculative-algorithm", arguments.speculative_algorithm, None),
        ("MLA", bool(runner.use_mla_backend), False),
        ("dtype of the KV cache", runner.token_to_kv_pool.dtype, runner.model_config.dtype),
    ):
        if given != plain:
            raise unsupported(f"{what} is {given}, must be {plain} with --attention-backend certkv")


def spec_of(runner: Any, options: AttentionOptions) -> CacheSpec:
    """The cache of a model runner.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED | CACHE_SPEC_INVALID].
    """
    model = runner.model_config
    config = model.hf_text_config
    name = options.model_name or weights_fingerprint(
        model.model_path, config.to_json_string(), f"model_name in {ENVIRONMENT}"
    )
    spec = spec_of_config(
        config,
        model.dtype,
        f"sglang-{config.model_type}-{name}",
        options.key_format,
        options.value_format,
        layers=CacheSpec.from_file(options.spec).layers if options.spec else None,
    )
    for index, layer in enumerate(spec.layers):
        if layer.sliding_window:
            raise unsupported(f"layer {index} has a window of {layer.sliding_window} tokens")
    return spec


class CertKVAttnBackend(TorchNativeAttnBackend):
    """SGLang makes one for its model runner.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], a setting or model that the certificate doesn't
            cover.
        UnavailableError: no store at the target.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        _engine.check_version("sglang", sglang.__version__, TESTED_VERSIONS)
        _check_runner(runner)
        self._options = _options()
        self.spec = spec_of(runner, self._options)
        slots = self.token_to_kv_pool.get_key_buffer(0).shape[0]
        self._ids = torch.full((slots,), _UNKNOWN, dtype=torch.int64)  # of each slot's token
        self._batch: list[DecodeRow] = []  # that is computed now
        self._lock = threading.Lock()  # of the rows, and what they hold
        self._last_forward = time.monotonic()
        self._is_closed = threading.Event()
        options = {"worker_name": "sglang", **self._options.client}
        self._link = StoreLink(self.spec, self._options.target, options, _log)
        self._rows = DecodeRows(
            self._link, "sglang", self._options.terms, self._options.certificates, _log
        )
        if self._link.client() is None:
            self._link.close()
            target = self._options.target or _native.default_target()
            raise _errors.error_of("UNAVAILABLE", "", f"no store at {target}; start certkvd first")
        _log.info("CertKV: decode steps are read through %s", self.spec)
        threading.Thread(target=self._end_idle, name="certkv-idle", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends all requests and the session. Idempotent."""
        self._is_closed.set()
        with self._lock:
            self._rows.keep(())
        self._link.close()

    def _end_idle(self) -> None:
        while not self._is_closed.wait(_IDLE_SECONDS / 4):
            with self._lock:
                if time.monotonic() - self._last_forward > _IDLE_SECONDS:
                    self._rows.keep(())

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        with self._lock:
            self._last_forward = time.monotonic()
            self._begin_forward(forward_batch)

    def _begin_forward(self, forward_batch: Any) -> None:
        self._batch = []
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not (mode.is_decode() or mode.is_extend()) or mode.is_mixed():
            raise unsupported(f"a forward of mode {mode.name} isn't covered by the certificate")
        ids = forward_batch.input_ids
        if forward_batch.input_embeds is not None or ids is None:
            ids = torch.full_like(forward_batch.out_cache_loc, _UNKNOWN)
        self._ids[forward_batch.out_cache_loc] = ids.to(torch.int64)
        if mode.is_decode():
            self._begin_step(forward_batch)

    def _begin_step(self, forward_batch: Any) -> None:
        self._rows.keep(forward_batch.rids)
        places = zip(
            forward_batch.rids,
            forward_batch.req_pool_indices.tolist(),
            forward_batch.seq_lens.tolist(),
        )
        for request_id, pool_index, count in places:
            slots = self.req_to_token_pool.req_to_token[pool_index, :count].long()
            token_id = int(self._ids[slots[-1]])
            prefix = functools.partial(self._prefix, slots[:-1])
            self._batch.append(self._rows.begin_token(request_id, count, token_id, prefix))

    def _prefix(self, slots: torch.Tensor, client: Client) -> Sequence:
        ids = self._ids[slots]
        if bool((ids == _UNKNOWN).any()):
            raise unsupported("the request has tokens whose ids this engine hasn't seen")
        pool = self.token_to_kv_pool
        layers = [
            (pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots])
            for layer in range(len(self.spec.layers))
        ]
        return client.put_sequence(ids.tolist(), layers)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        self._check_layer(layer)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        with self._lock:
            self._last_forward = time.monotonic()
            return self._decode_layer(q, k, v, layer, forward_batch)

    def _decode_layer(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any
    ) -> torch.Tensor:
        outputs = torch.empty_like(q.reshape(len(self._batch), -1))
        own = None  # the engine's own attention, where a row needs it
        for index, row in enumerate(self._batch):
            read = self._rows.read(row, layer.layer_id, q[index], k[index], v[index])
            if read is None:
                if own is None:
                    own = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache=False)
                read = own[index]
            outputs[index] = read
        return outputs

    def _check_layer(self, layer: Any) -> None:
        spec = self.spec
        seen = (layer.tp_k_head_num, layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim)
        wanted = (spec.kv_head_count, spec.query_head_count, spec.head_dim, spec.value_dim)
        if (
            seen != wanted
            or layer.is_cross_attention
            or layer.logit_cap
            or layer.sliding_window_size > -1
            or not np.isclose(layer.scaling, spec.logit_scale, rtol=1e-6)
        ):
            raise unsupported(
                f"layer {layer.layer_id} has heads and sizes {seen}, scale {layer.scaling}, cap "
                f"{layer.logit_cap}, window {layer.sliding_window_size}; the config said {wanted}, "
                f"scale {spec.logit_scale}, no cap and no window"
            )
