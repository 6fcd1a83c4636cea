"""Marks and limits shared by all tests."""

import os

# the tests share few cores, and many small matmuls are faster on one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
