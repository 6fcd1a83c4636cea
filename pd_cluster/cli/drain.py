"""`pd-cluster drain`: workers take nothing new and finish what they have."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster.cli import reaching
from pd_cluster.cli.reaching import reach

if TYPE_CHECKING:
    from pd_cluster.client import Client, WorkerStatus

LOOK_S = 0.25


def drain(
    worker: Annotated[str, typer.Argument(help="A worker such as decode-0/1, or an engine: decode-0 is all of its.")],
    address: reaching.Address = "127.0.0.1:8001",
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing runs there any more.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0)] = 600.0,
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Take a worker out of service without losing a request. It holds for all routers, until the worker restarts.

    There is no other way back: restart its pod or its process. Where no other worker of its role is ready, new requests
    are refused from then on, so add an engine first: `pd-cluster scale` under `serve`, a replica in pods.
    """
    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        workers = [seen.worker_id for seen in client.status().workers if seen.engine_id == worker] or [worker]
        for worker_id in workers:
            drained = client.drain(worker_id)
            sys.stdout.write(f"{worker_id} drains: {drained.num_running} run, {drained.num_waiting} wait\n")
        sys.stdout.flush()
        for role in _bereft(client.status().workers, set(workers)):
            sys.stderr.write(
                f"no other {role} worker is ready: new requests are refused until one is. Undo it by a restart of "
                f"{worker}, or add an engine: pd-cluster scale {role} N\n"
            )
        if wait:
            _until_idle(client, set(workers), timeout)
            sys.stdout.write(f"{', '.join(workers)}: nothing is left\n")


def _bereft(workers: "list[WorkerStatus]", drained: set[str]) -> list[str]:
    """Roles that have no ready worker besides those `drained`."""
    from pd_cluster.client import Health

    roles = {seen.role.value for seen in workers if seen.worker_id in drained}
    left = {seen.role.value for seen in workers if seen.health is Health.READY and seen.worker_id not in drained}
    return sorted(roles - left)


def _until_idle(client: "Client", workers: set[str], timeout_s: float) -> None:
    """A worker that is gone is idle too. Raises DeadlineExceeded."""
    from pd_cluster.client import Health
    from pd_cluster.errors import DeadlineExceeded

    deadline_s = time.monotonic() + timeout_s
    while True:
        time.sleep(LOOK_S)  # first: a heartbeat brings what the last request left
        busy = {
            seen.worker_id
            for seen in client.status().workers
            if seen.worker_id in workers and seen.health is not Health.LOST and not seen.idle
        }
        if not busy:
            return
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(f"still busy after {timeout_s:g} s: {', '.join(sorted(busy))}")
