"""A cluster's status as people read it: what `status` prints and `top` keeps up to date."""

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pd_cluster.cli.experts_view import experts_table
from pd_cluster.cli.members_view import members
from pd_cluster.client import ClusterStatus, Health, RequestStatus, Role, Totals, WorkerStatus

BAR_WIDTH = 10
WIDE = 110
"""From so many columns on every figure of a worker has its own."""

ROLES = list(Role)
STYLES = {Health.READY: "green", Health.DRAINING: "yellow", Health.LOST: "red"}


class Moment(Struct, frozen=True):
    """A status and the one before it: rates are of the time between, or of the router's whole life without one."""

    now: ClusterStatus
    before: ClusterStatus | None = None

    @property
    def seconds(self) -> float:
        before_s = self.before.uptime_s if self._comparable and self.before is not None else 0.0
        return max(1e-3, self.now.uptime_s - before_s)

    @property
    def _comparable(self) -> bool:
        """Not when another router answers, or the same one restarted."""
        before = self.before
        return before is not None and before.router_id == self.now.router_id and before.uptime_s < self.now.uptime_s

    def since(self, name: str) -> float:
        """By how much one of the totals has grown."""
        before = getattr(self.before.totals, name) if self._comparable and self.before is not None else 0
        return float(getattr(self.now.totals, name)) - float(before)

    def rate(self, name: str) -> float:
        """A second."""
        return self.since(name) / self.seconds

    def mean_s(self, name: str) -> float | None:
        """Of `ttft` or `itl`; None when nothing was measured."""
        count = self.since(f"{name}_count")
        return self.since(f"{name}_sum_s") / count if count else None


def view(moment: Moment, width: int = WIDE, layers: int = 3) -> RenderableType:
    """For a terminal of `width` columns; of each engine's layers of experts, the `layers` least even."""
    now = moment.now
    workers = sorted(now.workers, key=lambda w: (ROLES.index(w.role), w.engine_id, w.dp_rank))
    table = _workers(workers) if width >= WIDE else _workers_in_short(workers)
    parts: list[RenderableType] = [_head(now), _rates(moment, width), "", table]
    if now.engines:
        parts += ["", *map(members, now.engines)]
    if now.placements:
        parts += ["", experts_table(now.placements, layers)]
    if now.requests:
        parts += ["", _requests(now.requests) if width >= WIDE else _requests_in_short(now.requests)]
    return Group(*parts)


def _head(now: ClusterStatus) -> Text:
    state = ("ready", "green") if now.ready else ("not ready", "red")
    return Text.assemble(
        (now.model, "bold"), " at ", now.router_id, f" ({now.version}), up {duration(now.uptime_s)}, ", state
    )


def _rates(moment: Moment, width: int) -> Text:
    phases, totals = moment.now.phases, moment.now.totals
    ttft_s, itl_s = moment.mean_s("ttft"), moment.mean_s("itl")
    latency = ", ".join(
        f"{name} {milliseconds(value)}" for name, value in (("TTFT", ttft_s), ("TPOT", itl_s)) if value is not None
    )
    requests = [
        f"requests: {phases.queued} queued, {phases.prefilling} prefilling, {phases.transferring} transferring, "
        f"{phases.decoding} decoding",
        f"{totals.num_requests} done, {totals.num_retries} retries",
    ]
    tokens = [
        f"tokens: {moment.rate('num_output_tokens'):.1f}/s out, {moment.rate('num_prompt_tokens'):.1f}/s in, "
        f"{_cached(totals)} cached",
        f"KV moved {moment.rate('kv_transfer_bytes') / 1e6:.1f} MB/s",
        *([latency] if latency else []),
    ]
    return Text("\n".join([*lines(requests, width), *lines(tokens, width)]))


def lines(parts: list[str], width: int) -> list[str]:
    """Of at most `width` columns, with whole parts; those of one line have a semicolon between."""
    filled = parts[:1]
    for part in parts[1:]:
        longer = f"{filled[-1]}; {part}"
        if len(longer) <= width:
            filled[-1] = longer
        else:
            filled.append(f"  {part}")
    return filled


def _cached(totals: Totals) -> str:
    return f"{totals.num_cached_tokens / totals.num_prompt_tokens:.0%}" if totals.num_prompt_tokens else "none"


