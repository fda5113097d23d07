"""bench/eval: its shortcuts are what decoding does, and its models and questions what they say."""

import contextlib
import itertools
import json
import math
import sys

import pytest
import torch
from conftest import ROOT, generate, make_cache
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_models_test import tiny, tokens

sys.path.insert(0, str(ROOT / "bench" / "eval"))

import attention
import evaluate
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
            reader = attention.Reader([(client, request)], salt=run)
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


def test_a_layer_is_read_from_its_own_cache(server, llama):
    """Each layer with an FP8 scale of its own: of one that saturates nothing, and one that does."""
    ids = tokens(200, seed=24)[0]
    plain = attention.logits_of(llama, ids)
    llama.set_attn_implementation(attention.IMPLEMENTATION)
    scales = models.fp8_scales(llama, [ids])
    assert len(scales) == 2 and min(scales) > 0

    def difference(scales):
        with contextlib.ExitStack() as stack:
            caches = []
            for scale in scales:
                spec = attention.spec_for(llama.config, "FP8_E4M3", "V8", fp8_key_scale=scale)
                client = stack.enter_context(certkv.Client(spec, server.target))
                request = client.open_request(f"scaled-{next(_runs)}", read_mode="OBSERVE")
                caches.append((client, stack.enter_context(request)))
            logits = attention.logits_of(llama, ids, attention.Reader(caches, next(_runs)))
        return float((logits - plain)[64:].abs().mean())

    assert difference(scales) < difference([scales[0], scales[1] / 64]) / 2


@pytest.mark.parametrize("kind, first", [("prose", 64), ("copy", 128 + 8)])
def test_a_window_counts_what_follows_its_first_tokens(
    server, llama, tmp_path, monkeypatch, kind, first
):
    monkeypatch.setitem(evaluate.PREFILLS, "copy", 128)
    monkeypatch.setitem(evaluate.UNCOUNTED, "copy", 128 + 8)
    ids = tokens(256, seed=27)[0]
    evaluation = evaluate.Evaluation(tmp_path, server, None, llama)
    evaluation.configurations = ["FP16", "K4V8 ungated"]
    evaluation.window(kind, 0, ids)
    made = report.collect(tmp_path)[kind]["00"]
    plain = attention.logits_of(llama, ids)[first:-1].double()
    losses = torch.nn.functional.cross_entropy(plain, ids[first + 1 :], reduction="none")
    assert made["FP16"]["token_count"] == len(losses) == 256 - first - 1
    assert made["FP16"]["nll_sum"] == pytest.approx(float(losses.sum()), rel=1e-5)
    assert made["FP16"]["nll_of_64"][0] == pytest.approx(float(losses[:64].mean()), rel=1e-5)
    assert made["FP16"]["same_top_token"] == made["FP16"]["top_token_count"] == 256 - first
    # Every read behind the first block was observed, and 4-bit keys do change random weights' text.
    read = made["K4V8 ungated"]
    steps = 256 - evaluate.PREFILLS[kind]
    assert read["read_count"] == steps * 2 * 4
    assert abs(read["nll_sum"] - made["FP16"]["nll_sum"]) > 1e-3
    # What has a result is not done again.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    evaluation.window(kind, 0, ids)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_fp8_scales_put_the_largest_key_at_the_end_of_the_range(llama):
    ids = tokens(100, seed=25)[0]
    llama.set_attn_implementation(attention.IMPLEMENTATION)
    cache = attention.cache_of(llama, ids)
    largest = [float(layer.keys.abs().max()) for layer in cache.layers]
    assert models.fp8_scales(llama, [ids[:50], ids]) == pytest.approx([k / 448 for k in largest])


def test_outlier_channels_change_no_logit(llama):
    ids = tokens(100, seed=23)[0]
    before = attention.logits_of(llama, ids)
    scaled = models.make_outliers(tiny(LlamaConfig, LlamaForCausalLM), 24, 64.0)
    assert torch.equal(attention.logits_of(scaled, ids), before)
    keys = attention.cache_of(scaled, ids).layers[0].keys.abs().amax(dim=(0, 1, 2))
    assert float(keys[24] / keys[23]) > 10 and float(keys[56] / keys[57]) > 10


def test_outlier_channels_are_the_largest_and_stay_within_float16(llama):
    ids = tokens(100, seed=26)[0]
    llama.set_attn_implementation(attention.IMPLEMENTATION)
    keys = models.key_sizes(llama, [ids]).amax(dim=0)
    channel, scale = models.choose_outliers(llama, [ids])
    largest = float(torch.maximum(keys[channel], keys[channel + 32]))
    assert largest == float(keys.max())
    assert scale == 2 ** round(math.log2(scale))
    assert 65504 / 4 < largest * scale <= 65504 / 2


def test_what_is_calibrated_on_is_not_what_is_reported(tokenizer):
    reported = models.texts()["prose"]
    for ids in models.calibration_windows(tokenizer, 128):
        assert len(ids) == 128 and tokenizer.decode(ids[20:60]) not in reported


def test_copies_say_everything_twice():
    one, two = models.copies(2, 512)
    assert one[:256].tolist() == one[256:].tolist() and one.tolist() != two.tolist()
    assert len(set(one.tolist())) > 250 and models.copies(1, 512)[0].tolist() == one.tolist()


