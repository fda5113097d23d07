"""vLLM engines, each a process of its own, on one store: shared prefixes, and a store that dies."""

import os
import pathlib
import re
import signal
import statistics
import sys
import time

import pytest
from vllm_process import Engine, connector

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
from restartable_store import RestartableStore, wait_until  # noqa: E402

BLOCK = 128  # tokens, vLLM's default on a CPU


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Three of two blocks and some tokens."""
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    return [ids[first : first + 2 * BLOCK + 20] for first in (0, 400, 800)]


@pytest.fixture(scope="module")
def story(model_folder, prompts, tmp_path_factory):
    """What the engines answered, step by step; each start takes half a minute, so there are few."""
    folder = tmp_path_factory.mktemp("vllm")
    said = {}
    with RestartableStore(folder) as store:
        transfers = {
            "plain": None,
            "first": connector(store),
            "second": connector(store, "KillingConnector", "vllm_faults"),
            "other": connector(store, load="quantized", key_format="K6"),
        }
        engines = {
            # One of them in several processes, as vLLM starts by default.
            name: Engine(
                folder, model_folder, name, transfer, "several" if name == "second" else "one"
            )
            for name, transfer in transfers.items()
        }
        try:
            for engine in engines.values():
                engine.wait()
            plain, first, second, other = engines.values()
            shared, killed, away = prompts
            said["cold"] = [plain.ask(prompt) for prompt in prompts]
            # With its own prefix cache: the same computation as after a load.
            said["warm"] = [plain.ask(prompt) for prompt in prompts]
            plain.end()
            said["first"] = [first.ask(shared), first.ask(killed)]
            first.end()
            said["second"] = second.ask(shared)
            said["other"] = other.ask(shared)
            said["other_again"] = other.ask_until_loaded(shared)
            other.end()
            second.kill_order.write_text(str(store.process.pid))
            said["killed"] = second.ask(killed)
            said["exit_code"] = store.process.wait(10)
            said["away"] = second.ask(away)
            store.start()
            # Its scheduler and its worker ask again when a prompt comes by.
            wait_until(lambda: _ask_short(second).count("CertKV: the store is back") == 2, 60)
            said["back"] = second.ask_until_loaded(away)
            second.end()
            said["logs"] = {name: engine.log() for name, engine in engines.items()}
            yield said
        finally:
            for engine in engines.values():
                engine.kill()


def _ask_short(engine):
    """The engine's log after a prompt that is shorter than a block."""
    engine.ask([1, 2, 3], tokens=1)
    time.sleep(0.5)
    return engine.log()


def tokens_of(answers):
    return [answer.token_ids for answer in answers]


def counters(log, role):
    """What a connector says when it ends.

    Of engines of one process alone: vLLM kills processes of its own that take long to end.
    """
    (line,) = re.findall(rf"CertKV: {role} ends: (.*)", log)
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


def test_an_engine_with_an_empty_store_says_what_one_without_says(story):
    assert [answer.cached for answer in story["first"]] == [0, 0]
    assert tokens_of(story["first"]) == tokens_of(story["cold"][:2])
    assert counters(story["logs"]["first"], "worker")["saved_blocks"] == 4


def test_a_second_engine_loads_the_first_ones_prefix_and_says_the_same(story):
    assert story["second"].cached == 2 * BLOCK
    assert story["second"].token_ids == story["warm"][0].token_ids
    assert story["second"].seconds < story["first"][0].seconds


def test_a_store_killed_between_lookup_and_load_changes_no_token(story):
    assert story["exit_code"] == -signal.SIGKILL
    assert story["killed"].token_ids == story["cold"][1].token_ids
    log = story["logs"]["second"]
    assert "2 of 2 blocks of request" in log and "are computed" in log
    assert "Recovered from KV load failure" in log  # vLLM's own line


def test_an_engine_goes_on_without_its_store_and_finds_it_again(story):
    assert (story["away"].cached, story["back"].cached) == (0, 2 * BLOCK)
    assert story["away"].token_ids == story["cold"][2].token_ids
    assert story["back"].token_ids == story["warm"][2].token_ids
    log = story["logs"]["second"]
    # One line each of scheduler and worker, however often they asked.
    assert log.count("CertKV: the store is away") == 2


def test_engines_of_other_specs_and_loads_share_the_store_and_nothing_else(story):
    assert (story["other"].cached, story["other_again"].cached) == (0, 2 * BLOCK)
    assert story["other"].token_ids == story["cold"][0].token_ids
    assert "loads quantized" in story["logs"]["other"]
    assert counters(story["logs"]["other"], "worker")["saved_blocks"] == 2


@pytest.mark.long
def test_times_to_the_first_token(model_folder, tokenizer, tmp_path, capsys):
    """Prints them: without a connector, with one and no hit (with saves), and with hits."""
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    prompts = [ids[first : first + 8 * BLOCK + 6] for first in (0, 500, 1000)]
    seconds = {}
    with RestartableStore(tmp_path) as store:
        for name, transfer in (
            ("without a connector", None),
            ("no hit", connector(store)),
            ("hit", connector(store)),
        ):
            engine = Engine(tmp_path, model_folder, name.replace(" ", "-"), transfer)
            try:
                engine.wait()
                engine.ask(list(range(200, 400)), tokens=1)  # the first is slower
                answers = [engine.ask(prompt, tokens=1) for prompt in prompts]
                engine.end()
            finally:
                engine.kill()
            hits = 8 * BLOCK if name == "hit" else 0
            assert [answer.cached for answer in answers] == [hits] * len(prompts)
            seconds[name] = statistics.median(answer.seconds for answer in answers)
    with capsys.disabled():
        print(f"\nmedian seconds to the first of {len(prompts[0])} tokens of prompt:")
        for name, median in seconds.items():
            print(f"  {name:20} {median:8.3f}")
        print(f"  load of the machine: {os.getloadavg()}, {os.cpu_count()} processors")
    assert seconds["hit"] < seconds["no hit"] / 3
