"""Run as a program by certkv.embedded(): keeps a server while its standard input is open.

    _watch.py DIRECTORY PROGRAM [ARGUMENTS]

Starts PROGRAM with its log in DIRECTORY/certkvd.log, prints its pid (0: it can't be started), and
waits until standard input ends or the program does, which it prints as well. Then it ends the program (SIGTERM, after ten seconds SIGKILL) and removes
DIRECTORY. A process of its own, because only another one sees that the notebook was killed, and
with one thread, because the kernel ends the server when the *thread* that started it ends.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 10
# It ends with its input, and not before its server.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _in_child() -> None:
    for number in (*_IGNORED, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(text: str) -> None:
    try:
        os.write(1, text.encode() + b"\n")
    except BrokenPipeError:
        pass  # whom it was for is gone


def _wait_for_either(process: "subprocess.Popen[bytes]") -> None:
    ended = os.pidfd_open(process.pid)
    while True:
        readable, _, _ = select.select([0, ended], [], [])
        if ended in readable or not os.read(0, 4096):
            return


def main() -> int:
    directory, arguments = sys.argv[1], sys.argv[2:]
    for number in (*_IGNORED, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with open(os.path.join(directory, "certkvd.log"), "ab") as log:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_in_child,
            )
        except OSError as error:
            log.write(f"{arguments[0]} can't be started: {error}\n".encode())
            log.flush()
            _say("0\nended")
            os.read(0, 1)  # the reason is read from the log before the directory goes
            shutil.rmtree(directory, ignore_errors=True)
            return 1
    _say(str(process.pid))
    _wait_for_either(process)
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _say("ended")
    while os.read(0, 4096):  # a server that ended by itself leaves its log until it was read
        pass
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
