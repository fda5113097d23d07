"""certkv.trace: what is recorded is what the model's attention used, and the C++ tools read it."""

import copy
import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import ROOT, RecordedCache, dense_attention, generate
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers_models_test import tiny, tokens

import certkv
import certkv.trace
import certkv.transformers

CERTKV = ROOT / "build" / "release" / "bin" / "certkv"
TOKENS, QUERIES = 300, 48
# Attention in float32 over the same 16-bit numbers, relative to the output: as in
# transformers_test.py.
FLOAT_SLACK = 2e-5


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tokenizer((ROOT / "LICENSE").read_text())["input_ids"][:TOKENS]


@pytest.fixture(scope="module")
def recorded(model, prompt, tmp_path_factory):
    """(path, outputs of each layer's attention, and of its projections of query and key)."""
    seen, hooks = {}, []
    for layer in model.model.layers:
        attention = layer.self_attn

        def keep(name, index=attention.layer_idx, of_input=False):
            def hook(_, arguments, *output):
                seen[index, name] = (arguments[0] if of_input else output[0])[0].detach().clone()

            return hook

        hooks.append(attention.o_proj.register_forward_pre_hook(keep("output", of_input=True)))
        hooks.append(attention.q_proj.register_forward_hook(keep("query")))
        hooks.append(attention.k_proj.register_forward_hook(keep("key")))
    path = tmp_path_factory.mktemp("trace") / "prompt.safetensors"
    before = model.config._attn_implementation
    certkv.trace.record(model, prompt, path, query_count=QUERIES, model_license="Apache-2.0")
    assert model.config._attn_implementation == before
    for hook in hooks:
        hook.remove()
    return path, seen


def errors(recorded, layer, **wrong):
    """Distance of the model's attention outputs from those of the file, by the definition."""
    path, seen = recorded
    file = safetensors.numpy.load_file(path)
    keys, values = (file[f"layers.{layer}.{name}"].transpose(1, 0, 2) for name in ("key", "value"))
    keys, values = (np.roll(a, wrong.get("roll", 0), axis=0) for a in (keys, values))
    out = []
    for query, position in zip(file[f"layers.{layer}.query"], file["query_positions"]):
        end = position + 1 - wrong.get("drop", 0)
        scale = wrong.get("scale", 0.125)
        dense = dense_attention(query.astype(np.float32), keys[:, :end], values[:, :end], scale)
        used = seen[layer, "output"][position].reshape(dense.shape).numpy()
        out.append(np.linalg.norm(used - dense, axis=1) / np.linalg.norm(dense, axis=1))
    return np.array(out)


@pytest.mark.parametrize("layer", [0, 13, 29])
def test_attention_of_the_recorded_arrays_is_the_models_own(recorded, layer):
    assert errors(recorded, layer).max() < FLOAT_SLACK
    # A wrong recorder would be seen: KV heads mixed up, a token too few, another scale.
    for wrong in ({"roll": 1}, {"drop": 1}, {"scale": 0.25}):
        assert errors(recorded, layer, **wrong).max() > 100 * FLOAT_SLACK, wrong


def test_keys_and_queries_are_after_rope(model, recorded):
    path, seen = recorded
    file = safetensors.numpy.load_file(path)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS)[None])
    for layer in (0, 29):
        before = [
            seen[layer, name].view(1, TOKENS, -1, 64).transpose(1, 2) for name in ("query", "key")
        ]
        query, key = (t[0].transpose(0, 1) for t in apply_rotary_pos_emb(*before, cos, sin))
        # Exactly: the same operations, then one rounding to float16.
        assert np.array_equal(file[f"layers.{layer}.key"], key.half().numpy())
        assert np.array_equal(file[f"layers.{layer}.query"], query[-QUERIES:].half().numpy())
        assert not np.array_equal(file[f"layers.{layer}.key"], before[1][0].transpose(0, 1).half())


