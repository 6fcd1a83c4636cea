"""The control stream between routers and workers."""

import os

# Without these gRPC writes lines of its own to stderr: at every start of a child process (an exec, never a bare
# fork), and whenever a peer goes away, which our log tells better.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
