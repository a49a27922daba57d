"""Run a server until standard input ends, then end it with all that it started.

    python supervise.py SEGMENT COMMAND...

The test process holds the other end of standard input: however it ends, the server goes too, and
the shared memory whose name begins with SEGMENT ("-": none).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_GRACE_S = 20.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    for number in _IGNORED:  # they are the test process' to answer
        signal.signal(number, signal.SIG_IGN)
    segment, *command = sys.argv[1:]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in _IGNORED],
    )
    threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    code = server.wait()
    _end_group(server.pid)
    if segment != "-":
        for left in Path("/dev/shm").glob(f"{segment}*"):
            left.unlink(missing_ok=True)
    return code


def _end_with_stdin(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    server.terminate()  # it ends what it started, in order, and frees what they share
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    server.kill()


def _end_group(group: int) -> None:
    """Let what the server has started end by itself, then make it."""
    deadline = time.monotonic() + _GRACE_S
    while _lives(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            return
        time.sleep(0.05)  # they are not our children: there is nothing to wait on


def _lives(group: int) -> bool:
    """Whether a process of the group runs; zombies do not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, process_group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                if int(process_group) == group and state != "Z":
                    return True
    return False


if __name__ == "__main__":
    sys.exit(main())