def test_the_file_is_what_the_format_says(model, recorded, prompt):
    file = safetensors.numpy.load_file(recorded[0])
    assert file["token_ids"].tolist() == prompt
    assert file["query_positions"].tolist() == list(range(TOKENS - QUERIES, TOKENS))
    shapes = {name: (array.dtype.name, array.shape) for name, array in file.items()}
    assert len(shapes) == 2 + 3 * 30
    assert shapes["layers.7.key"] == shapes["layers.7.value"] == ("float16", (TOKENS, 3, 64))
    assert shapes["layers.7.query"] == ("float16", (QUERIES, 9, 64))
    info = subprocess.run(
        [CERTKV, "--json", "trace", "info", recorded[0]], capture_output=True, check=True
    )
    info = json.loads(info.stdout)
    assert (info["tokens"], info["layers"], info["license"]) == (TOKENS, list(range(30)), "Apache-2.0")
    # The name under which an engine shares blocks of this model.
    assert info["model"] == certkv.transformers.spec_of(model, original_dtype="float16").model


def test_the_demo_reads_what_the_command_records(model_folder, tmp_path):
    """`certkv trace record`, with the model's own tokenizer, then every bound checked."""
    (tmp_path / "prompt.txt").write_text((ROOT / "LICENSE").read_text())
    trace = tmp_path / "trace.safetensors"
    arguments = ["--prompt", tmp_path / "prompt.txt", "--out", trace, "--tokens", "400"]
    arguments += ["--queries", "32", "--layers", "3,17", "--name", "smol@1"]
    made = subprocess.run(
        [CERTKV, "trace", "record", "--model", model_folder, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CERTKV_PYTHON": sys.executable},
    )
    assert made.returncode == 0, made.stderr
    assert "400 tokens of smol@1" in made.stdout
    demo = subprocess.run(
        [CERTKV, "--json", "demo", "--trace", trace], capture_output=True, text=True, check=False
    )
    assert demo.returncode == 0, demo.stderr  # 4: a bound was violated
    runs = json.loads(demo.stdout)["runs"]
    assert all(run["violations"] == 0 and run["reads"] == 2 * 32 * 9 for run in runs)


def test_the_command_says_what_is_wrong(model_folder, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("The quick brown fox")

    def run(*more):
        arguments = ["record", "--model", model_folder, "--out", tmp_path / "trace", *more]
        return certkv.trace.main([str(word) for word in arguments])

    with pytest.raises(SystemExit) as usage:  # no prompt
        run()
    assert usage.value.code == 2
    assert run("--prompt", tmp_path / "none.txt") == 1
    assert "none.txt" in capsys.readouterr().err
    assert run("--prompt", tmp_path / "prompt.txt") == 1
    said = capsys.readouterr().err
    assert "TRACE_INVALID" in said and "queries of 64 positions" in said
    assert not (tmp_path / "trace").exists()


@pytest.fixture(scope="module")
def llama():
    return tiny(LlamaConfig, LlamaForCausalLM)


def test_what_a_trace_cannot_hold_is_refused(llama, tmp_path):
    ids = tokens(80, seed=3)[0].tolist()

    def refused(match, model=llama, **options):
        with pytest.raises(certkv.InvalidArgumentError, match=match):
            certkv.trace.record(model, ids, tmp_path / "trace", **options)
        assert list(tmp_path.iterdir()) == []

    refused("queries of 81 positions", query_count=81)
    refused("layers are", layers=[1, 0])
    refused("layers are", layers=[0, 99])
    gemma = tiny(Gemma3TextConfig, Gemma3ForCausalLM, sliding_window=32, num_hidden_layers=6)
    refused("sees the last 32 tokens of 80", gemma)
    # A key beyond float16.
    huge = copy.deepcopy(llama)
    with torch.no_grad():
        huge.model.layers[1].self_attn.k_proj.weight.mul_(1e7)
    refused("layer 1: the largest key .* 65504", huge)


def test_a_window_that_the_prompt_fits_is_recorded(tmp_path):
    gemma = tiny(Gemma3TextConfig, Gemma3ForCausalLM, sliding_window=128, num_hidden_layers=6)
    certkv.trace.record(gemma, tokens(80, seed=3)[0].tolist(), tmp_path / "trace", query_count=8)
    assert len(safetensors.numpy.load_file(tmp_path / "trace")) == 2 + 3 * 6


def test_generation_loads_what_calibration_of_the_trace_proposes(model, recorded, prompt, tmp_path):
    spec, policy = tmp_path / "spec.json", tmp_path / "policy.json"
    arguments = ["--formats", "K8V4,K6V4w4,K6V4", "--spec", spec, "--policy", policy]
    made = subprocess.run(
        [CERTKV, "--json", "calibrate", recorded[0], *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    expected = json.loads(made.stdout)
    formats = {layer["format"] for layer in expected["layers"]}
    assert len(formats) > 1, "layers differ"
    read = certkv.CacheSpec.from_file(spec)
    model.set_attn_implementation("certkv")
    with certkv.embedded() as server:
        command = [CERTKV, "--target", server.target, "policy", "set", "--file", policy]
        subprocess.run(command, check=True, capture_output=True)
        with certkv.transformers.CertifiedCache(
            model, server.target, layers=read.layers, original_dtype="float16"
        ) as cache:
            # The trace's spec is the engine's own, so both share blocks.
            assert cache.spec.digest == read.digest
            generate(model, torch.tensor([prompt]), cache, 8)
            records = cache.certificates()
            once = np.mean((records["outcome"] == 1) & (records["rung"] == 1))
    # Of the same model's next tokens; the figure is of other queries, so roughly.
    assert abs(once - expected["held_out_coverage"]) < 0.1
    for layer in expected["layers"]:
        of_layer = records[(records["layer"] == layer["layer"]) & (records["outcome"] == 1)]
        assert np.all(of_layer["worst_case_tv"] <= np.float32(layer["tv_tolerance"]))


def test_generation_reads_with_the_witness_weights_of_calibration(
    model, recorded, prompt, tmp_path
):
    options = ["--formats", "K6V8w1c", "--spec", tmp_path / "spec"]
    subprocess.run([CERTKV, "calibrate", recorded[0], *options], check=True, capture_output=True)
    layers = certkv.CacheSpec.from_file(tmp_path / "spec").layers
    weights = np.array([layer.witness_weights for layer in layers])
    assert weights.shape == (30, 3, 64) and weights.max() > 2 * weights.min()
    plain = [dataclasses.replace(layer, witness_weights=()) for layer in layers]
    model.set_attn_implementation("certkv")
    bounds = {}
    with certkv.embedded() as server:
        for name, formats in (("weights", layers), ("plain", plain)):
            with RecordedCache(
                model, server.target, layers=formats, original_dtype="float16", read_mode="OBSERVE"
            ) as cache:
                generate(model, torch.tensor([prompt]), cache, 6)
                assert cache.spec.layers[7].witness_weights == formats[7].witness_weights
                for layer, count, query, output, records in cache.reads:
                    keys, values = cache.keys_and_values(layer, count)
                    dense = dense_attention(query, keys, values, cache.spec.logit_scale)
                    error = np.linalg.norm(output - dense, axis=1)
                    slack = FLOAT_SLACK * np.linalg.norm(dense, axis=1)
                    assert np.all(error <= records["output_error_bound"] + slack)
                bounds[name] = cache.certificates()["first_worst_case_tv"]
    # The same bytes of keys, known better.
    assert np.mean(bounds["weights"]) < 0.95 * np.mean(bounds["plain"])


def test_formats_of_another_number_of_layers_are_refused(model):
    model.set_attn_implementation("certkv")
    with pytest.raises(certkv.InvalidArgumentError, match="formats of 4 layers .* has 30"):
        certkv.transformers.CertifiedCache(
            model, "unix:/none", layers=[certkv.LayerSpec()] * 4, original_dtype="float16"
        )
