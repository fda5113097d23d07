"""StoreLink: the client of a store that may be away, for engines that go on without it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Optional

from certkv import _errors
from certkv._client import Client
from certkv._job_thread import JobThread
from certkv._spec import CacheSpec

# Codes of a store that isn't there, or has no room for a session: waiting helps. Others are of a
# wrong setting.
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED")
# After these a client is of no use any more.
_LOST_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
_LOST_REASONS = ("SESSION_NOT_FOUND", "OBJECT_CLOSED")


class StoreLink:
    """A client while the store is there, None while it is away.

    The first attempt is made at once, and waits. Later ones are made in the background when the
    client is asked for, `retry_seconds` or more after the last. One line is logged when the store
    is away, and one when it is back. Calls are safe from several threads.

    Args:
        spec, target, options: of certkv.Client.
        log: where the lines go.
        retry_seconds: between attempts to connect.
        clock: seconds, for tests.

    Raises:
        Error: the first attempt failed for another reason than that the store is away.
    """

    def __init__(
        self,
        spec: CacheSpec,
        target: str,
        options: dict[str, Any],
        log: logging.Logger,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._target = target
        self._options = options
        self._log = log
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._client: Optional[Client] = None
        self._is_connecting = False
        self._is_closed = False
        self._away_since: Optional[float] = None
        self._next_attempt = clock()
        # Connects, and closes what may have to wait for a store that doesn't answer.
        self._background = JobThread("certkv-link", self._run)
        error = self._connect()
        if error is not None and error.code not in _PASSING:
            self._background.close()
            raise error

    def client(self) -> Optional[Client]:
        """The client, or None while the store is away. Doesn't wait."""
        with self._lock:
            if self._client is not None or self._is_closed:
                return self._client
            if not self._is_connecting and self._clock() >= self._next_attempt:
                self._is_connecting = True
                self._background.put(self._connect)
            return None

    def report(self, client: Client, error: _errors.Error) -> bool:
        """Says that a call of `client` failed. Returns whether the store is away by that."""
        if error.code not in _LOST_CODES and error.reason not in _LOST_REASONS:
            return False
        with self._lock:
            if self._client is not client:
                return True
            self._client = None
            self._note_away(error)
        self.discard(client)
        return True

    def discard(self, closable: Any) -> None:
        """Closes a client or what it made in the background, in the order of the calls."""
        with self._lock:
            if not self._is_closed:
                self._background.put(closable.close)

    def close(self) -> None:
        """Ends the session; waits for a call that runs. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            client, self._client = self._client, None
        # Leases that wait to be released end with the session.
        self._background.close()
        if client is not None:
            client.close()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except _errors.Error as error:
            self._log.debug("CertKV: closing what isn't needed any more: %s", error)

    def _connect(self) -> Optional[_errors.Error]:
        try:
            client = Client(self.spec, self._target, **self._options)
        except _errors.Error as error:
            with self._lock:
                self._is_connecting = False
                self._note_away(error)
            return error
        with self._lock:
            self._is_connecting = False
            if not self._is_closed:
                self._client = client
                if self._away_since is not None:
                    self._log.warning(
                        "CertKV: the store is back after %.0f s", self._clock() - self._away_since
                    )
                self._away_since = None
                return None
        client.close()
        return None

    def _note_away(self, error: _errors.Error) -> None:
        """Under the lock."""
        self._next_attempt = self._clock() + self._retry_seconds
        if self._away_since is None:
            self._away_since = self._clock()
            self._log.warning(
                "CertKV: the store is away, prompts are computed without it; asking again every "
                "%.0f s: %s",
                self._retry_seconds,
                error,
            )
