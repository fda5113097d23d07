"""What deploy/kubernetes relies on: servers and engine in PID and mount namespaces of their own, as
another user than root, share a directory with the store's socket and nothing else."""
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import pytest

from conftest import BUILD, ROOT, need

TRACE = ROOT / "tests/data/smollm2-135m-4-layers.safetensors"
USER = 10001


def in_pod(*command, read_only=None):
    """The command line that runs a command so; `read_only` is a directory that it can't write to."""
    mount = f"mount --bind {read_only} {read_only} && mount -o remount,bind,ro {read_only} && " \
            f"! touch {read_only}/x 2>/dev/null && " if read_only else ""
    script = f'{mount}exec setpriv --reuid {USER} --regid {USER} --clear-groups "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--mount-proc",
            "sh", "-ec", script, "sh", *[str(word) for word in command]]


@pytest.fixture
def node():
    """A directory for sockets, of the servers' user, that this user can reach."""
    need("unshare")
    need("setpriv")
    program = in_pod(BUILD / "bin/certkv", "trace", "info", TRACE)
    if os.geteuid() != 0 or subprocess.run(program, capture_output=True).returncode != 0:
        pytest.skip(f"needs root, namespaces, and a build folder that user {USER} can reach")
    # Not pytest's, which is closed to other users.
    whole = tempfile.TemporaryDirectory(prefix="certkv_pods_")
    folder = pathlib.Path(whole.name)
    folder.chmod(0o755)
    for name in ["shared", "own"]:
        (folder / name).mkdir()
        os.chown(folder / name, USER, USER)
    processes = []
    yield folder, processes
    for process in processes:
        # The server itself, whose parent only waits for it.
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)
        process.wait()
    whole.cleanup()


def start(node, program, config, read_only=None):
    folder, processes = node
    path = folder / f"{program}.yaml"
    path.write_text(config)
    log = open(folder / f"{program}.log", "w")
    command = in_pod(BUILD / "bin" / program, "--config", path, read_only=read_only)
    processes.append(subprocess.Popen(command, stderr=log))
    for _ in range(600):
        text = (folder / f"{program}.log").read_text()
        if "event=listening" in text:
            return
        assert processes[-1].poll() is None, text
        time.sleep(0.1)
    raise AssertionError(f"{program} does not listen after a minute")


def test_an_engine_reads_with_certificates_across_pods(node):
    folder, _ = node
    store, own = folder / "shared/kvstore.sock", folder / "own"
    start(node, "certkv-kvstore", f"server: {{unix_socket: {store}}}\n"
          "kvstore: {device_memory: 8MiB, backing_memory: 16MiB, staging_memory: 64MiB}\n")
    start(node, "certkv-certifier", f"server: {{unix_socket: {own}/certifier.sock}}\n"
          f"certifier: {{store_socket: {store}}}\n", read_only=folder / "shared")
    start(node, "certkv-gate", f"server: {{unix_socket: {own}/gate.sock}}\n")
    targets = ["--target", f"unix:{store}", "--certifier", f"unix:{own}/certifier.sock",
               "--gate", f"unix:{own}/gate.sock"]
    command = in_pod(BUILD / "bin/certkv", *targets, "--json", "attend", "--trace", TRACE,
                     "--request", "r1")
    engine = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert engine.returncode == 0, engine.stderr
    heads = json.loads(engine.stdout)["certificates"]
    assert len(heads) == 4 * 9
    assert all(head["outcome"] == "certified" for head in heads), heads
    # A root of another namespace is a stranger.
    stranger = subprocess.run([BUILD / "bin/certkv", *targets, "health"], capture_output=True)
    assert stranger.returncode == 3
