"""Certified decode over vLLM's own cache and attention, against that attention and the truth.

Forwards are made by hand, one after the other as vLLM's scheduler plans them; a whole engine is in
vllm_decode_engine_test.py.
"""

import itertools
import logging
import os
import sys
import types

import certkv
import numpy as np
import pytest
import torch
from certkv import _vllm_attention, _vllm_decode, _vllm_plugin, _vllm_spec
from certkv._block_io import EngineBlocks
from certkv._store_link import StoreLink
from conftest import ROOT
from decode_checks import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    check_step_within_bounds,
    distance,
    prompt_ids,
    states,
    truth_of,
)
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn, registry

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

TOKENS, BLOCKS = 64, 24
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
_names = itertools.count(1)
_log = logging.getLogger("certkv.test")


class Request:
    """As vLLM's scheduler has it."""

    def __init__(self, ids, name=None):
        self.request_id = f"{name or f'vllm-test-{os.getpid()}-{next(_names)}'}-0123abcd"
        self.all_token_ids = list(ids)
        self.num_prompt_tokens = len(ids)
        self.num_computed_tokens = 0
        self.block_ids = []

    @property
    def name(self):
        return self.request_id[:-9]


class Engine:
    """Runs forwards through CertKV's attention and, beside it, through vLLM's."""

    def __init__(self, target, **options):
        client = options.pop("client", {})
        self.options = _vllm_spec.ConnectorOptions.of(
            {"target": target, "decode": "certified", **options}
        )
        self.spec = certkv.CacheSpec.uniform(
            f"vllm-unit-{os.getpid()}",
            layer_count=LAYERS,
            kv_head_count=KV_HEADS,
            group_size=HEADS // KV_HEADS,
            head_dim=DIM,
            key_format=self.options.key_format,
            value_format=self.options.value_format,
            block_tokens=TOKENS,
            rope_pairing="none",
            original_dtype="bfloat16",
        )
        shape = _vllm_spec.EngineShape(self.spec, TOKENS, TOKENS, NAMES, torch.bfloat16, 1)
        config = types.SimpleNamespace(cache_config=types.SimpleNamespace(cache_dtype="auto"))
        self.caches = {
            name: torch.zeros(BLOCKS, KV_HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
            for name in NAMES
        }
        blocks = EngineBlocks(
            _vllm_spec.layer_arrays(self.caches, shape), _vllm_spec.probe_layout(config, shape), 1
        )
        self.link = StoreLink(self.spec, target, client, _log)
        self.rows = _vllm_decode.decode_rows(self.link, self.options, _log)
        self.decoder = _vllm_decode.Decoder(self.rows, blocks, self.spec, NAMES)
        self.plan = _vllm_decode.DecodePlan(TOKENS, has_random_ids=True)
        self.isa = cpu_attn._get_attn_isa(torch.bfloat16, TOKENS, DIM, "auto")
        self._free = iter(range(3, BLOCKS))

    def close(self):
        self.rows.keep(())
        self.link.close()

    def forward(self, scheduled):
        """Computes so many tokens of each request: [(made, own)] of each layer, where a request's
        last token is row i of both, [requests, heads * DIM]."""
        steps, slots, lengths = [], [], []
        for request, count in scheduled:
            end = request.num_computed_tokens + count
            while len(request.block_ids) * TOKENS < end:
                request.block_ids.append(next(self._free))
            step = self.plan.add_step(request, count, request.block_ids)
            steps += [step] if step is not None else []
            for place in range(end - count, end):
                slots.append(request.block_ids[place // TOKENS] * TOKENS + place % TOKENS)
            lengths.append(end)
        counts = [count for _, count in scheduled]
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor(lengths, dtype=torch.int32)
        metadata = self._metadata(scheduled, starts, lengths, slots)
        self.decoder.begin_forward(steps)
        out = [self._layer(index, scheduled, metadata) for index in range(LAYERS)]
        self.decoder.end_forward()
        for request, count in scheduled:
            request.num_computed_tokens += count
        last = (starts[1:] - 1).long()
        return [(made[last].flatten(1), own[last].flatten(1)) for made, own in out]

    def _metadata(self, scheduled, starts, lengths, slots):
        widest = max(len(request.block_ids) for request, _ in scheduled)
        table = torch.zeros(len(scheduled), widest, dtype=torch.int32)
        for row, (request, _) in enumerate(scheduled):
            table[row, : len(request.block_ids)] = torch.tensor(request.block_ids)
        return cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=len(slots),
            max_query_len=max(count for _, count in scheduled),
            query_start_loc=starts,
            max_seq_len=int(lengths.max()),
            seq_lens=lengths,
            block_table=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(scheduled),
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                seq_lens=lengths,
                dtype=torch.bfloat16,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=-1,
                isa=self.isa,
                enable_kv_split=True,
            ),
        )

    def _layer(self, index, scheduled, metadata):
        parts = [
            states(index, r.all_token_ids[r.num_computed_tokens :][:count], r.num_computed_tokens)
            for r, count in scheduled
        ]
        # Padded, as vLLM pads forwards; the padding is nobody's.
        q, k, v = (torch.cat([*part, torch.ones_like(part[0][:1])]) for part in zip(*parts))
        cache = self.caches[NAMES[index]]
        layer = types.SimpleNamespace(
            layer_name=NAMES[index], isa=self.isa, _k_scale_float=1.0, _v_scale_float=1.0
        )
        made, own = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
        mine, theirs = make_impl(_vllm_attention.CertKVAttentionImpl), make_impl()
        count = metadata.num_actual_tokens
        mine.do_kv_cache_update(layer, k[:count], v[:count], cache, metadata.slot_mapping)
        _vllm_decode.set_active_decoder(self.decoder)
        try:
            mine.forward(layer, q, k, v, cache, metadata, made)
        finally:
            _vllm_decode.set_active_decoder(None)
        theirs.forward(layer, q, k, v, cache, metadata, own)
        assert torch.all(made[-1] == 7) and torch.all(own[-1] == 7)
        return made, own

    def prompt(self, ids, name=None):
        """A new request whose prompt is computed."""
        request = Request(ids, name)
        for made, own in self.forward([(request, len(request.all_token_ids))]):
            assert torch.equal(made, own), "prompts are vLLM's own attention"
        return request

    def step(self, *requests, token=7):
        for request in requests:
            request.all_token_ids.append(token)
        return self.forward([(request, 1) for request in requests])


def make_impl(kind=cpu_attn.CPUAttentionBackendImpl):
    return kind(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")


@pytest.fixture
def make(monkeypatch):
    """make(target, **options) -> Engine; they are closed at the end."""
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    made = []

    def of(target, **options):
        made.append(Engine(target, **options))
        return made[-1]

    yield of
    for engine in made:
        engine.close()


def test_exact_reads_are_dense_attention(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    requests = [engine.prompt(prompt_ids(count, count)) for count in (130, 20)]
    for _ in range(3):
        for layer, (made, own) in enumerate(engine.step(*requests)):
            for row, request in enumerate(requests):
                error, rounding = distance(made[row], truth_of(request.all_token_ids, layer))
                assert np.all(error <= rounding)
                error, _ = distance(own[row], truth_of(request.all_token_ids, layer))
                assert np.all(error <= 4 * rounding)
    records = np.concatenate(engine.rows[requests[0].request_id].records)
    assert set(records["outcome"]) == {certkv.Outcome.EXACT}


@pytest.mark.parametrize("formats", [("K8", "V4"), ("K6", "V8")])
def test_certified_outputs_are_within_their_bounds(make, server, formats):
    terms = {"tv_tolerance": 0.2, "value_tolerance": 0.2, "read_mode": "OBSERVE"}
    engine = make(server.target, key_format=formats[0], value_format=formats[1], terms=terms)
    requests = [engine.prompt(prompt_ids(count, 10 + count)) for count in (190, 70)]
    used, wrong = [], []
    for _ in range(4):  # over the end of a block: 190 + 2 tokens
        outputs = engine.step(*requests)
        for row, request in enumerate(requests):
            records = engine.rows[request.request_id].records[-LAYERS:]
            made = [output[row] for output, _ in outputs]
            for shares, share in zip(
                (used, wrong), check_step_within_bounds(request.all_token_ids, made, records)
            ):
                shares.append(share)
    assert max(used) > 0.05, "the bound is not vacuous"
    assert max(wrong) > 1, "a token too few would be outside"


def test_prompts_and_decode_steps_share_a_forward(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    decoding = engine.prompt(prompt_ids(100, 30))
    fresh = Request(prompt_ids(90, 31))
    decoding.all_token_ids.append(7)
    for layer, (made, own) in enumerate(engine.forward([(fresh, 50), (decoding, 1)])):
        assert torch.equal(made[0], own[0]), "a chunk of a prompt is vLLM's own attention"
        error, rounding = distance(made[1], truth_of(decoding.all_token_ids, layer))
        assert np.all(error <= rounding)
    # The prompt's last token alone is still the prompt's.
    decoding.all_token_ids.append(8)
    engine.forward([(decoding, 1), (fresh, 39)])
    for made, own in engine.forward([(fresh, 1)]):
        assert torch.equal(made, own)
    assert fresh.request_id not in engine.rows
    assert len(engine.rows[decoding.request_id].records) == 2 * LAYERS


def test_certificates_and_risk_are_under_the_users_id(make, server, tmp_path):
    engine = make(server.target, certificates=str(tmp_path), terms={"tv_tolerance": 0.1})
    one, two = (engine.prompt(prompt_ids(100, seed)) for seed in (20, 21))
    for _ in range(3):
        engine.step(one, two)
    engine.rows.end(one.request_id)
    records = np.load(tmp_path / f"{one.name}.npy")
    assert len(records) == 3 * LAYERS * HEADS
    exact = records["outcome"] == certkv.Outcome.EXACT
    assert np.all(exact | (records["worst_case_tv"] <= np.float32(0.1)))
    assert not (tmp_path / f"{two.name}.npy").exists()
    # The user's id is spent now, and the next request that has it is known by vLLM's.
    again = engine.prompt(prompt_ids(70, 22), name=one.name)
    engine.step(again)
    assert engine.rows[again.request_id].request.risk().request == f"requests/{again.request_id}"


def test_blocks_of_a_prompt_that_the_store_has_are_shared(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    ids = prompt_ids(150, 35)
    first, second = engine.prompt(ids), engine.prompt(ids)
    engine.step(first)
    for layer, (made, _) in enumerate(engine.step(second)):
        error, rounding = distance(made[0], truth_of(second.all_token_ids, layer))
        assert np.all(error <= rounding)
    assert engine.rows[second.request_id].sequence.shared_block_count == 2


def test_a_request_that_was_preempted_goes_on_under_another_name(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    request = engine.prompt(prompt_ids(80, 40))
    engine.step(request)
    engine.step(request)
    request.all_token_ids.append(9)
    # Its blocks are gone, and all it has is computed again, in other blocks.
    request.block_ids, request.num_computed_tokens = [], 0
    for count in (81, 2):  # the second chunk has no token of the prompt, and is no decode step
        for made, own in engine.forward([(request, count)]):
            assert torch.equal(made, own)
    assert engine.rows[request.request_id].token_count == 82
    for layer, (made, _) in enumerate(engine.step(request)):
        error, rounding = distance(made[0], truth_of(request.all_token_ids, layer))
        assert np.all(error <= rounding)
    row = engine.rows[request.request_id]
    assert row.request.risk().request == f"requests/{request.request_id}"
    assert row.token_count == 84


def test_a_step_that_no_layer_was_read_of_has_no_certificates_from_there_on(make, server, caplog):
    engine = make(server.target)
    request = engine.prompt(prompt_ids(80, 45))
    engine.step(request)
    request.all_token_ids.append(1)
    step = engine.plan.add_step(request, 1, request.block_ids)
    engine.decoder.begin_forward([step])  # and vLLM computes it somewhere else
    engine.decoder.end_forward()
    request.num_computed_tokens += 1
    for made, own in engine.step(request):
        assert torch.equal(made, own)
    assert f"request {request.request_id} goes on with the engine's own attention" in caplog.text


def test_a_store_that_dies_in_mid_request_leaves_vllms_own_attention(make, tmp_path, caplog):
    with RestartableStore(tmp_path) as store:
        engine = make(store.target, client={"rpc_timeout_ms": 1000})
        request = engine.prompt(prompt_ids(100, 60))
        assert not torch.equal(*engine.step(request)[0])
        store.kill()
        # Reads go on from mapped memory until the lost lease is seen; each is certified or exact,
        # or vLLM's own.
        for step in range(60):
            for made, own in engine.step(request):
                row = engine.rows[request.request_id]
                if not row.is_certified:
                    assert torch.equal(made, own)
        assert not row.is_certified, "a block had to be sealed"
        assert f"request {request.request_id} goes on with the engine's own" in caplog.text
        # Once it is back, later requests are certified.
        store.start()
        assert wait_until(lambda: engine.link.client() is not None, 20)
        later = engine.prompt(prompt_ids(100, 61))
        engine.step(later)
        assert engine.rows[later.request_id].is_certified


def test_the_users_id_is_what_vllm_was_given():
    assert _vllm_decode.user_name("cmpl-7-0-0123abcd", True) == "cmpl-7-0"
    assert _vllm_decode.user_name("cmpl-7-0-0123abcd", False) == "cmpl-7-0-0123abcd"
    assert _vllm_decode.user_name("plain", True) == "plain"


def fake_layer(**changes):
    impl = types.SimpleNamespace(
        sliding_window=-1,
        logits_soft_cap=0,
        alibi_slopes=None,
        sinks=None,
        kv_sharing_target_layer_name=None,
        attn_type="decoder",
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        scale=DIM**-0.5,
    )
    impl.__dict__.update(changes)
    return types.SimpleNamespace(impl=impl)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a soft cap"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"sinks": torch.ones(4)}, "attention sinks"),
        ({"kv_sharing_target_layer_name": "x"}, "the cache of another layer"),
        ({"attn_type": "encoder"}, "attention of type"),
        ({"num_heads": 8}, "query heads"),
        ({"scale": 1.0}, "scales logits by 1.0"),
    ],
)
def test_layers_that_the_certificate_does_not_cover_are_refused(change, match):
    spec = certkv.CacheSpec.uniform(
        "m", layer_count=1, kv_head_count=KV_HEADS, group_size=2, head_dim=DIM
    )
    _vllm_decode.check_layers({"a": fake_layer()}, spec, types.SimpleNamespace)
    with pytest.raises(certkv.InvalidArgumentError, match=match) as raised:
        _vllm_decode.check_layers({"a": fake_layer(**change)}, spec, types.SimpleNamespace)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"
    with pytest.raises(certkv.InvalidArgumentError, match="pip install"):
        _vllm_decode.check_layers({"a": fake_layer()}, spec, cpu_attn.CPUAttentionBackendImpl)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"decode": "certain"}, "must be engine or certified"),
        ({"decode": "certified", "load": "quantized"}, "must be exact"),
        ({"terms": {"tv_tolerance": 0.1}}, "terms is set, and decode is 'engine'"),
        ({"certificates": "/tmp"}, "certificates is set, and decode is 'engine'"),
        ({"spec": "x.json"}, "spec is set, and decode is 'engine'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, match):
    with pytest.raises(certkv.InvalidArgumentError, match=match):
        _vllm_spec.ConnectorOptions.of(options)


def test_the_plugin_stands_in_for_vllms_attention_in_tested_versions_alone(monkeypatch):
    backend = registry.AttentionBackendEnum.CPU_ATTN
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    _vllm_plugin.register()
    assert backend.get_class() is cpu_attn.CPUAttentionBackend
    monkeypatch.undo()
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    _vllm_plugin.register()
    assert backend.get_class() is _vllm_attention.CertKVAttentionBackend
    assert backend.get_class().get_impl_cls() is _vllm_attention.CertKVAttentionImpl
    assert backend.get_class().get_name() == "CPU_ATTN"
