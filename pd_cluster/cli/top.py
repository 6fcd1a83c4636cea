"""`pd-cluster top`: pools, queues, KV memory, experts and requests of a running cluster, live."""

from typing import Annotated

import typer

from pd_cluster.cli import reaching
from pd_cluster.cli.reaching import reach


def top(
    address: reaching.Address = "127.0.0.1:8001",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=60)] = 1.0,
    requests: Annotated[int, typer.Option(help="Most requests to list.", min=0, max=1000)] = 20,
    layers: Annotated[int, typer.Option(help="Layers of experts to show of an engine, the least even.", min=0)] = 8,
    once: Annotated[bool, typer.Option("--once", help="One frame, with rates over one interval, and out.")] = False,
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Watch a running cluster. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from pd_cluster.cli.status_view import Moment, view

    console = Console(highlight=False)
    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        watch = client.watch(interval, max_requests=requests)
        before = next(watch)
        if once:
            console.print(view(Moment(next(watch), before), console.width, layers))
            return
        first = view(Moment(before), console.width, layers)
        with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for now in watch:
                live.update(view(Moment(now, before), console.width, layers), refresh=True)
                before = now
