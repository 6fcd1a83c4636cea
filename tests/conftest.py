"""Marks and limits shared by all tests."""

import os

import pytest

# the tests share few cores, and many small matmuls are faster on one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Triton kernels run in its interpreter, on CPU tensors; TRITON_INTERPRET=0 runs the same tests on a GPU
os.environ.setdefault("TRITON_INTERPRET", "1")

MEASURED: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what passing tests print: it is what they measured."""
    if report.when == "call" and report.passed:
        MEASURED.extend(f"{report.nodeid.rsplit('/', 1)[-1]}: {line}" for line in report.capstdout.splitlines() if line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED:
        terminalreporter.section("measured")
        for line in MEASURED:
            terminalreporter.line(line)
