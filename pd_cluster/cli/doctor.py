"""`pd-cluster doctor`: look at everything a cluster on this machine needs, and say what to do about what is missing."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pd_cluster.cli import options
from pd_cluster.config import load_config

if TYPE_CHECKING:
    from pd_cluster.cli.checkup import Finding


def doctor(
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    ray: Annotated[bool, typer.Option(help="Also start and end a local Ray cluster.")] = True,
    json: options.AsJson = False,
) -> None:
    """Check what this machine has and lacks."""
    from pd_cluster.cli.checkup import CHECKS, examine

    resolved = load_config(config, set_)
    findings = []
    for check in CHECKS:
        if ray or check.__name__ != "ray_starts":
            findings.append(examine(check, resolved))
            if not json:
                _show(findings[-1])
    num_failed = sum(finding.status == "fail" for finding in findings)
    if json:
        sys.stdout.write(msgspec.json.encode({"ok": not num_failed, "checks": findings}).decode() + "\n")
    else:
        sys.stdout.write(f"{num_failed} of {len(findings)} checks failed\n" if num_failed else "all is well\n")
    if num_failed:
        raise typer.Exit(1)


def _show(finding: "Finding") -> None:
    color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.status]
    typer.secho(f"{finding.status:4}", fg=color, nl=False)
    typer.echo(f"  {finding.check:16}  {finding.detail}")
    if finding.advice:
        typer.echo(f"{'':24}-> {finding.advice}")
