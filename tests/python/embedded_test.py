"""The embedded server ends for sure, and what it takes with it is an error."""

import os
import signal
import subprocess
import sys
import threading
import time

import certkv
import numpy as np
import pytest
from conftest import MadeSequence, exact_attention, make_queries, make_spec


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_close_ends_the_server_and_removes_its_directory():
    server = certkv.embedded()
    assert is_running(server.pid) and server.directory.is_dir()
    assert "certkvd" in server.log()
    server.close()
    server.close()
    assert not is_running(server.pid) and not server.directory.exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "os._exit(0)"])
def test_the_server_ends_with_its_process_however_that_ends(end):
    program = (
        "import certkv, os, sys, threading\n"
        # Started by a thread that is gone: the server must outlive that.
        "made = []\n"
        "thread = threading.Thread(target=lambda: made.append(certkv.embedded()))\n"
        "thread.start(); thread.join()\n"
        "print(made[0].pid, made[0].directory, flush=True)\n"
        "sys.stdin.readline()\n" + end
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, directory = process.stdout.readline().split()
    time.sleep(0.3)
    assert is_running(pid)
    process.communicate("\n")
    assert wait_until(lambda: not is_running(pid))
    assert wait_until(lambda: not os.path.exists(directory))


def test_a_forked_child_does_not_keep_the_server():
    with certkv.embedded() as server:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            server.close()
            assert not is_running(server.pid)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_config_is_used_and_a_wrong_one_is_named():
    with certkv.embedded("gate:\n  tv_tolerance: 0.05\n") as server:
        with certkv.Client(make_spec(), server.target) as client:
            with pytest.raises(certkv.InvalidArgumentError) as raised:
                client.open_request("too-loose", tv_tolerance=0.1)
            assert raised.value.reason == "TOLERANCE_INVALID"
    with pytest.raises(certkv.UnavailableError) as raised:
        certkv.embedded("gate:\n  no_such_setting: 1\n")
    assert raised.value.reason == "EMBEDDED_FAILED"
    assert "no_such_setting" in raised.value.message


def test_a_program_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(certkv.UnavailableError) as raised:
        certkv.embedded(certkvd=tmp_path / "certkvd")
    assert raised.value.reason == "EMBEDDED_FAILED"
    assert "can't be started" in raised.value.message
    monkeypatch.setenv("CERTKV_CERTKVD", str(tmp_path / "other"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(certkv.UnavailableError) as raised:
        certkv.find_certkvd()
    assert str(tmp_path / "other") in raised.value.message


def test_a_server_killed_while_it_is_read_gives_exact_outputs_or_errors():
    made = MadeSequence(512, seed=60)
    queries = make_queries(1)
    truth, _ = exact_attention(made.layers[0], 511, queries)
    with certkv.embedded() as server:
        client = certkv.Client(make_spec(), server.target, rpc_timeout_ms=2000)
        sequence = client.put_sequence(made.token_ids, made.layers)
        attention = client.attention(sequence, client.open_request("killed"))
        certified, exact, errors, wrong = [], [], [], []

        def read_until_error():
            deadline = time.monotonic() + 90
            while not errors and time.monotonic() < deadline:
                try:
                    read = attention.attend(0, 511, queries)
                except certkv.Error as error:
                    errors.append(error)
                    return
                distance = np.linalg.norm(read.outputs - truth, axis=1)
                if not np.all(distance <= read.certificates["output_error_bound"] + 1e-12):
                    wrong.append(read)
                outcomes = set(read.certificates["outcome"])
                (exact if outcomes == {certkv.Outcome.EXACT} else certified).append(outcomes)

        reader = threading.Thread(target=read_until_error)
        reader.start()
        assert wait_until(lambda: len(certified) >= 20), errors
        os.kill(server.pid, signal.SIGKILL)
        reader.join(120)
        assert not reader.is_alive(), "a read hangs on a server that is dead"
        assert not wrong
        assert errors and errors[0].reason, errors
        with pytest.raises(certkv.Error):
            client.put_sequence(made.token_ids, made.layers)
        client.close()
