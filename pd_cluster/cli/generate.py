"""`pd-cluster generate`: complete prompts on a cluster that lives as long as the command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pd_cluster.cli import edge, options
from pd_cluster.config import load_config

PROMPTS = "Prompts"
SAMPLING = "Sampling"


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt. May be repeated.", metavar="TEXT", rich_help_panel=PROMPTS)
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(help="A prompt as token ids: 1,2,3.", metavar="IDS", rich_help_panel=PROMPTS),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines: {"prompt": "..."} or {"prompt_ids": [1, 2]}.', metavar="FILE", rich_help_panel=PROMPTS
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="How many prompts run at once; default: all.", min=1, rich_help_panel=PROMPTS),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.", rich_help_panel=SAMPLING)] = 64,
    min_tokens: Annotated[int, typer.Option(help="Least tokens of an output.", rich_help_panel=SAMPLING)] = 0,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: no limit.", rich_help_panel=SAMPLING)] = 0,
    seed: Annotated[int, typer.Option(help="Equal seeds, equal outputs.", rich_help_panel=SAMPLING)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=SAMPLING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log probabilities of this many likeliest tokens.", rich_help_panel=SAMPLING),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each prompt.")] = False,
    model: options.Model = None,
    config: options.ConfigFile = None,
    set_: options.Sets = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    prefill_instances: options.PrefillInstances = None,
    prefill_tp: options.PrefillTp = None,
    decode_dp: options.DecodeDp = None,
    decode_tp: options.DecodeTp = None,
    colocated: options.Colocated = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    launcher: options.Launcher = None,
) -> None:
    """Complete prompts offline and print them."""
    from pd_cluster.cli.prompts import make_requests, read_prompts
    from pd_cluster.model.source import open_model
    from pd_cluster.request import SamplingParams

    prompts = read_prompts(prompt or [], prompt_ids or [], prompts_file)
    values = {
        "model.path": model,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "prefill.instances": prefill_instances,
        "prefill.tensor_parallel": prefill_tp,
        "prefill.max_num_batched_tokens": max_num_batched_tokens,
        "decode.data_parallel": decode_dp,
        "decode.tensor_parallel": decode_tp,
        "decode.max_num_batched_tokens": max_num_batched_tokens,
        "colocated": colocated,
        "kv.block_size": block_size,
        "kv.num_blocks": num_blocks,
        "launch.launcher": launcher,
    }
    resolved = load_config(config, set_, values)
    opened = open_model(resolved.model.path, resolved.model.load)
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    requests = make_requests([each.token_ids(opened.tokenizer) for each in prompts], sampling, opened, resolved)

    from pd_cluster.cli.offline import JsonPrinter, TextPrinter, run_offline

    edge.quiet_logs()
    printer = JsonPrinter(opened, sys.stdout) if json else TextPrinter(opened, len(requests), sys.stdout)
    num_failed = edge.run(run_offline(resolved, opened, requests, concurrency or len(requests), printer))
    if num_failed:
        raise typer.Exit(1)
