"""`pd-cluster worker`: one pod's part of one engine, where no supervisor looks after the whole cluster."""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from pd_cluster.cli import edge, options
from pd_cluster.config import load_config
from pd_cluster.errors import ConfigError

PLACE = "Place"
PORTS = "Ports"


def worker(
    role: Annotated[Literal["prefill", "decode", "colocated"], typer.Option(help="The pool.")],
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    ordinal: Annotated[
        str,
        typer.Option(
            help="Which pod of the pool: a number, or a name that ends in one, such as decode-3.", rich_help_panel=PLACE
        ),
    ] = "0",
    num_nodes: Annotated[int, typer.Option(help="Pods of one engine.", min=1, rich_help_panel=PLACE)] = 1,
    engine: Annotated[
        int | None, typer.Option(help="Which engine of the pool; default: by the ordinal.", rich_help_panel=PLACE)
    ] = None,
    node: Annotated[
        int | None, typer.Option(help="Which pod of the engine; default: by the ordinal.", rich_help_panel=PLACE)
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            help="Host of the engine's first pod; {ordinal} in it stands for that pod's.",
            metavar="HOST",
            rich_help_panel=PLACE,
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="This pod's address, which others dial.", rich_help_panel=PORTS)] = (
        "127.0.0.1"
    ),
    control_port: Annotated[
        int, typer.Option(help="Of this pod's first worker; the next has the next.", min=1, rich_help_panel=PORTS)
    ] = 7000,
    store_port: Annotated[
        int, typer.Option(help="Where the pods of an engine meet; at its first pod.", min=0, rich_help_panel=PORTS)
    ] = 7100,
    http_port: Annotated[int, typer.Option(help="Probes and metrics.", min=0, rich_help_panel=PORTS)] = 8081,
    drain_timeout: options.DrainTimeout = 120.0,
    socket: options.DrainSocket = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "logfmt",
) -> None:
    """Run a share of an engine's ranks, answer probes, and finish what runs before ending.

    Ranks are dealt out evenly over the pods of an engine. SIGTERM drains.
    """
    resolved = load_config(config, set_)
    position = place_of(ordinal, num_nodes, engine, node)

    from pd_cluster.cli.worker_pod import run_pod
    from pd_cluster.log import configure_logging

    configure_logging(log_level, log_format, f"{role}-{position[0]}/{position[1]}")
    with contextlib.suppress(KeyboardInterrupt):  # being told to stop is how a server ends
        edge.run(
            run_pod(
                resolved,
                role,
                *position,
                num_nodes=num_nodes,
                host=host,
                control_port=control_port,
                head=head.replace("{ordinal}", str(position[0] * num_nodes)),
                store_port=store_port,
                http_port=http_port,
                drain_s=drain_timeout,
                socket=Path(socket) if socket else None,
            )
        )
    edge.leave()


def place_of(ordinal: str, num_nodes: int, engine: int | None, node: int | None) -> tuple[int, int]:
    """Engine and node. An ordinal counts the pods of all engines, those of one engine next to each other."""
    if engine is not None and node is not None:
        return engine, node
    found = re.search(r"(\d+)$", ordinal)
    if not found:
        raise ConfigError(f"--ordinal wants a number or a name that ends in one, got {ordinal!r}")
    by_ordinal = divmod(int(found[1]), num_nodes)
    return by_ordinal[0] if engine is None else engine, by_ordinal[1] if node is None else node
