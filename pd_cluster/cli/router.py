"""`pd-cluster router`: one router alone; its workers run elsewhere and are found by DNS or by a list."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from pd_cluster.cli import edge, options
from pd_cluster.config import load_config


def router(
    discover: Annotated[
        list[str],
        typer.Option(
            help="Where workers are: dns:HOST:PORT, dns:HOST:FIRST-LAST or static:HOST:PORT,... May be repeated.",
            metavar="SOURCE",
        ),
    ],
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    host: Annotated[str | None, typer.Option(help="Where HTTP listens; 0.0.0.0: on all interfaces.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0: a free one.", min=0)] = None,
    drain_timeout: options.DrainTimeout = 120.0,
    socket: options.DrainSocket = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "logfmt",
) -> None:
    """Route requests to workers that were started by `pd-cluster worker`.

    SIGTERM takes nothing new and lets requests finish.
    """
    resolved = load_config(config, set_, {"router.host": host, "router.http_port": http_port})

    from pd_cluster.cli.routing import run_router
    from pd_cluster.log import configure_logging
    from pd_cluster.rpc.security import Security
    from router.discovery import check_exposed, parse_source

    sources = [parse_source(text) for text in discover]
    check_exposed(sources, Security.from_config(resolved.security))  # as a worker does on its side
    configure_logging(log_level, log_format, "router")
    with contextlib.suppress(KeyboardInterrupt):  # being told to stop is how a server ends
        edge.run(run_router(resolved, sources, drain_timeout, Path(socket) if socket else None))
    edge.leave()
