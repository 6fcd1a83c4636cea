"""`pd-cluster status`: the pools of a running cluster, once."""

import sys

from pd_cluster.cli import options, reaching
from pd_cluster.cli.reaching import reach


def status(
    address: reaching.Address = "127.0.0.1:8001",
    as_json: options.AsJson = False,
    api_key: reaching.ApiKey = None,
    tls: reaching.UseTls = False,
    tls_roots: reaching.TlsRoots = None,
    tls_certificate: reaching.TlsCertificate = None,
    tls_key: reaching.TlsKey = None,
    allow_insecure: reaching.AllowInsecure = False,
) -> None:
    """Show workers, KV memory, experts and requests of a running cluster."""
    import msgspec

    with reach(address, api_key, tls, tls_roots, tls_certificate, tls_key, allow_insecure) as client:
        seen = client.status(max_requests=20)
    if as_json:
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
        return

    from rich.console import Console

    from pd_cluster.cli.status_view import Moment, view

    console = Console(highlight=False)
    console.print(view(Moment(seen), console.width))
