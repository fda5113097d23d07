"""An engine as a process of a test, which answers each line of JSON with one."""

import json
import os
import subprocess
import sys


class EngineProcess:
    """Runs a script of this folder; its standard error is its log.

    Args:
        folder: for the log.
        path: of the script's PYTHONPATH.
        environment: beside the test's own.
    """

    def __init__(self, folder, name, script, arguments, path, **environment):
        self._log = folder / f"{name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": ":".join(map(str, path)), **environment},
            )

    def wait(self):
        """Until it is started; the seconds it says that this took."""
        return self._answer()["seconds"]

    def log(self):
        return self._log.read_text()

    def end(self):
        """Ends it as a user does, with all that is queued."""
        self._process.stdin.close()
        assert self._process.wait(120) == 0, self.log()[-3000:]

    def kill(self):
        self._process.kill()
        self._process.wait()

    def _request(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, self.log()[-3000:]
        return json.loads(line)
