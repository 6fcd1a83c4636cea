"""How commands reach a running cluster: the options that they share, and the client made of them."""

from typing import TYPE_CHECKING, Annotated

import typer

from pd_cluster import env

if TYPE_CHECKING:
    from pd_cluster.client import Client

PANEL = "Connection"

Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        help="gRPC address of a router; several with commas between.",
        envvar=env.ADDRESS,
        metavar="HOST:PORT",
        rich_help_panel=PANEL,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="The router's API or admin key.", envvar=env.API_KEY, metavar="KEY", rich_help_panel=PANEL),
]
UseTls = Annotated[bool, typer.Option("--tls", help="Speak TLS, trusting the system's roots.", rich_help_panel=PANEL)]
TlsRoots = Annotated[
    str | None, typer.Option(help="Speak TLS, trusting these roots (PEM).", metavar="FILE", rich_help_panel=PANEL)
]
TlsCertificate = Annotated[
    str | None, typer.Option(help="Shown to routers that ask for one (PEM).", metavar="FILE", rich_help_panel=PANEL)
]
TlsKey = Annotated[str | None, typer.Option(help="Its key (PEM).", metavar="FILE", rich_help_panel=PANEL)]
AllowInsecure = Annotated[
    bool,
    typer.Option("--allow-insecure", help="Send the key without TLS: the network is closed.", rich_help_panel=PANEL),
]


def reach(
    address: str,
    api_key: str | None,
    tls: bool,
    tls_roots: str | None,
    tls_certificate: str | None,
    tls_key: str | None,
    allow_insecure: bool,
) -> "Client":
    """Raises ConfigError that says what is wrong."""
    from pd_cluster.client import Client, Tls

    uses_tls = tls or tls_roots is not None or tls_certificate is not None
    files = Tls(roots=tls_roots, certificate=tls_certificate, private_key=tls_key)
    return Client(address, api_key=api_key, tls=files if uses_tls else None, allow_insecure=allow_insecure)
