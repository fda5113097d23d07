"""bench/eval: its shortcuts are what decoding does, and its models and questions what they say."""

import itertools
import json
import sys

import pytest
import torch
from conftest import ROOT, generate, make_cache
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_models_test import tiny, tokens

sys.path.insert(0, str(ROOT / "bench" / "eval"))

import attention
import models
import report
import retrieval

import certkv


@pytest.fixture(scope="module")
def llama():
    return tiny(LlamaConfig, LlamaForCausalLM)


_runs = itertools.count(1)


def read_at_once(model, server, formats, ids, prompt=None, **terms):
    spec = attention.spec_for(model.config, *formats)
    with certkv.Client(spec, server.target) as client:
        run = next(_runs)
        with client.open_request(f"at-once-{run}", **terms) as request:
            reader = attention.Reader(client, request, salt=run)
            return attention.logits_of(model, ids, reader, prompt), reader


@pytest.mark.parametrize("formats", [("K8", "V4"), ("K4", "V8")])
def test_a_text_at_once_has_the_logits_of_decoding_it(server, llama, formats):
    prompt = tokens(10, seed=21)
    names = {"key_format": formats[0], "value_format": formats[1]}
    with make_cache(llama, server, read_mode="OBSERVE", **names) as cache:
        new, decoded = generate(llama, prompt, cache, 190)
    ids = torch.cat([prompt, new], dim=1)[0]
    prefill = attention.cache_of(llama, ids[:10])
    # Positions 10 ... are decode steps; the last new token is not read any more.
    logits, _ = read_at_once(llama, server, formats, ids[:-1], prefill, read_mode="OBSERVE")
    difference = (logits - decoded[0, 1:]).abs().amax(dim=1)
    plain = (attention.logits_of(llama, ids[:-1])[10:] - decoded[0, 1:]).abs().amax(dim=1)
    # Float sums in another order push a number across a rounding now and then, of 16 bits before
    # the first block is full, of the formats after it. What the formats do is far more than that.
    sealed = 64 - 10
    assert float(difference[:sealed].max()) < 2e-3
    assert float(difference[sealed:].median()) < 0.02 * float(plain[sealed:].median())


def test_exact_reads_of_a_text_are_plain_attention(server, llama):
    ids = tokens(200, seed=22)[0]
    logits, reader = read_at_once(llama, server, ("K8", "V8"), ids, read_mode="EXACT")
    assert torch.allclose(logits, attention.logits_of(llama, ids), atol=0.02, rtol=0)
    positions = [int(record["query_position"][0]) for record in reader.certificates]
    assert positions == 2 * list(range(200))


def test_outlier_channels_change_no_logit(llama):
    ids = tokens(100, seed=23)[0]
    before = attention.logits_of(llama, ids)
    scaled = models.make_outliers(tiny(LlamaConfig, LlamaForCausalLM))
    assert torch.equal(attention.logits_of(scaled, ids), before)
    keys = attention.cache_of(scaled, ids).layers[0].keys.abs().amax(dim=(0, 1, 2))
    assert float(keys[24] / keys[23]) > 10 and float(keys[56] / keys[57]) > 10


def test_questions_hold_their_answer(tokenizer):
    for item in range(6):
        prompt, answer, what = retrieval.make_question(tokenizer, item, 512)
        text, number = tokenizer.decode(prompt), tokenizer.decode(answer)
        assert len(answer) == 6 and number.isdigit()
        assert (
            text.count(number) == 1
            and text.count("The magic number of the")
            == len(what.split()[0]) * int(what.split()[0]) + 1
        )
        assert 480 <= len(prompt) <= 560
        assert retrieval.make_question(tokenizer, item, 512)[0] == prompt


@pytest.fixture
def results():
    """One window of each kind and a question, under FP16 and under a configuration that is worse."""
    window = {"token_count": 128, "nll_sum": 100.0, "nll_of_64": [0.7, 0.8625]}
    window |= {"top_token_count": 128, "same_top_token": 128}
    worse = {**window, "nll_sum": 101.28, "nll_of_64": [0.7, 0.8825], "same_top_token": 64}
    worse |= {"read_count": 200, "rungs": [0, 150, 0, 50, 0, 0], "observed_reads": 30}
    worse |= {"repair_bytes": 5, "read_bytes": 100, "read_us_per_token": 2500.0}
    question = {"right": 6, "digit_count": 6}
    stages = {kind: {"00": {"FP16": window, "K8V4 gated": worse}} for kind in report.WINDOWS}
    stages["retrieval"] = {"00": {"FP16": question, "K8V4 gated": {**question, "right": 3}}}
    stages["needles"] = {"00": {"FP16": question, "K8V4 gated": {**question, "right": 0}}}
    return stages


def test_numbers_of_the_table(results):
    made = report.of_windows(results["prose"], "K8V4 gated")
    assert made["change"] == pytest.approx(1.005, abs=1e-3)  # e^.01 - 1
    assert made["worst_stretch"] == pytest.approx(0.02)
    assert made["same_top"] == 0.5
    lines = report.table(results).splitlines()
    assert lines[2].startswith("| FP16 | +0.00 ± 0.00 |") and "| 100 |" in lines[2]
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert (
        cells
        == "`K8V4 gated`|+1.01 ± 1.00|+1.01 ± 1.00|+1.01|+0.020|50.0|+1.01|50|0|60.0|5.0".split("|")
    )
    assert "1 windows of prose" in report.table(results) and "256 tokens" in report.table(results)


def test_the_picture_has_a_dot_for_each_window(results):
    drawn = report.picture(results)
    assert drawn.count('r="3.5"') == 3 + 3  # of windows, and of the legend
    assert "nan" not in drawn and drawn.count("<svg") == 1


def test_items_that_lack_a_configuration_are_left_out(tmp_path):
    for item, configuration in ((0, "FP16"), (0, "K8V4 gated"), (1, "FP16")):
        path = tmp_path / f"prose-{item:02}-{configuration.replace(' ', '-')}.json"
        path.write_text(json.dumps({"configuration": configuration, "summary": "", "x": item}))
    stages = report.collect(tmp_path)
    assert stages == {"prose": {"00": {"FP16": {"x": 0}, "K8V4 gated": {"x": 0}}}}
