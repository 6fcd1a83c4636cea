"""`pd-cluster prestop`: what a container's preStop hook runs. Light: it starts while the pod's time runs out."""

import time
from pathlib import Path
from typing import Annotated

import typer

from pd_cluster.cli import options


def prestop(
    delay: Annotated[
        float, typer.Option(help="Seconds to go on as before, until no one is sent here any more.", min=0)
    ] = 0.0,
    drain_timeout: options.DrainTimeout = 120.0,
    socket: options.DrainSocket = None,
) -> None:
    """Let the `router` or `worker` of this container finish what it has; exit code 1 when the time was too short."""
    from pd_cluster.launch.prestop import ask_to_drain, default_socket

    time.sleep(delay)
    if not ask_to_drain(Path(socket) if socket else default_socket(), drain_timeout):
        typer.echo(f"still busy after {drain_timeout:g} s", err=True)
        raise typer.Exit(1)
