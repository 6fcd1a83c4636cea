"""The demo: prompts at once through a real cluster, their text as it comes, then where each request's time went."""

import asyncio
import contextlib
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pd_cluster.cli.completion import Completion, complete
from pd_cluster.cli.pools import describe, pools_table
from pd_cluster.cli.progress import StartDisplay
from pd_cluster.config import ClusterConfig
from pd_cluster.errors import PdClusterError, from_info
from pd_cluster.ids import RequestId
from pd_cluster.launch.cluster import Cluster
from pd_cluster.model.source import open_model
from pd_cluster.model.tokenizer import Detokenizer, Tokenizer
from pd_cluster.request import Request, SamplingParams

OPENINGS = [
    "Once upon a time",
    "One day, a little girl named Lily",
    "The big brown dog",
    "Tom and his mom went to the park",
    "There was a small red bird who",
    "In a house by the sea",
]
LOG_WIDTH = 120
HEARTBEAT_S = 0.6  # after this, what workers counted has reached the router


class Story:
    """One prompt and the text so far."""

    def __init__(self, index: int, opening: str, tokenizer: Tokenizer) -> None:
        self.index = index
        self.opening = opening
        self.text = opening
        self.token_ids = tokenizer.encode(opening)
        self.completion: Completion | None = None
        self._stream = Detokenizer(tokenizer)
        self._num_printed = 0

    def push(self, token_ids: list[int]) -> None:
        self.text += self._stream.push(token_ids)

    def new_line(self, width: int) -> str | None:
        """The next line of output for someone who reads a log: whole words, and all that is left when it is over."""
        rest = self.text[self._num_printed :]
        if self.completion is None:
            if len(rest) < width or (cut := rest.rfind(" ", 0, width)) <= 0:
                return None
            rest = rest[:cut]
        self._num_printed += len(rest)
        return " ".join(rest.split()) or None

    def rich(self) -> Text:
        rest = self.text[len(self.opening) :].replace("\n", " ")
        return Text.assemble((f"{self.index + 1} ", "bold cyan"), (self.opening, "dim"), rest)


async def run_demo(config: ClusterConfig, openings: list[str], max_tokens: int, temperature: float, seed: int) -> None:
    """Raises the first request's error when one failed."""
    model = open_model(config.model.path, config.model.load)
    if model.tokenizer is None:
        raise PdClusterError(f"{model.name} has no tokenizer: the demo needs one")
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
    started_s = time.monotonic()
    stories = [Story(index, opening, model.tokenizer) for index, opening in enumerate(openings)]
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        console.print(describe(config, model))
        with StartDisplay(f"starting {model.name}") as display:
            cluster = await stack.enter_async_context(
                Cluster(config, model=model, on_progress=display.on_progress, on_event=display.on_event)
            )
        ready_s = time.monotonic() - started_s
        console.print(f"ready after {ready_s:.1f} s; {len(stories)} prompts at once\n")
        await _tell(cluster, stories, sampling, console)
        await asyncio.sleep(HEARTBEAT_S)
        console.print(_timeline(stories))
        console.print(pools_table(cluster.router.pipeline.directory, model.config, config))
    console.print(f"\nall processes ended; the demo took {time.monotonic() - started_s:.1f} s")
    for story in stories:
        if story.completion is not None and story.completion.error is not None:
            raise from_info(story.completion.error)


async def _tell(cluster: Cluster, stories: list[Story], sampling: SamplingParams, console: Console) -> None:
    """Run all requests together and show their text as it grows."""

    async def tell(story: Story) -> None:
        request = Request(
            id=RequestId(f"story-{story.index + 1}"),
            token_ids=story.token_ids,
            num_prompt_tokens=len(story.token_ids),
            sampling=sampling,
        )
        story.completion = await complete(cluster.router.pipeline, request, story.push)

    telling = asyncio.gather(*(tell(story) for story in stories))
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=15) as live:
                while not telling.done():
                    await asyncio.wait([telling], timeout=0.07)
                    live.update(Group(*(story.rich() for story in stories)))
        else:
            while not telling.done():
                await asyncio.wait([telling], timeout=0.07)
                for story in stories:
                    while (line := story.new_line(100)) is not None:
                        console.print(f"  {story.index + 1} | {line}", soft_wrap=True, markup=False)
        await telling
    finally:
        telling.cancel()
    console.print()


def _timeline(stories: list[Story]) -> Table:
    table = Table(title="What happened to each request", title_justify="left", box=None, pad_edge=False)
    for heading in (
        "#",
        "queued",
        "prefill on",
        "took",
        "KV pushed",
        "in",
        "TTFT",
        "decode on",
        "tokens",
        "TPOT",
        "end",
    ):
        table.add_column(heading, justify="left" if heading.endswith((" on", "end")) else "right")
    for story in stories:
        completion = story.completion
        if completion is None or completion.error is not None or completion.timings is None:
            reason = completion.error.code if completion is not None and completion.error else "cancelled"
            table.add_row(str(story.index + 1), *[""] * 9, reason)
            continue
        t = completion.timings
        table.add_row(
            str(story.index + 1),
            _ms(t.queued_s),
            t.prefill_worker or "-",
            _ms(t.prefill_s),
            f"{t.transfer_bytes / 1024:.0f} KiB",
            _ms(t.transfer_s),
            _ms(t.ttft_s),
            t.decode_worker or "-",
            str(t.num_output_tokens),
            _ms(t.tpot_s),
            completion.finish or "-",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
