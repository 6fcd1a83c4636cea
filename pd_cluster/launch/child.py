"""The rank's side of the process launcher: take the spec from stdin, and never outlive the parent.

The parent writes one line of JSON and keeps the pipe open; its end, for whatever reason, closes it. On Linux the
kernel also kills the rank when the thread that started it ends.
"""

import ctypes
import os
import signal
import sys
import threading

from pd_cluster.launch.spec import RankSpec, decode_spec

STDIN = 0
PR_SET_PDEATHSIG = 1
PARENT_GONE_EXIT_CODE = 113


def read_spec() -> RankSpec:
    """Call once, first thing in a rank process."""
    _die_with_parent()
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(STDIN, 65536)
        if not data:
            os._exit(PARENT_GONE_EXIT_CODE)
        line += data
    threading.Thread(target=_exit_at_eof, name="parent-watch", daemon=True).start()
    return decode_spec(line)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_at_eof() -> None:
    while os.read(STDIN, 4096):  # not sys.stdin: its lock, held by a daemon thread, aborts the interpreter's shutdown
        pass
    os._exit(PARENT_GONE_EXIT_CODE)
