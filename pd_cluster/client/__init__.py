"""The Python SDK of pd-cluster: `Client` for threads, `AsyncClient` for asyncio. Loads no torch.

    from pd_cluster.client import Client

    with Client("127.0.0.1:8001") as client:
        print(client.generate("Once upon a time", max_tokens=40).text)
        for chunk in client.stream_chat([{"role": "user", "content": "One day, a cat"}]):
            print(chunk.text, end="", flush=True)

A stream survives its router: the client goes on at another one, or at the same one restarted, after the tokens that it
has; nothing is lost or repeated. Errors are the classes of `pd_cluster.errors`.
"""

from pd_cluster.client.asking import Messages, Options, Prompt, SamplingOptions
from pd_cluster.client.asynchronous import AsyncClient, AsyncStream
from pd_cluster.client.blocking import Client, Stream
from pd_cluster.client.connection import Tls
from pd_cluster.client.results import (
    Chunk,
    ClusterStatus,
    Completion,
    EngineStatus,
    Health,
    HotExpert,
    KvStatus,
    LayerStatus,
    Model,
    PhaseCounts,
    PlacementStatus,
    RequestStatus,
    Role,
    Timings,
    Totals,
    Usage,
    WorkerStatus,
)
from pd_cluster.request import FinishReason, Phase, TokenLogprobs

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ClusterStatus",
    "Completion",
    "EngineStatus",
    "FinishReason",
    "Health",
    "HotExpert",
    "KvStatus",
    "LayerStatus",
    "Messages",
    "Model",
    "Options",
    "Phase",
    "PhaseCounts",
    "PlacementStatus",
    "Prompt",
    "RequestStatus",
    "Role",
    "SamplingOptions",
    "Stream",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Totals",
    "Usage",
    "WorkerStatus",
]
