"""`pd-cluster`: the table of commands. Heavy libraries are imported by the command that needs them: --help is quick."""

from importlib.metadata import version
from typing import Annotated

import typer

from pd_cluster.cli import bench, edge
from pd_cluster.cli.chat import chat
from pd_cluster.cli.config import config
from pd_cluster.cli.convert import convert
from pd_cluster.cli.demo import demo
from pd_cluster.cli.doctor import doctor
from pd_cluster.cli.drain import drain
from pd_cluster.cli.generate import generate
from pd_cluster.cli.prestop import prestop
from pd_cluster.cli.router import router
from pd_cluster.cli.scale import scale
from pd_cluster.cli.serve import serve
from pd_cluster.cli.status import status
from pd_cluster.cli.top import top
from pd_cluster.cli.worker import worker

app = typer.Typer(
    help="Serve large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pd-cluster {version('pd-cluster')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


COMMANDS = (
    *(demo, serve, generate, chat, status, top, drain, scale),
    *(router, worker, prestop, doctor, convert, config),
)
for command in COMMANDS:
    app.command()(edge.guard(command))
app.add_typer(bench.app)

if __name__ == "__main__":
    app()
