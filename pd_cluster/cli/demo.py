"""`pd-cluster demo`: a small cluster of the bundled model answers a few prompts at once, and shows what it did."""

from typing import Annotated

import typer

from pd_cluster.cli import edge, options
from pd_cluster.config import load_config


def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="The opening of a story. May be repeated.", metavar="TEXT")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a story.", min=2)] = 160,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Equal seeds, equal stories.")] = 1,
    launcher: options.Launcher = "ray",
    set_: options.Sets = None,
) -> None:
    """Start a small cluster of the bundled model and watch it answer.

    One prefill instance of two tensor-parallel ranks, and a decode group of two data-parallel ranks that share the
    experts, on a local Ray cluster.
    """
    shape = {
        "prefill.tensor_parallel": 2,
        "decode.data_parallel": 2,
        "decode.max_num_seqs": 16,
        "kv.max_bytes": 64 << 20,
        "launch.launcher": launcher,
        "launch.ray_address": "local",
    }
    overrides = [f"{key}={value}" for key, value in shape.items()] + (set_ or [])
    config = load_config(overrides=overrides)

    from pd_cluster.cli.demonstration import OPENINGS, run_demo

    edge.quiet_logs()
    edge.run(run_demo(config, prompt or OPENINGS, max_tokens, temperature, seed))