def test_questions_hold_their_answer(tokenizer):
    for item, keys in ((0, 1), (1, 8), (2, 32), (5, 32)):
        prompt, answer, what = retrieval.make_question(tokenizer, item, 1536)
        text, number = tokenizer.decode(prompt), tokenizer.decode(answer)
        assert len(answer) == 6 and number.isdigit() and what.startswith(f"{keys} keys")
        # Each fact, and the beginning of the answer; the number stands in one fact alone.
        assert text.count(number) == 1 and text.count("The magic number of the") == keys + 1
        fact = text[: text.index(number)].rsplit("The magic number of the ", 1)[1]
        assert fact == text.rsplit("The magic number of the ", 1)[1]
        assert 1500 <= len(prompt) <= 1600
        assert retrieval.make_question(tokenizer, item, 1536)[0] == prompt


@pytest.fixture
def results():
    """One of each kind, under FP16 and under a configuration that is worse."""
    window = {"token_count": 128, "nll_sum": 100.0, "nll_of_64": [0.7, 0.8625]}
    window |= {"top_token_count": 128, "same_top_token": 128}
    worse = {**window, "nll_sum": 101.28, "nll_of_64": [0.7, 0.8825], "same_top_token": 64}
    worse |= {"read_count": 200, "rungs": [0, 150, 0, 50, 0, 0], "observed_reads": 30}
    worse |= {"repair_bytes": 5, "read_bytes": 100, "read_us_per_token": 2500.0}
    question = {"right": 6, "digit_count": 6}
    stages = {kind: {"00": {"FP16": window, "K8V4 gated": worse}} for kind in report.WINDOWS}
    stages["retrieval"] = {"00": {"FP16": question, "K8V4 gated": {**question, "right": 3}}}
    stages["greedy"] = {"00": {"FP16": {"first_other": 256}, "K8V4 gated": {"first_other": 17}}}
    return stages


def cells_of(results, configuration):
    lines = [line.split("|")[1:-1] for line in report.table(results).splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if line]
    names = [cell.strip("`") for cell, *_ in rows]
    return dict(zip(rows[0], rows[names.index(configuration)]))


def test_numbers_of_the_table(results):
    made = report.of_windows(results["prose"], "K8V4 gated")
    assert made["change"] == pytest.approx(1.005, abs=1e-3)  # e^(.01 x 128 / 128) - 1
    assert made["worst_stretch"] == pytest.approx(0.02)
    assert made["same_top"] == 0.5
    assert cells_of(results, "K8V4 gated") == {
        "format, gate": "`K8V4 gated`",
        "tokens": "256",
        "prose, %": "+1.01 ± 1.00",
        "code, %": "+1.01 ± 1.00",
        "worst window, %": "+1.01",
        "worst 64 tokens, nats": "+0.020",
        "same first choice, %": "50.0",
        "copy, %": "+1.01 ± 1.00",
        "copy, same first choice, %": "50.0",
        "outlier model, %": "+1.01 ± 1.00",
        "digits found": "3 of 6",
        "greedy, tokens until another": "17",
        "certified at once, %": "60.0",
        "read again, %": "5.0",
        "reads, ms per token": "2.5",
    }
    base = cells_of(results, "FP16")
    assert base["prose, %"] == "+0.00 ± 0.00" and base["digits found"] == "6 of 6"
    assert "1 windows of prose" in report.table(results)


def test_a_row_is_compared_on_the_windows_that_it_has(results):
    results["prose"]["01"] = {"FP16": {**results["prose"]["00"]["FP16"], "nll_sum": 50.0}}
    results["outliers"] = {"00": {"FP16": results["prose"]["00"]["FP16"]}}
    del results["greedy"]
    cells = cells_of(results, "K8V4 gated")
    assert cells["tokens"] == "256" and cells["prose, %"] == "+1.01 ± 1.00"
    assert cells["outlier model, %"] == ""
    assert "greedy, tokens until another" not in cells
    assert cells_of(results, "FP16")["tokens"] == "384"


def test_rows_come_by_format_and_gate(results):
    for kind in ("prose", "code"):
        one = results[kind]["00"]
        one["K8V4 ungated"] = one["FP8-scaled gated"] = one["K8V4 gated"]
    results["copy"]["00"]["K4V8 gated"] = results["copy"]["00"]["K8V4 gated"]
    order = ["FP16", "FP8-scaled gated", "K4V8 gated", "K8V4 ungated", "K8V4 gated"]
    assert report.configurations(results) == order
    cells = cells_of(results, "K4V8 gated")
    assert cells["tokens"] == "0" and cells["prose, %"] == ""
    assert cells["copy, %"] == "+1.01 ± 1.00"


def test_the_picture_has_a_dot_for_each_window(results):
    drawn = report.picture(results)
    assert drawn.count('r="3.5"') == 4 + 4  # of windows, and of the legend
    assert "nan" not in drawn and drawn.count("<svg") == 1


def test_items_that_lack_fp16_are_left_out(tmp_path):
    for item, configuration in ((0, "FP16"), (0, "K8V4 gated"), (1, "K8V4 gated")):
        path = tmp_path / f"prose-{item:02}-{configuration.replace(' ', '_')}.json"
        path.write_text(json.dumps({"configuration": configuration, "summary": "", "x": item}))
    stages = report.collect(tmp_path)
    assert stages == {"prose": {"00": {"FP16": {"x": 0}, "K8V4 gated": {"x": 0}}}}
