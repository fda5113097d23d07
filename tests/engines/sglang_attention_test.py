"""The attention backend over SGLang's own memory pools, against its own attention and the truth.

Forwards are made by hand, one after the other as SGLang's scheduler makes them; whole engines are
in sglang_engine_test.py.
"""

import itertools
import json
import os
import sys
import types

import certkv
import numpy as np
import pytest
import torch
from certkv import _sglang_attention as plugin
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
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from transformers import LlamaConfig, MistralConfig

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

SLOTS = 1024
_names = itertools.count(1)


class Model:
    """A model runner."""

    def __init__(self, tmp_path, config_class=LlamaConfig, **config):
        settings = {
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "num_attention_heads": HEADS,
            "hidden_size": HEADS * DIM,
            "head_dim": DIM,
        }
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        self.req_to_token_pool = ReqToTokenPool(8, 512, "cpu", enable_memory_saver=False)
        self.token_to_kv_pool = MHATokenToKVPool(
            SLOTS, 1, torch.bfloat16, KV_HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        self.device = "cpu"
        self.use_mla_backend = False
        self.model_config = types.SimpleNamespace(
            hf_text_config=config_class(**{**settings, **config}),
            dtype=torch.bfloat16,
            model_path=str(tmp_path),
        )
        self.server_args = types.SimpleNamespace(
            tp_size=1,
            pp_size=1,
            enable_mixed_chunk=False,
            enable_lora=False,
            enable_hierarchical_cache=False,
            speculative_algorithm=None,
        )

    @staticmethod
    def layer(index, **changes):
        return types.SimpleNamespace(
            **{
                "layer_id": index,
                "tp_q_head_num": HEADS,
                "tp_k_head_num": KV_HEADS,
                "tp_v_head_num": KV_HEADS,
                "qk_head_dim": DIM,
                "v_head_dim": DIM,
                "head_dim": DIM,
                "scaling": DIM**-0.5,
                "logit_cap": 0.0,
                "sliding_window_size": -1,
                "is_cross_attention": False,
                "attn_type": AttentionType.DECODER,
                "k_scale": None,
                "v_scale": None,
                **changes,
            }
        )


class Request:
    def __init__(self, ids, place, slots, rid=None):
        self.ids, self.place, self.slots = list(ids), place, list(slots)
        self.rid = rid or f"sglang-test-{os.getpid()}-{next(_names)}"


class Engine:
    """Runs forwards through a backend and, beside it, through SGLang's own."""

    def __init__(self, model, backend):
        self.model, self.backend = model, backend
        self.own = TorchNativeAttnBackend(model)
        self._free = iter(range(1, SLOTS))

    def _batch(self, mode, requests, new, **changes):
        """`new` tokens of each request, the last, are computed."""
        table = self.model.req_to_token_pool.req_to_token
        for request in requests:
            table[request.place, : len(request.ids)] = torch.tensor(request.slots)
        lengths = torch.tensor([len(request.ids) for request in requests])
        counts = torch.tensor([new] * len(requests))
        return types.SimpleNamespace(
            **{
                "forward_mode": mode,
                "rids": [request.rid for request in requests],
                "input_ids": torch.tensor([i for r in requests for i in r.ids[-new:]]),
                "input_embeds": None,
                "req_pool_indices": torch.tensor([request.place for request in requests]),
                "seq_lens": lengths,
                "extend_prefix_lens": lengths - counts,
                "extend_seq_lens": counts,
                "out_cache_loc": torch.tensor([s for r in requests for s in r.slots[-new:]]),
                "encoder_out_cache_loc": None,
                "encoder_lens": None,
                **changes,
            }
        )

    def _forward(self, batch, requests, new):
        """[(output, SGLang's own output)] of each layer, [tokens, heads * DIM]."""
        self.backend.init_forward_metadata(batch)
        self.own.init_forward_metadata(batch)
        kind = "forward_decode" if batch.forward_mode.is_decode() else "forward_extend"
        out = []
        for index in range(LAYERS):
            parts = [states(index, r.ids[-new:], len(r.ids) - new) for r in requests]
            q, k, v = (torch.cat(part) for part in zip(*parts))
            q = q.flatten(1)  # as RadixAttention hands it on
            layer = self.model.layer(index)
            made = getattr(self.backend, kind)(q, k, v, layer, batch)
            out.append((made, getattr(self.own, kind)(q, k, v, layer, batch, save_kv_cache=False)))
        return out

    def prompt(self, ids, prefix=None, rid=None, **changes):
        """A new request whose first tokens are those of `prefix`, from its slots."""
        shared = [] if prefix is None else prefix.slots[: len(prefix.ids) - 1]
        slots = shared + [next(self._free) for _ in ids[len(shared) :]]
        request = Request(ids, next(_names) % 8, slots, rid)
        new = len(ids) - len(shared)
        batch = self._batch(ForwardMode.EXTEND, [request], new, **changes)
        for made, own in self._forward(batch, [request], new):
            assert torch.equal(made, own), "prompts are SGLang's own attention"
        return request

    def step(self, requests, token=7):
        for request in requests:
            request.ids.append(token)
            request.slots.append(next(self._free))
        return self._forward(self._batch(ForwardMode.DECODE, requests, 1), requests, 1)


@pytest.fixture
def make(monkeypatch, tmp_path):
    """make(target, **options) -> Engine; they are closed at the end."""
    made = []

    def of(target, config=None, **options):
        folder = tmp_path / f"model-{next(_names)}"
        folder.mkdir()
        options = {"target": target, "model_name": f"unit-{os.getpid()}", **options}
        monkeypatch.setenv(plugin.ENVIRONMENT, json.dumps(options))
        model = Model(folder, **(config or {}))
        made.append(Engine(model, plugin.CertKVAttnBackend(model)))
        return made[-1]

    yield of
    for engine in made:
        engine.backend.close()


def test_exact_reads_are_dense_attention(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    requests = [engine.prompt(prompt_ids(count, count)) for count in (130, 20)]
    for _ in range(3):
        for layer, (made, own) in enumerate(engine.step(requests)):
            for row, request in enumerate(requests):
                error, rounding = distance(made[row], truth_of(request.ids, layer))
                assert np.all(error <= rounding)
                # SGLang's own differs by roundings of its sums in bfloat16 too.
                assert np.all(distance(own[row], truth_of(request.ids, layer))[0] <= 4 * rounding)
    records = np.concatenate(engine.backend._rows[requests[0].rid].records)
    assert set(records["outcome"]) == {certkv.Outcome.EXACT}


@pytest.mark.parametrize("formats", [("K8", "V4"), ("K6", "V8")])
def test_certified_outputs_are_within_their_bounds(make, server, formats):
    terms = {"tv_tolerance": 0.2, "value_tolerance": 0.2, "read_mode": "OBSERVE"}
    engine = make(server.target, key_format=formats[0], value_format=formats[1], terms=terms)
    requests = [engine.prompt(prompt_ids(count, 10 + count)) for count in (190, 70)]
    used, wrong = [], []
    for _ in range(4):  # over the end of a block: 190 + 2 tokens
        outputs = engine.step(requests)
        for row, request in enumerate(requests):
            records = engine.backend._rows[request.rid].records[-LAYERS:]
            made = [output[row] for output, _ in outputs]
            for shares, share in zip(
                (used, wrong), check_step_within_bounds(request.ids, made, records)
            ):
                shares.append(share)
    assert max(used) > 0.05, "the bound is not vacuous"
    assert max(wrong) > 1, "a token too few would be outside"


def test_formats_of_each_layer_come_from_a_file(make, server, tmp_path):
    layers = [
        {"key_format": "KEY_FORMAT_K6", "value_format": "VALUE_FORMAT_V8", "witness_bands": 4},
        {"key_format": "KEY_FORMAT_K8", "value_format": "VALUE_FORMAT_V4"},
    ]
    fields = {"model": "m", "kv_head_count": 1, "group_size": 1, "head_dim": 64, "value_dim": 64}
    fields |= {"rope_pairing": "ROPE_PAIRING_NONE", "logit_scale": 1.0, "layers": layers}
    (tmp_path / "spec.json").write_text(json.dumps(fields))
    engine = make(server.target, spec=str(tmp_path / "spec.json"))
    assert [layer.key_format for layer in engine.backend.spec.layers] == ["K6", "K8"]
    assert engine.backend.spec.layers[0].witness_bands == 4
    request = engine.prompt(prompt_ids(100, 15))
    engine.step([request])
    assert engine.backend._rows[request.rid].is_certified


def test_certificates_and_risk_are_by_request(make, server, tmp_path):
    engine = make(server.target, certificates=str(tmp_path), terms={"tv_tolerance": 0.1})
    one, two = (engine.prompt(prompt_ids(100, seed)) for seed in (20, 21))
    for _ in range(3):
        engine.step([one, two])
    engine.step([two])  # `one` has ended
    records = np.load(tmp_path / f"{one.rid}.npy")
    assert len(records) == 3 * LAYERS * HEADS
    exact = records["outcome"] == certkv.Outcome.EXACT
    assert np.all(exact | (records["worst_case_tv"] <= np.float32(0.1)))
    with certkv.Client(engine.backend.spec, server.target) as client:
        with pytest.raises(certkv.FailedPreconditionError, match="REQUEST_CLOSED"):
            client.open_request(one.rid)
    assert not (tmp_path / f"{two.rid}.npy").exists()
    # With nobody to decode, the rest end by themselves.
    assert wait_until((tmp_path / f"{two.rid}.npy").exists, 10)
    assert len(np.load(tmp_path / f"{two.rid}.npy")) == 4 * LAYERS * HEADS


def test_a_prefix_of_the_engines_cache_is_known_and_its_blocks_are_shared(make, server):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    first = engine.prompt(prompt_ids(150, 30))
    engine.step([first])
    second = engine.prompt(first.ids[:-1] + prompt_ids(10, 31), prefix=first)
    for layer, (made, _) in enumerate(engine.step([first, second])):
        error, rounding = distance(made[1], truth_of(second.ids, layer))
        assert np.all(error <= rounding)
    assert engine.backend._rows[second.rid].sequence.shared_block_count == 2


def test_a_request_that_was_retracted_goes_on_under_another_name(make, server, tmp_path):
    engine = make(server.target, terms={"read_mode": "EXACT"})
    first = engine.prompt(prompt_ids(80, 40))
    engine.step([first])
    engine.step([first])
    again = engine.prompt(first.ids + [9, 9], rid=first.rid)
    for layer, (made, _) in enumerate(engine.step([again])):
        error, rounding = distance(made[0], truth_of(again.ids, layer))
        assert np.all(error <= rounding)
    assert engine.backend._rows[first.rid].request.risk().request.endswith(first.rid + ".2")


def test_tokens_without_ids_go_the_engines_own_way_and_say_so(make, server, caplog):
    engine = make(server.target)
    unknown = engine.prompt(prompt_ids(90, 50), input_embeds=torch.zeros(90, 8))
    known = engine.prompt(prompt_ids(90, 51))
    for made, own in engine.step([unknown, known]):
        assert torch.equal(made[0], own[0])
        assert not torch.equal(made[1], own[1])
    assert f"request {unknown.rid} goes on with the engine's own attention" in caplog.text
    assert "ids this engine hasn't seen" in caplog.text and known.rid not in caplog.text


def test_a_store_that_dies_in_mid_request_leaves_the_engines_own_attention(
    make, tmp_path, caplog
):
    with RestartableStore(tmp_path) as store:
        engine = make(store.target, client={"rpc_timeout_ms": 1000})
        request = engine.prompt(prompt_ids(100, 60))
        assert not torch.equal(*engine.step([request])[0])
        store.kill()
        # Reads go on from mapped memory until the lost lease is seen; each is certified or exact,
        # or SGLang's own.
        for step in range(60):
            for layer, (made, own) in enumerate(engine.step([request])):
                error, rounding = distance(made[0], truth_of(request.ids, layer))
                row = engine.backend._rows[request.rid]
                if not row.is_certified:
                    assert torch.equal(made, own)
        assert not row.is_certified, "a block had to be sealed"
        assert f"request {request.rid} goes on with the engine's own attention" in caplog.text
        # Once it is back, later requests are certified.
        store.start()
        assert wait_until(lambda: engine.backend._link.client() is not None, 20)
        later = engine.prompt(prompt_ids(100, 61))
        for _ in range(2):
            engine.step([later])
        assert engine.backend._rows[later.rid].is_certified


@pytest.mark.parametrize(
    "change, match",
    [
        (("device", "cuda"), "device is cuda"),
        (("use_mla_backend", True), "MLA is True"),
        (("server_args.tp_size", 2), "--tp-size is 2"),
        (("server_args.enable_mixed_chunk", True), "--enable-mixed-chunk is True"),
        (("server_args.enable_lora", True), "--enable-lora is True"),
        (("server_args.speculative_algorithm", "EAGLE"), "--speculative-algorithm is EAGLE"),
        (("token_to_kv_pool.page_size", 64), "--page-size is 64"),
        (("token_to_kv_pool.dtype", torch.float8_e4m3fn), "KV cache is torch.float8"),
    ],
)
def test_settings_that_go_past_the_certificate_are_refused(server, tmp_path, change, match):
    model = Model(tmp_path)
    owner, _, name = ("." + change[0]).rpartition(".")
    thing = getattr(model, owner[1:]) if owner[1:] else model
    setattr(thing, name, change[1])
    with pytest.raises(certkv.InvalidArgumentError, match=match) as raised:
        plugin._check_runner(model)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


@pytest.mark.parametrize(
    "text, match",
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        ('{"taget": "x"}', "has 'taget'; known are target"),
        ('{"terms": 1}', "must be a dict"),
    ],
)
def test_options_that_are_none_are_refused(monkeypatch, text, match):
    monkeypatch.setenv(plugin.ENVIRONMENT, text)
    with pytest.raises(certkv.InvalidArgumentError, match=match):
        plugin._options()


def test_models_and_layers_that_are_not_covered_are_refused(make, server):
    with pytest.raises(certkv.InvalidArgumentError, match="window of 64 tokens"):
        make(server.target, config={"config_class": MistralConfig, "sliding_window": 64})
    with pytest.raises(certkv.UnavailableError, match="no store at unix:/nonexistent.sock"):
        make("unix:/nonexistent.sock", client={"rpc_timeout_ms": 300})
    engine = make(server.target)
    request = engine.prompt(prompt_ids(20, 70))
    request.ids.append(1), request.slots.append(900)
    for change in ({"logit_cap": 30.0}, {"sliding_window_size": 64}, {"scaling": 1.0}):
        with pytest.raises(certkv.InvalidArgumentError, match="the config said"):
            engine.backend.forward_decode(
                None, None, None, Model.layer(0, **change), None, save_kv_cache=False
            )
    batch = engine._batch(ForwardMode.MIXED, [request], 1)
    with pytest.raises(certkv.InvalidArgumentError, match="mode MIXED"):
        engine.backend.init_forward_metadata(batch)
