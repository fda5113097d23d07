"""A certkvd for notebooks and tests: started here, and ended for sure."""

from __future__ import annotations

import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from typing import Optional, Union

from certkv import _errors

_START_SECONDS = 20.0
_PACKAGE = pathlib.Path(__file__).parent


class EmbeddedServer:
    """A running certkvd with sockets in a directory of its own. Made by embedded().

    Attributes:
        target: for Client.
        directory: its runtime directory; `certkvd.log` there is its log. Gone after close().
        pid: of certkvd.
    """

    def __init__(self, program: str, config: Optional[str]) -> None:
        self._pipe = -1
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="certkv-"))
        self.target = f"unix:{self.directory}/certkvd.sock"
        self.pid = 0
        arguments = [program, "--socket", f"{self.directory}/certkvd.sock"]
        if config is not None:
            path = self.directory / "certkvd.yaml"
            path.write_text(config, encoding="utf-8")
            arguments += ["--config", str(path)]
        # The watcher ends the server and removes the directory when this pipe closes: on close(),
        # and also when this process dies in any way.
        reader, self._pipe = os.pipe()
        _servers.add(self)
        environment = {**os.environ, "CERTKV_RUNTIME_DIR": str(self.directory)}
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PACKAGE / "_watch.py"), str(self.directory)]
            + arguments,
            stdin=reader,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal is for the notebook alone
        )
        os.close(reader)
        try:
            self._wait_until_serving()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends certkvd and removes the directory. Blocks until both are gone. Idempotent."""
        self._close_pipe()
        self._watcher.wait()
        if self._watcher.stdout is not None:
            self._watcher.stdout.close()

    def log(self) -> str:
        """What certkvd has logged so far."""
        path = self.directory / "certkvd.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_watcher", None) is not None:
            self._close_pipe()
            self._watcher.poll()

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def _wait_until_serving(self) -> None:
        assert self._watcher.stdout is not None
        self.pid = int(self._watcher.stdout.readline() or 0)
        deadline = time.monotonic() + _START_SECONDS
        socket = self.directory / "certkvd.sock"
        while not socket.exists():
            # The watcher says no more until the server ends.
            if select.select([self._watcher.stdout], [], [], 0)[0]:
                raise _failed(f"certkvd ended while it started: {self.log().strip()[-1000:]}")
            if time.monotonic() > deadline:
                raise _failed(f"certkvd didn't serve within {_START_SECONDS:.0f} s; see its log")
            time.sleep(0.01)


# A forked child must not hold the pipes open.
_servers: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _close_pipes() -> None:
    for server in list(_servers):
        server._close_pipe()


os.register_at_fork(after_in_child=_close_pipes)


def _failed(message: str) -> _errors.Error:
    return _errors.error_of("UNAVAILABLE", "EMBEDDED_FAILED", message)


def find_certkvd() -> str:
    """Path of the certkvd to run: $CERTKV_CERTKVD, the package's own, the build's, or PATH's.

    Raises:
        UnavailableError: [EMBEDDED_FAILED], with the places looked at.
    """
    places = [
        os.environ.get("CERTKV_CERTKVD", ""),
        str(_PACKAGE / "bin" / "certkvd"),
        str(_PACKAGE.parent.parent / "bin" / "certkvd"),
        shutil.which("certkvd") or "",
    ]
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    looked = ", ".join(place for place in places if place)
    raise _failed(f"no certkvd found; looked at {looked} and PATH; set CERTKV_CERTKVD to its path")


def embedded(
    config: Optional[str] = None, certkvd: Union[str, os.PathLike[str], None] = None
) -> EmbeddedServer:
    """Starts a certkvd of this process's own and waits until it serves.

        with certkv.embedded() as server, certkv.Client(spec, server.target) as client: ...

    It ends with close() or the `with` block, and also when this process ends in any way, kill -9
    included; so does its temporary directory. In a forked child the server is the parent's alone.

    Args:
        config: text of a certkvd configuration, docs/config.md; None = the defaults.
        certkvd: path of the program; None = find_certkvd().

    Raises:
        UnavailableError: [EMBEDDED_FAILED], with the end of its log.
    """
    return EmbeddedServer(str(certkvd) if certkvd else find_certkvd(), config)