def _workers(workers: list[WorkerStatus]) -> RenderableType:
    if not workers:
        return Text("no worker is known", style="red")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("worker", "role", "health"):
        table.add_column(heading)
    table.add_column("KV used")
    for heading in ("blocks", "stranded", "running", "waiting", "tokens", "step", "prefill"):
        table.add_column(heading, justify="right")
    for worker in workers:
        kv = worker.kv
        stranded = _stranded(worker)
        table.add_row(
            worker.worker_id,
            worker.role.value + (f" TP{worker.tensor_parallel}" if worker.tensor_parallel > 1 else ""),
            _health(worker),
            bar(kv.usage),
            f"{kv.num_blocks - kv.num_free_blocks}/{kv.num_blocks}",
            f"{stranded}" + (f" ({kv.oldest_stranded_s:.1f} s)" if stranded else ""),
            f"{worker.num_running}/{worker.max_num_seqs}",
            f"{worker.num_waiting + worker.num_pending_reservations}",
            f"{worker.num_context_tokens + worker.num_waiting_tokens}",
            milliseconds(worker.step_s) if worker.step_s else "-",
            f"{worker.prefill_tok_s:.0f}/s" if worker.prefill_tok_s else "-",
        )
    return table


def _workers_in_short(workers: list[WorkerStatus]) -> RenderableType:
    """In 80 columns, whatever the numbers; columns that would say nothing are left out."""
    if not workers:
        return Text("no worker is known", style="red")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("worker", "role", "health"):
        table.add_column(heading, no_wrap=True)
    strands, prefills = any(map(_stranded, workers)), any(worker.prefill_tok_s for worker in workers)
    headings = ["KV", "blocks", *["stranded"] * strands, "run", "wait", "step", *["prefill"] * prefills]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        kv = worker.kv
        cells = [f"{kv.usage:.0%}", f"{short(kv.num_blocks - kv.num_free_blocks)}/{short(kv.num_blocks)}"]
        cells += [short(_stranded(worker))] * strands
        cells += [str(worker.num_running), str(worker.num_waiting + worker.num_pending_reservations)]
        cells += [milliseconds(worker.step_s) if worker.step_s else "-"]
        cells += [f"{short(worker.prefill_tok_s)}/s" if worker.prefill_tok_s else "-"] * prefills
        health = Text(worker.health.value, style=STYLES[worker.health])
        table.add_row(worker.worker_id, worker.role.value, health, *cells)
    return Group(table, *(Text(f"{w.worker_id}: {w.reason}", style="dim") for w in workers if w.reason))


def _stranded(worker: WorkerStatus) -> int:
    return worker.kv.num_reserved_blocks + worker.kv.num_held_blocks + worker.kv.num_quarantined_blocks


def _health(worker: WorkerStatus) -> Text:
    health = Text(worker.health.value, style=STYLES[worker.health])
    return health.append(f" ({worker.reason})") if worker.reason else health


def _requests_in_short(requests: list[RequestStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("phase")
    for heading in ("age", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at", overflow="fold")
    for request in requests:
        tokens = f"{short(request.num_prompt_tokens)}+{short(request.num_output_tokens)}"
        where = request.decode_worker or request.prefill_worker or "-"
        table.add_row(request.request_id, request.phase.value, duration(request.age_s), tokens, where)
    return table


def _requests(requests: list[RequestStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("request", "phase"):
        table.add_column(heading)
    for heading in ("age", "prompt", "output", "retries"):
        table.add_column(heading, justify="right")
    for heading in ("prefill", "decode"):
        table.add_column(heading)
    for request in requests:
        table.add_row(
            request.request_id,
            request.phase.value,
            f"{request.age_s:.1f} s",
            str(request.num_prompt_tokens),
            str(request.num_output_tokens),
            str(request.num_retries),
            request.prefill_worker or "-",
            request.decode_worker or "-",
        )
    return table


def bar(share: float) -> Text:
    """A share between 0 and 1."""
    full = round(share * BAR_WIDTH)
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text("█" * full, style=style) + Text("░" * (BAR_WIDTH - full), style="dim") + Text(f" {share:4.0%}")


def short(number: float) -> str:
    """Three figures or so: `950`, `12k`, `3.4M`."""
    for limit, unit in ((1e4, ""), (1e6, "k"), (1e9, "M")):
        if number < limit:
            scaled = number / {"": 1, "k": 1e3, "M": 1e6}[unit]
            return f"{scaled:.0f}{unit}" if scaled >= 10 or not unit else f"{scaled:.1f}{unit}"
    return f"{number / 1e9:.1f}G"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.1 d`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
