"""JobThread: work beside an engine's own threads."""

from __future__ import annotations

import collections
import threading
from typing import Any, Callable


class JobThread:
    """One thread that does jobs in the order they come.

    Not an executor of concurrent.futures: those take no jobs once the interpreter is ending, which
    is when engines close their connectors.

    Args:
        name: of the thread.
        run: does one job; an exception of it would end the thread, so it raises none.
    """

    def __init__(self, name: str, run: Callable[[Any], None]) -> None:
        self._run = run
        self._condition = threading.Condition()
        self._jobs: collections.deque[Any] = collections.deque()
        self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Any) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify_all()

    def wait(self, seconds: float) -> bool:
        """Until nothing is left to do, at most `seconds`; whether that is so."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._jobs and not self._is_busy, seconds)

    def close(self) -> None:
        """Ends the thread after the job that runs; the others are dropped."""
        with self._condition:
            self._is_closed = True
            self._jobs.clear()
            self._condition.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._is_busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            self._run(job)
