"""The control stream between routers and workers."""

import os

# processes are started by exec, never by a bare fork; without this gRPC writes a line to stderr at every start
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
