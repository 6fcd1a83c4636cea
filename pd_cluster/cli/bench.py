"""`pd-cluster bench ...`: measurements, each a table for people or one JSON object for machines."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pd_cluster.cli import edge, options
from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.bench.servers import Server

app = typer.Typer(name="bench", help="Measure this machine and this code.", no_args_is_help=True)


@app.command()
@edge.guard
def transfer(
    total_mib: Annotated[int, typer.Option(help="Bytes of one transfer.", min=1)] = 256,
    json: options.AsJson = False,
) -> None:
    """KV through NIXL between two processes, against plain copies in the same run."""
    from pd_cluster.bench.transfer import run

    _print(run(total_bytes=total_mib << 20), json)


@app.command()
@edge.guard
def streams(
    url: Annotated[str | None, typer.Option(help="A running server; by default one is started.")] = None,
    pid: Annotated[int | None, typer.Option(help="The process of that server to account.")] = None,
    model: Annotated[str, typer.Option(help="The model's name there.")] = "demo",
    peer_url: Annotated[str | None, typer.Option(help="Another server to measure in turn with it.")] = None,
    peer_pid: Annotated[int | None, typer.Option(help="The process of its front end.")] = None,
    peer_model: Annotated[str | None, typer.Option(help="The model's name there; default: the same.")] = None,
    num: Annotated[list[int] | None, typer.Option(help="Streams at once; may be repeated.", min=1)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=1)] = 192,
    repeats: Annotated[int, typer.Option(help="Loads of each; medians are shown.", min=1)] = 3,
    json: options.AsJson = False,
) -> None:
    """CPU time of the front end for each streamed token, the workers' share of it, and a peer's beside it."""
    from pd_cluster.bench.serve_process import rank_pids
    from pd_cluster.bench.streams import Process, run

    if (url is None) != (pid is None) or (peer_url is None) != (peer_pid is None):
        raise ConfigError("a running server needs both its address and the id of its process")
    ours = peer = None
    if url is not None and pid is not None:
        ours = Process(url, pid, model, tuple(rank_pids(pid)))
    if peer_url is not None and peer_pid is not None:
        peer = Process(peer_url, peer_pid, peer_model or model)
    counts = tuple(num or (32, 128, 512))
    for name, result in run(ours, peer, streams=counts, num_tokens=tokens, repeats=repeats).items():
        _print({"load": name} | result, json)


@app.command()
@edge.guard
def second_token(
    model: Annotated[str, typer.Option(help="A directory, a .gguf file or a hub id.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 1500,
    rounds: Annotated[int, typer.Option(help="Prompts to each, in turn.", min=1)] = 20,
    json: options.AsJson = False,
) -> None:
    """What the handoff adds to the second token: a split engine next to a colocated one."""
    from pd_cluster.bench.second_token import run

    _print(run(model, num_tokens=tokens, rounds=rounds), json)


@app.command()
@edge.guard
def placement(
    loads: Annotated[
        Path, typer.Option(help="Measured loads as JSON: a row of tokens per expert for each layer.", metavar="FILE")
    ],
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.", min=1)] = 32,
    redundant: Annotated[int, typer.Option(help="Copies beyond one of each expert.", min=0)] = 32,
    shared_top_k: Annotated[
        int | None,
        typer.Option(help="Place the shared expert too; the model routes a token to this many experts.", min=1),
    ] = None,
    groups: Annotated[int, typer.Option(help="Expert groups, for EPLB's hierarchical mode.", min=1)] = 8,
    ranks_per_node: Annotated[int, typer.Option(help="Also for that mode.", min=1)] = 8,
    drift: Annotated[float, typer.Option(help="How much loads change at random.", min=0.0)] = 0.15,
    step_tokens: Annotated[int, typer.Option(help="Tokens of a sampled step.", min=1)] = 4096,
    every: Annotated[
        bool,
        typer.Option("--all", help="EP32, 64, 144 and 320 in turn, and small layers against every placement."),
    ] = False,
    json: options.AsJson = False,
) -> None:
    """How evenly experts are placed for measured loads, next to EPLB and to what is possible."""
    from pd_cluster.bench.placement import run, run_all, table, tables

    if every:
        found = run_all(loads, drift=drift, step_tokens=step_tokens)
        if json:
            _print(found, json)
        else:
            sys.stdout.write(tables(found))
        return
    result = run(
        loads,
        ep=ep,
        redundant=redundant,
        shared_top_k=shared_top_k,
        groups=groups,
        ranks_per_node=ranks_per_node,
        drift=drift,
        step_tokens=step_tokens,
    )
    if json:
        _print(result, json)
    else:
        sys.stdout.write(table(result))


@app.command()
@edge.guard
def dispatch(
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.", min=1)] = 32,
    exchanges: Annotated[int, typer.Option(help="Exchanges in a turn.", min=1)] = 50,
    rounds: Annotated[int, typer.Option(help="Alternating rounds; medians are shown.", min=1)] = 5,
    json: options.AsJson = False,
) -> None:
    """Tokens to experts and back between 2 and 4 ranks: one-sided writes next to gloo."""
    from pd_cluster.bench.dispatch import run

    for result in run(num_tokens=tokens, exchanges=exchanges, rounds=rounds):
        _print(result, json)
        sys.stdout.flush()


Threads = Annotated[int, typer.Option(help="Of the engine, in this process.", min=1)]


@app.command()
@edge.guard
def swaps(
    ranks: Annotated[int, typer.Option(help="Ranks, each a process of this host.", min=2)] = 4,
    batch: Annotated[int, typer.Option(help="Sequences that decode on each.", min=1)] = 8,
    num_swaps: Annotated[int, typer.Option(help="Exchanges of experts under way.", min=1)] = 10,
    exchanged: Annotated[int, typer.Option(help="Pairs of experts in each layer, for every one.", min=1)] = 4,
    json: options.AsJson = False,
) -> None:
    """Steps while experts move between ranks, against those in between: the demo model, and one of larger experts."""
    from pd_cluster.bench.swaps import Load, run

    for model in ("demo", "larger"):
        load = Load(num_ranks=ranks, batch=batch, model=model, num_swaps=num_swaps, exchanged=exchanged)
        _print(run(load), json)


@app.command()
@edge.guard
def engine(
    model: Annotated[str, typer.Option(help="A dense model: a directory, a .gguf file or a hub id.")],
    context: Annotated[int, typer.Option(help="Tokens of KV before a decode step.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(help="Alternating rounds; medians are shown.", min=1)] = 5,
    threads: Threads = 1,
    json: options.AsJson = False,
) -> None:
    """Steps of the bfloat16 engine next to their matrix products alone."""
    import torch

    from pd_cluster.bench.engine import run
    from pd_cluster.model.source import open_model

    torch.set_num_threads(threads)
    _print(run(open_model(model), context=context, rounds=rounds), json)


@app.command()
@edge.guard
def roofline(
    batch: Annotated[int, typer.Option(help="Sequences that decode.", min=1)] = 16,
    context: Annotated[int, typer.Option(help="Tokens of KV of each.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(help="Alternating rounds; medians are shown.", min=1)] = 7,
    threads: Threads = 1,
    json: options.AsJson = False,
) -> None:
    """A decode step of a random mixture of experts next to reading what it touches once."""
    import torch

    from pd_cluster.bench.roofline import run

    torch.set_num_threads(threads)
    _print(run(batch=batch, context=context, rounds=rounds), json)


@app.command()
@edge.guard
def curves(
    out: Annotated[Path, typer.Option(help="Where curves.json and a picture of each curve go.", metavar="DIR")],
    model: Annotated[str, typer.Option(help="The model of the engine's curves.")] = "demo",
    only: Annotated[list[str] | None, typer.Option(help="A curve by name. May be repeated; default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small points, for a look.")] = False,
    json: options.AsJson = False,
) -> None:
    """How costs grow with their work: steps, prefill and the router; ends with 1 when one grows faster than linear."""
    import torch

    from pd_cluster.bench.curves import NAMES, QUICK, run, table, write
    from pd_cluster.model.source import open_model

    torch.set_num_threads(1)
    measured = run(
        open_model(model),
        names=only or NAMES,
        sizes=QUICK if quick else None,
        say=lambda name: typer.echo(f"measuring {name}", err=True),
    )
    files = write(measured, out)
    if json:
        sys.stdout.buffer.write(files[0].read_bytes() + b"\n")
    else:
        sys.stdout.write(table(measured))
    if any(each.growth.verdict == "worse than linear" for each in measured):
        raise typer.Exit(1)


@app.command()
@edge.guard
def start(
    launcher: Annotated[
        list[str] | None, typer.Option(help="How ranks are started: process or ray. May be repeated; default: both.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Starts of each; medians are shown.", min=1)] = 3,
    model: Annotated[str, typer.Option(help="What is served.")] = "demo",
    json: options.AsJson = False,
) -> None:
    """From `serve` to the first streamed token, by stages: one prefill and one decode rank."""
    from pd_cluster.bench.start import run

    for name, result in run(launchers=launcher or ("process", "ray"), rounds=rounds, model=model).items():
        _print({"launcher": name} | result, json)


@app.command()
@edge.guard
def servers(
    urls: Annotated[list[str], typer.Argument(help="HTTP servers of one model; the first is compared to the others.")],
    model: Annotated[list[str], typer.Option(help="The model's name at each, in their order, or at all.")],
    rounds: Annotated[int, typer.Option(help="Alternating rounds; medians are shown.", min=1)] = 5,
    json: options.AsJson = False,
) -> None:
    """Decode and prefill speeds of running servers, side by side."""
    from pd_cluster.bench.servers import run

    _print(run(_servers(urls, model), rounds=rounds), json)


@app.command()
@edge.guard
def goodput(
    url: Annotated[list[str], typer.Option(help="An HTTP server of the model; the first is compared to the others.")],
    model: Annotated[list[str], typer.Option(help="The model's name at each, in their order, or at all.")],
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second; may be repeated.", min=0.01)] = None,
    window: Annotated[float, typer.Option(help="Seconds of arrivals at one server.", min=1.0)] = 60.0,
    rounds: Annotated[int, typer.Option(help="Windows of each server and rate.", min=1)] = 1,
    inputs: Annotated[str, typer.Option(help="Tokens of a prompt, from and to.", metavar="FROM-TO")] = "400-1200",
    outputs: Annotated[str, typer.Option(help="Tokens of an answer, from and to.", metavar="FROM-TO")] = "32-96",
    ttft: Annotated[float, typer.Option(help="Seconds to the first token that a good request keeps.")] = 3.0,
    tpot: Annotated[float, typer.Option(help="Seconds per further token, on average.")] = 0.040,
    gap: Annotated[float, typer.Option(help="Seconds between any two tokens.")] = 0.200,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    pids: Annotated[
        list[str] | None,
        typer.Option(
            help="Processes of each server, or none, to pause while another is measured.", metavar="PID[,PID]"
        ),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Requests per second that keep their bounds, at running servers under the same load in turn."""
    from pd_cluster.bench.goodput import Bounds, run, span, table

    result = run(
        _servers(url, model),
        rates=rate or [1.0],
        window_s=window,
        rounds=rounds,
        inputs=span(inputs),
        outputs=span(outputs),
        bounds=Bounds(ttft_s=ttft, tpot_s=tpot, gap_s=gap),
        seed=seed,
        pids=[[int(pid) for pid in each.split(",") if pid] for each in pids or []],
        say=lambda line: typer.echo(line, err=True),
    )
    if json:
        _print(result, json)
    else:
        sys.stdout.write(table(result))


@app.command()
@edge.guard
def relay(
    prefill: Annotated[str, typer.Option(help="The peer's prefill server.", metavar="URL")],
    decode: Annotated[str, typer.Option(help="The peer's decode server.", metavar="URL")],
    port: Annotated[int, typer.Option(help="Where this listens, on this machine.", min=1)],
) -> None:
    """Join two vLLM servers with its NIXL connector into one address, to measure beside ours. Runs until stopped."""
    import asyncio
    import contextlib

    from pd_cluster.bench.relay import serve

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(prefill, decode, "127.0.0.1", port))


def _servers(urls: list[str], models: list[str]) -> "list[Server]":
    from pd_cluster.bench.servers import Server

    names = models * len(urls) if len(models) == 1 else models
    if len(names) != len(urls):
        raise ConfigError(f"{len(urls)} servers need one --model or {len(urls)}, got {len(names)}")
    return [Server(url, name) for url, name in zip(urls, names, strict=True)]


def _print(result: dict[str, Any], json: bool) -> None:
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return
    width = max(map(len, result))
    for key, value in result.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        sys.stdout.write(f"{key:{width}}  {text}\n")
