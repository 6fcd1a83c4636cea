"""A second router in a process of its own, on the same workers: told what to do over a pipe, and killed at will."""

import asyncio
import multiprocessing
import multiprocessing.connection

from harness import request

from pd_cluster.config import ClusterConfig
from pd_cluster.model.source import open_model
from router.app import Router

Order = tuple[str, list[int], int]  # request id, prompt, max_tokens


class OtherRouter:
    """`with OtherRouter(config, addresses) as other`; killed at the latest when the block ends."""

    def __init__(self, config: ClusterConfig, addresses: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(config, addresses, theirs), daemon=True)
        self.tokens: dict[str, int] = {}

    def __enter__(self) -> "OtherRouter":
        self._process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._process.join()

    def kill(self) -> None:
        self._process.kill()

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._pipe.send((request_id, prompt, max_tokens))

    async def until(self, request_id: str, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Wait until its client has that many tokens."""
        async with asyncio.timeout(timeout_s):
            while self.tokens.get(request_id, 0) < num_tokens:
                if self._pipe.poll():
                    name, count = self._pipe.recv()
                    self.tokens[name] = count
                else:
                    await asyncio.sleep(0.005)


def run(config: ClusterConfig, addresses: list[str], pipe: "multiprocessing.connection.Connection") -> None:
    asyncio.run(_run(config, addresses, pipe))


async def _run(config: ClusterConfig, addresses: list[str], pipe: "multiprocessing.connection.Connection") -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[Order] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), lambda: orders.put_nowait(pipe.recv()))
    running: list[asyncio.Task[None]] = []
    async with Router(config, open_model(config.model.path), http=False, addresses=addresses) as router:
        await router.until_ready(len(addresses))

        async def answer(order: Order) -> None:
            request_id, prompt, max_tokens = order
            num_tokens = 0
            made = request(prompt, request_id, salt="other", max_tokens=max_tokens)
            async for delta in router.pipeline.generate(made):
                num_tokens += len(delta.token_ids)
                pipe.send((request_id, num_tokens))

        while True:
            running.append(asyncio.create_task(answer(await orders.get())))
