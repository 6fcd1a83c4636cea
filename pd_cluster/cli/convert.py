"""`pd-cluster convert`: any model that can be served, as a Hugging Face directory for whoever reads those."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    source: Annotated[str, typer.Argument(help="A .gguf file, a directory, a hub id or `demo`.", metavar="SRC")],
    directory: Annotated[Path, typer.Argument(help="Where to write; must not exist yet.", metavar="DIR")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto: the source's own, and bfloat16 for quantised ones."),
    ] = "auto",
) -> None:
    """Write a model as a Hugging Face directory: config, weights as safetensors, tokenizer and chat template."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from pd_cluster.model.hf_export import export
    from pd_cluster.model.source import open_model

    model = open_model(source)
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(model.name), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        written = export(
            model,
            directory,
            dtype=None if dtype == "auto" else dtype,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    files = f"{written.num_files} file{'s' if written.num_files > 1 else ''}"
    sys.stdout.write(
        f"{directory}: {written.num_tensors} tensors, {written.num_bytes / 1e9:.3g} GB of {written.dtype} in {files}\n"
    )
