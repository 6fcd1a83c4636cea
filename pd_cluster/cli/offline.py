"""Offline completion: a cluster for as long as a batch of requests lasts, its outputs in the order of the prompts."""

import asyncio
import contextlib
import sys
from typing import Protocol, TextIO

import msgspec

from pd_cluster.cli.completion import Completion, complete
from pd_cluster.cli.progress import StartDisplay
from pd_cluster.config import ClusterConfig
from pd_cluster.launch.cluster import Cluster
from pd_cluster.model.source import LoadedModel
from pd_cluster.model.tokenizer import Detokenizer
from pd_cluster.request import Request


class Printer(Protocol):
    def tokens(self, index: int, token_ids: list[int]) -> None:
        """New tokens of a prompt's completion."""

    def done(self, index: int, completion: Completion) -> None:
        """A completion has ended; called in the order of the prompts."""


class JsonPrinter:
    def __init__(self, model: LoadedModel, out: TextIO) -> None:
        self._tokenizer = model.tokenizer
        self._out = out

    def tokens(self, index: int, token_ids: list[int]) -> None:
        pass

    def done(self, index: int, completion: Completion) -> None:
        line = msgspec.json.encode(completion.as_json(index, self._tokenizer))
        self._out.write(line.decode() + "\n")
        self._out.flush()


class TextPrinter:
    """A single completion as it comes; several when each is complete, under its prompt."""

    def __init__(self, model: LoadedModel, num_prompts: int, out: TextIO) -> None:
        self._tokenizer = model.tokenizer
        self._out = out
        self._stream = Detokenizer(model.tokenizer) if model.tokenizer and num_prompts == 1 else None

    def tokens(self, index: int, token_ids: list[int]) -> None:
        if self._stream is not None:
            self._out.write(self._stream.push(token_ids))
            self._out.flush()

    def done(self, index: int, completion: Completion) -> None:
        if self._stream is not None:
            self._out.write(self._stream.flush() + "\n")
        elif self._tokenizer is None:
            self._out.write(",".join(map(str, completion.token_ids)) + "\n")
        else:
            prompt = self._tokenizer.decode(completion.request.token_ids)
            self._out.write(f"[{index}] {prompt!r}\n{completion.text(self._tokenizer)}\n\n")
        self._out.flush()
        if completion.error is not None:
            sys.stderr.write(f"pd-cluster: prompt {index}: {completion.error.message}\n")


async def run_offline(
    config: ClusterConfig, model: LoadedModel, requests: list[Request], concurrency: int, printer: Printer
) -> int:
    """Complete all `requests`, `concurrency` at once; the number of those that failed."""
    free = asyncio.Semaphore(concurrency)
    display = StartDisplay(f"starting {model.name}")
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # results only: what a library prints is no result
        with display:
            cluster = await stack.enter_async_context(
                Cluster(config, model=model, on_progress=display.on_progress, on_event=display.on_event)
            )

        async def one(index: int, request: Request) -> Completion:
            async with free:
                return await complete(cluster.router.pipeline, request, lambda ids: printer.tokens(index, ids))

        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
        try:
            num_failed = 0
            for index, task in enumerate(tasks):
                completion = await task
                num_failed += completion.error is not None
                printer.done(index, completion)
            return num_failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
