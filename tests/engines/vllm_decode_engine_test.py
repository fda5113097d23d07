"""A whole vLLM engine with "decode": "certified", and what CertKV then knows of its requests."""

import json
import os
import subprocess
import sys

import certkv
import numpy as np
import pytest
from conftest import ROOT
from vllm_process import Engine, connector

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

CERTKV = ROOT / "build" / "release" / "bin" / "certkv"
LAYERS, HEADS, TOLERANCE, BLOCK = 30, 9, 0.15, 128
LONG_TOKENS, SHORT_TOKENS = 24, 8
# Logits below 32 are multiples of 1/8 in bfloat16. Two that differ by less than two steps may
# change places when attention is rounded otherwise, and so may greedy text.
NEAR_TIE = 2 * 0.125


@pytest.fixture(scope="module")
def said(model_folder, tokenizer, tmp_path_factory):
    """What the engine answers, step by step. Its requests' ids are "0", "1", ..."""
    folder = tmp_path_factory.mktemp("vllm-decode")
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    prompts = {
        "short": [ids[:20]],
        "long": [ids[100:350], ids[600:800]],
        "again": [ids[100:350] + ids[50:70]],
        "loaded": [ids[100:350] + ids[50:70]],
        "away": [ids[900:1000]],
    }
    out = {"folder": folder, "prompts": prompts}
    with RestartableStore(folder) as store:
        transfer = connector(
            store,
            decode="certified",
            certificates=str(folder),
            terms={"tv_tolerance": TOLERANCE},
            rpc_timeout_ms=1000,
        )
        engine = Engine(folder, model_folder, "certified", transfer)
        try:
            out["start"] = engine.wait()
            out["short"] = engine.ask_together(prompts["short"], SHORT_TOKENS)
            out["long"] = engine.ask_together(prompts["long"], LONG_TOKENS)
            out["again"] = engine.ask_together(prompts["again"], 4)
            engine.forget()
            out["loaded"] = engine.ask_together(prompts["loaded"], 4)
            # An engine that is asked directly learns with the next request that the last has ended.
            engine.ask([1, 2, 3], tokens=1)
            assert wait_until((folder / "4.npy").exists, 20)
            out["risk"] = {
                name: json.loads(
                    subprocess.run(
                        [CERTKV, "--target", store.target, "--json", "risk", name],
                        check=True,
                        capture_output=True,
                    ).stdout
                )
                for name in ("0", "1", "2", "3", "4")
            }
            store.kill()
            out["away"] = engine.ask_together(prompts["away"], 4)
            out["below"] = {
                name: [
                    below
                    for prompt, answer in zip(prompts[name], out[name])
                    for below in engine.below_likeliest(prompt, answer.token_ids)
                ]
                for name in ("short", "away")
            }
            out["other_text"] = engine.below_likeliest(prompts["short"][0], ids[700:720])
            engine.end()
            out["log"] = engine.log()
        finally:
            engine.kill()
    return out


def records_of(said, name):
    return np.load(said["folder"] / f"{name}.npy")


def test_a_short_request_is_read_exactly_and_gives_the_engines_own_choices(said):
    assert set(records_of(said, "0")["outcome"]) == {certkv.Outcome.EXACT}
    assert max(said["below"]["short"]) <= NEAR_TIE
    assert max(said["other_text"]) > 10 * NEAR_TIE, "other text would be seen"


@pytest.mark.parametrize("name, prompt", [("1", 250), ("2", 200)])
def test_every_layer_and_step_of_requests_in_one_batch_has_certificates(said, name, prompt):
    records = records_of(said, name)
    keys = {(r["query_position"], r["layer"], r["query_head"]) for r in records}
    # The first new token comes from the prompt's forward, each other one from a step.
    assert len(records) == (LONG_TOKENS - 1) * LAYERS * HEADS
    assert keys == {
        (prompt + step, layer, head)
        for step in range(LONG_TOKENS - 1)
        for layer in range(LAYERS)
        for head in range(HEADS)
    }
    exact = records["outcome"] == certkv.Outcome.EXACT
    assert np.all(exact | (records["worst_case_tv"] <= np.float32(TOLERANCE)))
    assert np.mean(records["outcome"] == certkv.Outcome.CERTIFIED) > 0.5


def test_risk_is_known_by_the_users_request_id(said):
    for name, risk in said["risk"].items():
        records = records_of(said, name)
        assert int(risk["read_count"]) == len(records), name
        worst = float(records["first_worst_case_tv"].max())
        assert float(risk["risk_score"]) == pytest.approx(worst, rel=1e-5)


def test_prefixes_in_vllms_cache_and_in_the_store_are_read_certified_too(said):
    # In vLLM's own cache, and after that was dropped, loaded from what decode had stored.
    for name, request in (("again", "3"), ("loaded", "4")):
        assert said[name][0].cached >= BLOCK, name
        assert len(records_of(said, request)) == 3 * LAYERS * HEADS
    assert "loaded_blocks=" in said["log"]


def test_without_a_store_vllm_goes_on_with_its_own_attention(said):
    assert max(said["below"]["away"]) <= NEAR_TIE
    assert "goes on with the engine's own attention, without certificates" in said["log"]
    assert not (said["folder"] / "6.npy").exists()


@pytest.mark.long
def test_times_per_token(model_folder, tokenizer, tmp_path, capsys):
    """Prints them: with vLLM's own attention, and with certified reads, of one and two requests."""
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    prompts = [ids[first : first + 512] for first in (0, 600)]
    seconds = {}
    with RestartableStore(tmp_path) as store:
        for name, transfer in (
            ("vLLM's own attention", None),
            ("certified", connector(store, decode="certified")),
        ):
            engine = Engine(tmp_path, model_folder, name.replace(" ", "-"), transfer)
            try:
                engine.wait()
                engine.ask_together(prompts, 2)  # the first is slower, and fills the prefix cache
                for count in (1, 2):
                    few, many = (
                        min(engine.ask_together(prompts[:count], n)[0].seconds for _ in range(3))
                        for n in (2, 34)
                    )
                    seconds[name, count] = (many - few) / 32
                engine.end()
            finally:
                engine.kill()
    with capsys.disabled():
        print("\nmilliseconds of a decode step after 512 tokens of prompt, bfloat16:")
        for (name, count), step in seconds.items():
            print(f"  {name:22} {count} requests {1000 * step:8.1f}")
        print(f"  load of the machine: {os.getloadavg()}, {os.cpu_count()} processors")
    assert seconds["certified", 1] < 20 * seconds["vLLM's own attention", 1]
