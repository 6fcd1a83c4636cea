"""`pd-cluster scale`: how many engines a pool has, and how many ranks of one of them compute."""

import sys
from typing import Annotated, Literal

import typer

from pd_cluster.cli import reaching
from pd_cluster.cli.reaching import reach
from pd_cluster.errors import ConfigError


def scale(
    role: Annotated[Literal["prefill", "decode", "colocated"], typer.Argument(help="Which pool.", show_default=False)],
    instances: Annotated[
        int | None, typer.Argument(help="How many engines shall run.", min=1, show_default=False)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="How many ranks of one engine shall compute, DP ranks times TP.", min=1, show_default=False),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Which engine, when the pool has several: decode-0.", show_default=False)
    ] = None,
    address: reaching.Address = "127.0.0.1:8001",
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Grow or shrink a pool of a cluster that `pd-cluster serve` runs, or with --ranks one engine of it.

    With --ranks it returns when the engine has them; what does not fit is refused, and then nothing changes.
    """
    if (instances is None) == (ranks is None):
        raise ConfigError("say how many: `scale decode 2` for engines, or `scale decode --ranks 4` for ranks of one")
    if engine is not None and ranks is None:
        raise ConfigError("--engine goes with --ranks: engines of a pool are all alike")
    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        if ranks is not None:
            name, before = client.scale_ranks(role, ranks, engine)
            sys.stdout.write(f"{name}: {before} -> {ranks} ranks\n")
        elif instances is not None:
            before = client.scale(role, instances)
            sys.stdout.write(f"{role}: {before} -> {instances} engines\n")
