"""Marks and limits shared by all tests."""

import os
import signal

import pytest

# the tests share few cores, and many small matmuls are faster on one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Triton kernels run in its interpreter, on CPU tensors; TRITON_INTERPRET=0 runs the same tests on a GPU
os.environ.setdefault("TRITON_INTERPRET", "1")

# a background job of a script ignores SIGINT, and with it every command that a test starts and sends Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEASURED: list[str] = []
RAYLET = ("\033[33m(raylet)", "    [", "\t(")  # what Ray prints about processes that were killed


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what passing tests print: it is what they measured."""
    if report.when == "call" and report.passed:
        lines = [line for line in report.capstdout.splitlines() if line and not line.startswith(RAYLET)]
        MEASURED.extend(f"{report.nodeid.rsplit('/', 1)[-1]}: {line}" for line in lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED:
        terminalreporter.section("measured")
        for line in MEASURED:
            terminalreporter.line(line)
