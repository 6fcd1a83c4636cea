"""The server: engines, router and HTTP, watched until a signal or until a pool is beyond help."""

import contextlib
import gc
import sys

from pd_cluster.cli.pools import describe
from pd_cluster.cli.progress import StartDisplay
from pd_cluster.config import ClusterConfig
from pd_cluster.launch.cluster import Cluster
from pd_cluster.model.source import open_model


async def run_server(config: ClusterConfig) -> None:
    """Serve until cancelled. Raises the error of a pool whose engines were all given up."""
    model = open_model(config.model.path, config.model.load)
    async with contextlib.AsyncExitStack() as stack:
        with StartDisplay(describe(config, model)) as display:
            cluster = await stack.enter_async_context(
                Cluster(config, model=model, http=True, on_progress=display.on_progress, on_event=display.on_event)
            )
        served = config.model.served_model_name or model.name
        for worker in cluster.router.directory.workers:
            blocks = f"{worker.info.num_blocks} KV blocks of {worker.info.block_size} tokens"
            sys.stderr.write(f"{worker.id}: {blocks}, context {worker.info.max_model_len}\n")
        host, grpc_port = config.router.host, cluster.router.grpc_port
        if grpc_port is not None:
            sys.stderr.write(
                f"gRPC API, for the SDK and for `pd-cluster chat`, `status` and `top`: {host}:{grpc_port}\n"
            )
        sys.stderr.write(f"{served} is served at http://{host}:{cluster.router.http_port}/v1\n")
        sys.stderr.flush()
        gc.collect()
        gc.freeze()  # a loaded router stays as it is: no pause between tokens to look through it again
        await cluster.supervisor.wait_failed()
