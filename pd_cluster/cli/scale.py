"""`pd-cluster scale`: how many engines a pool has."""

import sys
from typing import Annotated, Literal

import typer

from pd_cluster.cli import reaching
from pd_cluster.cli.reaching import reach


def scale(
    role: Annotated[Literal["prefill", "decode", "colocated"], typer.Argument(help="Which pool.", show_default=False)],
    instances: Annotated[int, typer.Argument(help="How many engines shall run.", min=1, show_default=False)],
    address: reaching.Address = "127.0.0.1:8001",
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Grow or shrink a pool of a cluster that `pd-cluster serve` runs."""
    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        before = client.scale(role, instances)
    sys.stdout.write(f"{role}: {before} -> {instances} engines\n")
