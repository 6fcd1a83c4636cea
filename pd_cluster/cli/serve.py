"""`pd-cluster serve`: engines, router and HTTP server by one command, until it is told to stop."""

import contextlib
from typing import Annotated, Literal

import typer

from pd_cluster.cli import edge, options
from pd_cluster.config import load_config


def serve(
    model_arg: Annotated[
        str | None, typer.Argument(help="The model; the same as --model.", metavar="[MODEL]", show_default=False)
    ] = None,
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    host: Annotated[str | None, typer.Option(help="Where HTTP listens; 0.0.0.0: on all interfaces.")] = None,
    http_port: Annotated[int | None, typer.Option("--http-port", "--port", help="0: a free one.", min=0)] = None,
    prefill_instances: options.PrefillInstances = None,
    prefill_tp: options.PrefillTp = None,
    decode_dp: options.DecodeDp = None,
    decode_tp: options.DecodeTp = None,
    colocated: options.Colocated = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    launcher: options.Launcher = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Of this process.")] = "info",
    log_format: Annotated[Literal["logfmt", "json"], typer.Option(help="json: one object a line.")] = "logfmt",
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    values = {
        "model.path": model or model_arg,
        "model.served_model_name": served_model_name,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "router.host": host,
        "router.http_port": http_port,
        "prefill.instances": prefill_instances,
        "prefill.tensor_parallel": prefill_tp,
        "decode.data_parallel": decode_dp,
        "decode.tensor_parallel": decode_tp,
        "colocated": colocated,
        "kv.block_size": block_size,
        "kv.num_blocks": num_blocks,
        "launch.launcher": launcher,
    }
    resolved = load_config(config, set_, values)

    from pd_cluster.cli.serving import run_server
    from pd_cluster.log import configure_logging

    configure_logging(log_level, log_format, "router")
    with contextlib.suppress(KeyboardInterrupt):  # being told to stop is how a server ends
        edge.run(run_server(resolved))
