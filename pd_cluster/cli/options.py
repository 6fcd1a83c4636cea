"""Options that several commands share, and the configuration they add up to: file, then --set, then flags."""

from pathlib import Path
from typing import Annotated, Literal

import typer

CLUSTER = "Cluster"


ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="A cluster file (TOML).", metavar="FILE")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of the cluster file: section.key=value. May be repeated.", metavar="KEY=VALUE"),
]
Model = Annotated[
    str | None,
    typer.Option(help="A directory, a .gguf file, a hub id, or `demo` for the bundled model.", metavar="MODEL"),
]
ServedModelName = Annotated[str | None, typer.Option(help="The name clients use.", metavar="NAME")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of weights and KV; auto: as the checkpoint says."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and output together.", min=1)]
PrefillInstances = Annotated[int | None, typer.Option(help="Prefill instances.", min=1, rich_help_panel=CLUSTER)]
PrefillTp = Annotated[
    int | None, typer.Option(help="Tensor parallelism of a prefill instance.", min=1, rich_help_panel=CLUSTER)
]
DecodeDp = Annotated[
    int | None, typer.Option(help="Data parallelism of the decode group.", min=1, rich_help_panel=CLUSTER)
]
DecodeTp = Annotated[
    int | None, typer.Option(help="Tensor parallelism of a decode worker.", min=1, rich_help_panel=CLUSTER)
]
Colocated = Annotated[
    bool | None,
    typer.Option("--colocated", help="No prefill pool: the decode engines do both.", rich_help_panel=CLUSTER),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens of a KV block, a multiple of 16.", rich_help_panel=CLUSTER)]
NumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks of each rank; default: what memory allows.", rich_help_panel=CLUSTER)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Most tokens an engine computes in a step.", min=1, rich_help_panel=CLUSTER)
]
Launcher = Annotated[
    Literal["process", "ray"] | None, typer.Option(help="How ranks are started.", rich_help_panel=CLUSTER)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
DrainTimeout = Annotated[
    float, typer.Option(help="Seconds that requests may take to finish when this process is told to end.", min=0)
]
DrainSocket = Annotated[
    str | None, typer.Option(help="Where the preStop hook finds this process.", metavar="PATH", show_default=False)
]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Of this process.")]
LogFormat = Annotated[Literal["logfmt", "json"], typer.Option(help="json: one object a line.")]
