"""SGLang's engine with --attention-backend certkv, beside one with its own attention."""

import json
import pathlib
import sys

import certkv
import numpy as np
import pytest
from conftest import ROOT
from decode_checks import NEAR_TIE, ask_risk, check_every_step_has_certificates, check_risk
from engine_process import EngineProcess

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

LAYERS, HEADS, TOLERANCE = 30, 9, 0.15
LONG_TOKENS, SHORT_TOKENS = 24, 8


class Engine(EngineProcess):
    def __init__(self, folder, model, name, backend, **environment):
        here = pathlib.Path(__file__).parent
        path = [ROOT / "build/release/python", ROOT / "build/engines/sglang"]
        script = here / "sglang_engine.py"
        super().__init__(folder, name, script, [model, backend], path, **environment)

    def ask(self, prompts, tokens):
        """prompts: request id -> token ids. (new token ids of each, cached tokens of each)."""
        answer = self._request(prompts=list(prompts.values()), rids=list(prompts), tokens=tokens)
        return dict(zip(prompts, answer["token_ids"])), dict(zip(prompts, answer["cached"]))

    def below_likeliest(self, prompt, new):
        """How far below the likeliest token this engine finds each of the new ones, in nats."""
        return self._request(text=prompt + new, first=len(prompt))["below"]


@pytest.fixture(scope="module")
def said(model_folder, tokenizer, tmp_path_factory):
    """What both engines answer, and what CertKV then knows."""
    folder = tmp_path_factory.mktemp("sglang")
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    short = {"short-1": ids[:20], "short-2": ids[500:540]}
    long = {"long-1": ids[100:350], "long-2": ids[600:800]}
    again = {"again": long["long-1"] + ids[50:70]}
    away = {"away": ids[900:1000]}
    out = {"folder": folder}
    with RestartableStore(folder) as store:
        options = {
            "target": store.target,
            "certificates": str(folder),
            "terms": {"tv_tolerance": TOLERANCE},
            "client": {"rpc_timeout_ms": 1000},
        }
        engines = {
            "own": Engine(folder, model_folder, "own", "torch_native"),
            "certkv": Engine(
                folder, model_folder, "certkv", "certkv", CERTKV_SGLANG=json.dumps(options)
            ),
        }
        try:
            for name, engine in engines.items():
                engine.wait()
                out[name] = {
                    "short": engine.ask(short, SHORT_TOKENS)[0],
                    "long": engine.ask(long, LONG_TOKENS)[0],
                    "again": engine.ask(again, 4),
                }
            out["below"] = {
                (name, rid): engines["own"].below_likeliest(prompt, out[name]["short"][rid])
                for name in engines
                for rid, prompt in short.items()
            }
            out["other_text"] = engines["own"].below_likeliest(short["short-1"], ids[700:720])
            assert wait_until((folder / "again.npy").exists, 20)
            out["risk"] = {rid: ask_risk(store.target, rid) for rid in (*short, *long, *again)}
            store.kill()
            for name, engine in engines.items():
                out[name]["away"] = engine.ask(away, 4)[0]
                engine.end()
            out["log"] = engines["certkv"].log()
        finally:
            for engine in engines.values():
                engine.kill()
    return out


def records_of(said, rid):
    return np.load(said["folder"] / f"{rid}.npy")


def test_short_prompts_are_read_exactly_and_give_the_engines_own_choices(said):
    for rid in ("short-1", "short-2"):
        assert set(records_of(said, rid)["outcome"]) == {certkv.Outcome.EXACT}
        assert said["certkv"]["short"][rid][:2] == said["own"]["short"][rid][:2]
        assert max(said["below"]["certkv", rid]) <= NEAR_TIE
        assert max(said["below"]["own", rid]) <= NEAR_TIE
    assert max(said["other_text"]) > 10 * NEAR_TIE, "other text would be seen"


def test_every_layer_and_step_of_each_request_has_certificates(said):
    for rid, prompt in (("long-1", 250), ("long-2", 200)):
        # The first new token comes from the prompt's forward, each other one from a step.
        check_every_step_has_certificates(
            records_of(said, rid), prompt, LONG_TOKENS - 1, LAYERS, HEADS, TOLERANCE
        )


def test_risk_is_known_by_request_id(said):
    for rid, risk in said["risk"].items():
        check_risk(risk, records_of(said, rid))


def test_a_prefix_in_the_engines_own_cache_is_read_certified_too(said):
    _, cached = said["certkv"]["again"]
    assert cached["again"] >= 249
    assert len(records_of(said, "again")) == 3 * LAYERS * HEADS


def test_without_a_store_the_engine_goes_on_with_its_own_attention(said):
    assert said["certkv"]["away"] == said["own"]["away"]
    assert "request away goes on with the engine's own attention" in said["log"]
