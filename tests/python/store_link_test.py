"""StoreLink: a store that isn't there, goes, and comes back."""

import logging
import subprocess
import sys
import time

import certkv
import pytest
from certkv._store_link import StoreLink
from conftest import make_spec
from restartable_store import RestartableStore, wait_until

_log = logging.getLogger("certkv.store_link_test")


def make_link(target, **others):
    others.setdefault("retry_seconds", 0.1)
    return StoreLink(make_spec(), target, {"rpc_timeout_ms": 500}, _log, **others)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == _log.name]


def test_a_store_that_starts_later_is_found(tmp_path, caplog):
    store = RestartableStore(tmp_path)
    link = make_link(store.target)
    try:
        assert link.client() is None
        began = time.monotonic()
        for _ in range(50):
            link.client()
        assert time.monotonic() - began < 0.4, "asking for the client waits for the store"
        with store:
            assert wait_until(lambda: link.client() is not None)
            assert link.client().lookup(list(range(64))).block_count == 0
            away, back = lines(caplog)  # one each, however often it was tried
            assert "away" in away and "UNAVAILABLE" in away and "back" in back
    finally:
        link.close()
    assert link.client() is None


def test_a_killed_store_is_reported_once_and_found_again(tmp_path, caplog):
    with RestartableStore(tmp_path) as store:
        link = make_link(store.target)
        client = link.client()
        store.kill()
        with pytest.raises(certkv.Error) as raised:
            client.lookup(list(range(64)))
        assert link.report(client, raised.value)
        assert link.report(client, raised.value)  # another thread's call, a moment later
        assert link.client() is None
        store.start()
        assert wait_until(lambda: link.client() is not None)
        assert link.client() is not client
        # What an old client's call says is no news.
        assert link.report(client, raised.value) and link.client() is not None
        assert [line for line in lines(caplog) if "away" in line] == lines(caplog)[:1]
        link.close()


def test_an_error_of_one_call_keeps_the_client(server):
    link = make_link(server.target)
    client = link.client()
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        client.lookup_blocks([b"short"])
    assert not link.report(client, raised.value)
    assert link.client() is client
    link.close()
    link.close()


def test_a_wrong_setting_is_an_error_at_once(server, tmp_path):
    with pytest.raises(certkv.Error) as raised:
        StoreLink(
            make_spec(), server.target, {"token_file": str(tmp_path / "none")}, _log
        )
    assert raised.value.code == "NOT_FOUND"


def test_attempts_keep_their_distance(tmp_path):
    now = [0.0]
    link = make_link(f"unix:{tmp_path}/none.sock", retry_seconds=10.0, clock=lambda: now[0])
    attempts = []
    connect = link._connect
    link._connect = lambda: attempts.append(now[0]) or connect()
    for seconds in (1.0, 9.9, 10.1, 12.0):
        now[0] = seconds
        link.client()
        wait_until(lambda: not link._is_connecting, 5)
    assert attempts == [10.1]
    link.close()


def test_what_is_discarded_is_closed_in_the_background(server):
    link = make_link(server.target)
    chain = link.client().lookup_blocks([])
    link.discard(chain)
    assert wait_until(lambda: chain._native.is_closed)
    link.close()


def test_it_can_be_closed_while_the_interpreter_ends(server):
    """As engines do, from an exit handler that runs after those of concurrent.futures."""
    program = (
        "import logging, sys, threading, weakref\n"
        "class Engine: pass\n"
        "engine = Engine()\n"
        "def end(): link.close(); print('closed', flush=True)\n"
        "finalizer = weakref.finalize(engine, end)\n"
        "import concurrent.futures.thread\n"
        "import certkv\n"
        "from certkv._store_link import StoreLink\n"
        "spec = certkv.CacheSpec.uniform('m', layer_count=1, kv_head_count=1, group_size=1,\n"
        "                                head_dim=64)\n"
        "link = StoreLink(spec, sys.argv[1], {}, logging.getLogger('test'))\n"
        "link.discard(link.client().lookup_blocks([]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, server.target], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
