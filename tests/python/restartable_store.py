"""A certkvd whose target stays when it is killed and started again."""

import ctypes
import os
import signal
import subprocess
import time

import certkv

_PR_SET_PDEATHSIG = 1


class RestartableStore:
    def __init__(self, directory):
        self._directory = directory
        self._socket = directory / "certkvd.sock"
        self.target = f"unix:{self._socket}"
        self.process = None

    def start(self):
        """Starts it and waits until it serves."""
        with open(self._directory / "certkvd.log", "ab") as log:
            self.process = subprocess.Popen(
                [certkv.find_certkvd(), "--socket", str(self._socket)],
                env={**os.environ, "CERTKV_RUNTIME_DIR": str(self._directory)},
                stdout=log,
                stderr=log,
                # It ends with the thread that started it, however that ends.
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        spec = certkv.CacheSpec.uniform(
            "is-it-there", layer_count=1, kv_head_count=1, group_size=1, head_dim=64
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                certkv.Client(spec, self.target, rpc_timeout_ms=500).close()
                return
            except certkv.Error:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def kill(self):
        """kill -9, and waits for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def log(self):
        return (self._directory / "certkvd.log").read_text()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()


def wait_until(condition, seconds=20):
    """Whether it held within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
