"""vLLM: prefixes shared between engines, and over restarts, through the store.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "CertKVConnector", "kv_connector_module_path": "certkv.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

A request's longest prefix of whole blocks that the store has is loaded into the engine's cache
while others go on, and blocks that the engine computes are saved when their step is over, from
copies. By default loads are exact: the bits that were saved. When the store is away, or a block
can't be loaded, the engine computes as ever. What is not covered is refused at start, by name, with
[ENGINE_UNSUPPORTED].

Attention is vLLM's own, and nothing it computes has a certificate, unless
"kv_connector_extra_config" has "decode": "certified": then every token after the prompt is read from
the store, certified within tolerance or exact. Its options are those of
certkv._vllm_spec.ConnectorOptions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm import envs
from vllm.logger import init_logger

from certkv import _vllm_decode
from certkv._block_io import BlockLoader, BlockSaver, Counters, EngineBlocks, LoadJob, SaveJob
from certkv._prefix_plan import PrefixPlan
from certkv._store_link import StoreLink
from certkv._vllm_spec import TESTED_VERSIONS as TESTED_VERSIONS
from certkv._vllm_spec import ConnectorOptions as ConnectorOptions
from certkv._vllm_spec import check_version, layer_arrays, probe_layout, shape_of

# Under vLLM's own name, so that its settings of logging hold.
_log = init_logger("vllm.certkv")
# For what is queued when the engine ends.
_SHUTDOWN_SECONDS = 10.0


@dataclasses.dataclass
class CertKVMetadata(KVConnectorMetadata):
    """What a step's workers do."""

    loads: list[LoadJob] = dataclasses.field(default_factory=list)
    saves: list[SaveJob] = dataclasses.field(default_factory=list)
    steps: list[_vllm_decode.DecodeStep] = dataclasses.field(default_factory=list)


class CertKVStats(KVConnectorStats):
    """Counters of one interval, by name; vLLM logs them as "KV Transfer metrics"."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class CertKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one for its scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        transfer = self._kv_transfer_config
        self._options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        self._shape = shape_of(vllm_config, kv_cache_config, self._options)
        self._counters = Counters()
        self._link = StoreLink(
            self._shape.spec,
            self._options.target,
            {
                "rpc_timeout_ms": self._options.rpc_timeout_ms,
                "worker_name": f"vllm-{role.name.lower()}",
                **self._options.client,
            },
            _log,
        )
        self._plan: Optional[PrefixPlan] = None
        self._loader: Optional[BlockLoader] = None
        self._saver: Optional[BlockSaver] = None
        self._decode_plan: Optional[_vllm_decode.DecodePlan] = None
        self._decoder: Optional[_vllm_decode.Decoder] = None
        if role == KVConnectorRole.SCHEDULER:
            self._plan = PrefixPlan(
                self._link,
                self._shape.engine_tokens,
                self._shape.store_tokens,
                self._counters,
                rank_count=self._shape.rank_count,
                loads=transfer.is_kv_consumer,
                # Decode puts a request's blocks into the store itself.
                saves=transfer.is_kv_producer and not self._options.is_certified,
                has_plain_keys=self._options.is_certified,
            )
            if self._options.is_certified:
                self._decode_plan = _vllm_decode.DecodePlan(
                    self._shape.engine_tokens,
                    has_random_ids=not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
                )
            _log.info(
                "CertKV: %s, loads %s, decode by %s",
                self._shape.spec,
                self._options.load,
                "certified reads" if self._options.is_certified else "vLLM's own attention",
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost is a prefix that is computed once more

    @classmethod
    def build_kv_connector_stats(
        cls, data: Optional[dict[str, Any]] = None
    ) -> Optional[KVConnectorStats]:
        return CertKVStats(data=data or {})

    def get_kv_connector_stats(self) -> Optional[KVConnectorStats]:
        taken = self._counters.take()
        return CertKVStats(data=taken) if taken else None

    def shutdown(self) -> None:
        if self._decoder is not None:
            _vllm_decode.set_active_decoder(None)
            self._decoder.rows.keep(())
        if self._saver is not None:
            self._saver.wait(_SHUTDOWN_SECONDS)
            self._saver.close()
        if self._loader is not None:
            self._loader.close()
        if self._plan is not None:
            self._plan.close()
        self._link.close()
        if self._counters.total:
            counts = ", ".join(f"{n}={c}" for n, c in sorted(self._counters.total.items()))
            _log.info("CertKV: %s ends: %s", self.role.name.lower(), counts)

    # Of a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = EngineBlocks(
            layer_arrays(kv_caches, self._shape),
            probe_layout(self._vllm_config, self._shape),
            self._shape.per_store_block,
        )
        common = (self._link, blocks, self._counters, _log, get_tensor_model_parallel_rank())
        self._loader = BlockLoader(*common, quantized=self._options.load == "quantized")
        self._saver = BlockSaver(*common, queue_bytes=self._options.save_queue_mib << 20)
        if self._options.is_certified:
            self._begin_decoder(blocks)

    def _begin_decoder(self, blocks: EngineBlocks) -> None:
        from certkv._vllm_attention import CertKVAttentionImpl

        shape, context = self._shape, self._vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in shape.layer_names}
        _vllm_decode.check_layers(layers, shape.spec, CertKVAttentionImpl)
        rows = _vllm_decode.decode_rows(self._link, self._options, _log)
        self._decoder = _vllm_decode.Decoder(rows, blocks, shape.spec, shape.layer_names)
        _vllm_decode.set_active_decoder(self._decoder)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._decoder is not None:  # vLLM calls this before a forward
            self._decoder.begin_forward(connector_metadata.steps)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for job in self._get_connector_metadata().loads:
            self._loader.start(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is computed when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Blocks are saved when all of their layers are there."""

    def wait_for_save(self) -> None:
        self._link.client()  # a store that is away is asked for while steps are made
        if self._decoder is not None:
            self._decoder.end_forward()
        for job in self._get_connector_metadata().saves:
            self._saver.save(job)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[Optional[set[str]], Optional[set[str]]]:
        if self._decoder is not None:
            for request_id in finished_req_ids:
                self._decoder.rows.end(request_id)
        return None, (self._loader.take_finished() if self._loader else None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loader.take_failed() if self._loader else set()

    # Of the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._plan.add(request)
        if self._decode_plan is not None and self._plan.request(request.request_id) is None:
            _log.warning(
                "CertKV: request %s is computed by vLLM's own attention, without certificates: it "
                "has an adapter, media, prompt embeddings or a cache_salt, and its token ids don't "
                "say what its keys are",
                request.request_id,
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[Optional[int], bool]:
        tokens = self._plan.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plan.begin_load(request, num_external_tokens, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        scheduled, steps = [], []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._plan.request(request_id)
            if request is None:
                continue
            (block_ids,) = state.get_block_ids(request_id)
            scheduled.append((request_id, request.num_computed_tokens + count, block_ids))
            if self._decode_plan is not None:
                step = self._decode_plan.add_step(request, count, block_ids)
                if step is not None:
                    steps.append(step)
        return CertKVMetadata(self._plan.take_loads(), self._plan.take_saves(scheduled), steps)

    def update_connector_output(self, connector_output: Any) -> None:
        self._plan.end_loads(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, Optional[dict[str, Any]]]:
        self._plan.forget(request.request_id)
        if self._decode_plan is not None:
            self._decode_plan.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Optional[dict[str, Any]]]:
        return self.request_finished(request, block_ids[0])
