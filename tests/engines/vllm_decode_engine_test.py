"""A whole vLLM engine with "decode": "certified", and what CertKV then knows of its requests."""

import os
import sys

import certkv
import numpy as np
import pytest
from conftest import ROOT
from decode_checks import NEAR_TIE, ask_risk, check_every_step_has_certificates, check_risk
from vllm_process import Engine, connector

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

LAYERS, HEADS, TOLERANCE, BLOCK = 30, 9, 0.15, 128
LONG_TOKENS, SHORT_TOKENS = 24, 8
NEW_TOKENS = 48  # of what is timed


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
                name: ask_risk(store.target, name) for name in ("0", "1", "2", "3", "4")
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
    # The first new token comes from the prompt's forward, each other one from a step.
    check_every_step_has_certificates(
        records_of(said, name), prompt, LONG_TOKENS - 1, LAYERS, HEADS, TOLERANCE
    )


def test_risk_is_known_by_the_users_request_id(said):
    for name, risk in said["risk"].items():
        check_risk(risk, records_of(said, name))


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
    # All but the last token is in vLLM's prefix cache, so that steps are all that is timed.
    prompts = [ids[first : first + 4 * BLOCK + 1] for first in (0, 600)]
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
                    answers = engine.ask_together(prompts[:count], NEW_TOKENS)
                    assert all(answer.cached == 4 * BLOCK for answer in answers)
                    seconds[name, count] = answers[0].seconds / NEW_TOKENS
                engine.end()
            finally:
                engine.kill()
    with capsys.disabled():
        print(f"\nmilliseconds of a step after {len(prompts[0])} tokens of prompt, bfloat16:")
        for (name, count), step in seconds.items():
            print(f"  {name:22} {count} requests {1000 * step:8.1f}")
        print(f"  load of the machine: {os.getloadavg()}, {os.cpu_count()} processors")
    assert seconds["certified", 1] < 20 * seconds["vLLM's own attention", 1]
