"""generate() of a real model through certified attention, against dense attention."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, RecordedCache, RoundedCache, dense_attention, generate, make_cache
from transformers import StoppingCriteria

import certkv
import certkv.transformers as plugin

NEW_TOKENS = 40
# Attention in float32 over the same 16-bit keys and values, relative to the output: 2^-24 for each
# of some 260 terms, where all lean one way.
FLOAT_SLACK = 2e-5


@pytest.fixture(scope="module")
def prompt(tokenizer):
    """250 tokens of a text that this project ships; the block of 64 fills at the 6th new one."""
    text = (ROOT / "LICENSE").read_text()
    return tokenizer(text, return_tensors="pt")["input_ids"][:, 100:350]


@pytest.fixture(scope="module")
def reference(model, prompt):
    return generate(model, prompt, RoundedCache(model), NEW_TOKENS)


def test_exact_reads_give_the_logits_of_dense_attention(model, server, prompt, reference):
    with make_cache(model, server, read_mode="EXACT") as cache:
        ids, logits = generate(model, prompt, cache, NEW_TOKENS)
        assert set(cache.certificates()["outcome"]) == {certkv.Outcome.EXACT}
    assert ids.tolist() == reference[0].tolist()
    # The first step differs by float32's roundings alone; later ones also by keys and values that
    # these push over to the next 16-bit number. How much that is, Transformers' own other
    # implementation shows, which does the same sums in another order.
    differences = (logits - reference[1]).abs().amax(dim=(0, 2))
    assert float(differences[0]) == 0
    assert float(differences[1]) < 1e-3
    other = generate(model, prompt, RoundedCache(model), NEW_TOKENS, implementation="eager")
    assert other[0].tolist() == ids.tolist()
    noise = (other[1] - reference[1]).abs().amax(dim=(0, 2))
    assert float(differences.max()) < 4 * float(noise.max())


FORMATS = [("K8", "V4"), ("K8", "V8"), ("K6", "V4"), ("FP8_E4M3", "V8")]


def errors_and_bounds(cache, **wrong):
    """Of each read and head: error against dense attention, bound; both relative to ||output||."""
    errors, bounds = [], []
    for layer, tokens, query, output, records in cache.reads:
        keys, values = cache.keys_and_values(layer, tokens - wrong.get("drop", 0))
        keys, values = (np.roll(a, wrong.get("roll", 0), axis=0) for a in (keys, values))
        scale = cache.spec.logit_scale * wrong.get("scale", 1)
        dense = dense_attention(query, keys, values, scale)
        size = np.linalg.norm(dense, axis=1)
        errors.append(np.linalg.norm(output - dense, axis=1) / size)
        bounds.append(records["output_error_bound"] / size)
    return np.array(errors), np.array(bounds)


@pytest.mark.parametrize("formats", FORMATS)
def test_outputs_are_within_their_bounds(model, server, prompt, formats):
    options = {"key_format": formats[0], "value_format": formats[1], "tv_tolerance": 0.2}
    with make_cache(model, server, RecordedCache, **options) as cache:
        generate(model, prompt, cache, 9)
        errors, bounds = errors_and_bounds(cache)
        assert len(errors) == 8 * len(cache.spec.layers)
        assert np.all(errors <= bounds + FLOAT_SLACK)
        # Not vacuous: somewhere a twentieth of the bound is used, and quantization is seen at all.
        assert (errors / bounds).max() > 0.05 and np.median(errors) > 50 * FLOAT_SLACK
        # A wrong plug-in would be outside: a token too few, KV heads mixed up, another scale.
        for wrong in ({"drop": 1}, {"roll": 1}, {"scale": 2}):
            errors, bounds = errors_and_bounds(cache, **wrong)
            assert np.any(errors > bounds + FLOAT_SLACK), wrong


def test_exact_outputs_are_dense_attention(model, server, prompt):
    with make_cache(model, server, RecordedCache, read_mode="EXACT") as cache:
        generate(model, prompt, cache, 9)
        errors, _ = errors_and_bounds(cache)
        assert errors.max() < FLOAT_SLACK


def test_every_layer_and_step_has_certificates(model, server, prompt):
    tolerance = 0.05
    with make_cache(model, server, tv_tolerance=tolerance) as cache:
        generate(model, prompt, cache, NEW_TOKENS)
        records = cache.certificates()
        config = model.config
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        # The first new token comes from the prompt's forward, each other one from a step.
        steps = NEW_TOKENS - 1
        assert len(records) == steps * layers * heads
        keys = {(r["query_position"], r["layer"], r["query_head"]) for r in records}
        assert keys == {
            (prompt.shape[1] + step, layer, head)
            for step in range(steps)
            for layer in range(layers)
            for head in range(heads)
        }
        exact = records["outcome"] == certkv.Outcome.EXACT
        assert np.all(exact | (records["worst_case_tv"] <= tolerance))
        assert 0.5 < np.mean(records["outcome"] == certkv.Outcome.CERTIFIED)
        risk = cache.risk()
        assert risk.read_count == len(records)
        assert risk.risk_score == pytest.approx(records["first_worst_case_tv"].max())


def test_a_second_generation_shares_the_prompt(model, server, prompt, reference):
    for expected in (0, prompt.shape[1] // 64):
        with make_cache(model, server, model_name="shared", read_mode="EXACT") as cache:
            ids, _ = generate(model, prompt, cache, 4)
            assert ids.tolist() == reference[0][:, :4].tolist()
            assert cache.shared_block_count == expected


class At(StoppingCriteria):
    """Calls a function after some new tokens; never stops."""

    def __init__(self, length, function):
        self.length, self.function = length, function

    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] == self.length:
            self.function()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_store_that_dies_in_mid_request_is_an_error(model, prompt):
    with certkv.embedded() as own:
        options = {"rpc_timeout_ms": 2000}
        with make_cache(model, own, client_options=options) as cache:
            kill = At(prompt.shape[1] + 5, lambda: os.kill(own.pid, signal.SIGKILL))
            with pytest.raises(certkv.Error) as raised:
                # Long enough that the lost lease is seen whatever can still be read exactly.
                generate(model, prompt, cache, 400, stopping_criteria=[kill])
            assert isinstance(
                raised.value, (certkv.UnavailableError, certkv.FailedPreconditionError)
            )
            # Half a token was written: the cache is of no use any more, and says so.
            with pytest.raises(certkv.InvalidArgumentError, match="ENGINE_UNSUPPORTED"):
                generate(model, prompt, cache, 2)


def test_a_store_that_is_not_there_is_an_error(model, tmp_path):
    model.set_attn_implementation("certkv")
    with pytest.raises(certkv.UnavailableError):
        plugin.CertifiedCache(
            model,
            f"unix:{tmp_path}/none.sock",
            original_dtype="float16",
            client_options={"rpc_timeout_ms": 300},
        )


class Times(StoppingCriteria):
    """When each new token was there, in seconds; never stops."""

    def __init__(self):
        self.at = []

    def __call__(self, input_ids, scores, **_):
        self.at.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.long
def test_times_per_token(model, server, prompt, capsys):
    """Prints them: with the model's own attention, and with certified reads."""
    medians = {}
    for name in ("sdpa", "K8V4", "K8V8", "EXACT"):
        if name == "sdpa":
            cache = contextlib.nullcontext(RoundedCache(model))
        elif name == "EXACT":
            cache = make_cache(model, server, read_mode="EXACT")
        else:
            cache = make_cache(model, server, key_format=name[:2], value_format=name[2:])
        times = Times()
        with cache as opened:
            generate(model, prompt, opened, NEW_TOKENS, stopping_criteria=[times])
        steps = np.diff(times.at)
        assert len(steps) == NEW_TOKENS - 1
        medians[name] = float(np.median(steps))
    with capsys.disabled():
        print(f"\nmedian milliseconds of a token after {prompt.shape[1]} of prompt, float32:")
        for name, median in medians.items():
            share = median / medians["sdpa"]
            print(f"  {name:8} {1000 * median:8.1f}  {share:5.2f} times sdpa's")
        print(f"  load of the machine: {os.getloadavg()}, {os.cpu_count()} processors")
    assert medians["K8V4"] < 10 * medians["sdpa"]
