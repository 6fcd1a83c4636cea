"""A cluster's status as people read it: what `status` prints and `top` keeps up to date."""

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pd_cluster.cli.members_view import members
from pd_cluster.client import ClusterStatus, Health, RequestStatus, Role, Totals, WorkerStatus

BAR_WIDTH = 10
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


def view(moment: Moment) -> RenderableType:
    parts: list[RenderableType] = [_head(moment.now), _rates(moment), "", _workers(moment.now.workers)]
    if moment.now.engines:
        parts += ["", *map(members, moment.now.engines)]
    if moment.now.requests:
        parts += ["", _requests(moment.now.requests)]
    return Group(*parts)


def _head(now: ClusterStatus) -> Text:
    state = ("ready", "green") if now.ready else ("not ready", "red")
    return Text.assemble(
        (now.model, "bold"), " at ", now.router_id, f" ({now.version}), up {duration(now.uptime_s)}, ", state
    )


def _rates(moment: Moment) -> Text:
    phases, totals = moment.now.phases, moment.now.totals
    ttft_s, itl_s = moment.mean_s("ttft"), moment.mean_s("itl")
    latency = ", ".join(
        f"{name} {milliseconds(value)}" for name, value in (("TTFT", ttft_s), ("TPOT", itl_s)) if value is not None
    )
    return Text(
        f"requests: {phases.queued} queued, {phases.prefilling} prefilling, {phases.transferring} transferring, "
        f"{phases.decoding} decoding; {totals.num_requests} done, {totals.num_retries} retries\n"
        f"tokens: {moment.rate('num_output_tokens'):.1f}/s out, {moment.rate('num_prompt_tokens'):.1f}/s in, "
        f"{_cached(totals)} cached; KV moved {moment.rate('kv_transfer_bytes') / 1e6:.1f} MB/s"
        + (f"; {latency}" if latency else "")
    )


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
    for worker in sorted(workers, key=lambda w: (ROLES.index(w.role), w.engine_id, w.dp_rank)):
        kv = worker.kv
        stranded = kv.num_reserved_blocks + kv.num_held_blocks + kv.num_quarantined_blocks
        health = Text(worker.health.value, style=STYLES[worker.health])
        if worker.reason:
            health.append(f" ({worker.reason})")
        table.add_row(
            worker.worker_id,
            worker.role.value + (f" TP{worker.tensor_parallel}" if worker.tensor_parallel > 1 else ""),
            health,
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


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.1 d`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} d"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
