"""A cluster in a few lines: which pools there are, which experts lie on which rank, and how much work those had."""

from rich.table import Table

from pd_cluster.config import ClusterConfig
from pd_cluster.ids import Rank
from pd_cluster.launch.roles import engine_shapes
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.source import LoadedModel
from pd_cluster.parallel.placement import Placement, spread
from router.directory import Directory, Worker


def describe(config: ClusterConfig, model: LoadedModel) -> str:
    """What will be started."""
    about = model.config
    experts = f", {about.moe.num_experts} experts in {about.num_moe_layers} layers" if about.moe else ""
    lines = [f"{model.name}: {about.architecture}, {about.num_layers} layers{experts}"]
    for shape in engine_shapes(config):
        parts = f"{shape.num_ranks} rank{'s' if shape.num_ranks > 1 else ''}"
        degrees = f"DP{shape.data_parallel} x TP{shape.tensor_parallel}"
        ep = f", EP{shape.num_ranks}" if about.moe else ""
        lines.append(f"  {shape.engine_id}: {parts} ({degrees}{ep}) by the {config.launch.launcher} launcher")
    return "\n".join(lines)


def pools_table(directory: Directory, model: ModelConfig, config: ClusterConfig) -> Table:
    """One row for each rank of every engine."""
    table = Table(title="\nWho did it", title_justify="left", box=None, pad_edge=False)
    for heading in ("rank", "worker", "KV blocks", "steps", "experts", "expert tokens", "share"):
        table.add_column(heading, justify="left" if heading in ("rank", "worker", "experts") else "right")
    engines: dict[str, list[Worker]] = {}
    for worker in sorted(directory.workers, key=lambda w: (not w.info.can_prefill, w.info.engine_id, w.info.dp_rank)):
        engines.setdefault(worker.info.engine_id, []).append(worker)
    for engine_id, workers in engines.items():
        info = workers[0].info
        num_ranks = info.data_parallel * info.tensor_parallel
        section = config.prefill if not info.can_decode else config.decode
        # only the placement of the start is known here
        moved = any(w.load.placement is not None and w.load.placement.epoch for w in workers)
        placement = None if moved else _placement(model, num_ranks, section.redundant_experts)
        loads = rank_loads(placement, [worker.load.expert_load for worker in workers]) if placement else []
        total = sum(loads)
        for rank in range(num_ranks):
            worker = next(w for w in workers if w.info.dp_rank == rank // info.tensor_parallel)
            table.add_row(
                f"{engine_id}.{rank}",
                worker.id,
                str(worker.info.num_blocks),
                str(worker.load.num_steps),
                _experts(placement, rank) if placement else "moved" if moved else "-",
                str(loads[rank]) if placement else "-",
                f"{loads[rank] / total:.0%}" if total else "-",
            )
    return table


def rank_loads(placement: Placement, loads: list[list[list[int]]]) -> list[int]:
    """Tokens routed to the experts of each rank, over all layers. `loads`: [worker][MoE layer][expert] tokens.

    The work of an expert with several copies counts in equal parts.
    """
    totals = [0.0] * placement.num_ranks
    for load in loads:
        for layer, experts in enumerate(load):
            for expert, slots in enumerate(placement.copies(layer)):
                for slot in slots:
                    totals[placement.owner(slot)] += experts[expert] / len(slots)
    return [round(total) for total in totals]


def _placement(model: ModelConfig, num_ranks: int, redundant: int) -> Placement | None:
    if model.moe is None:
        return None
    return spread(model.moe.num_experts, num_ranks, model.num_moe_layers, redundant)


def _experts(placement: Placement, rank: int) -> str:
    held = sorted(expert for expert in placement.rank_slots(0, Rank(rank)) if expert is not None)
    runs: list[list[int]] = []
    for expert in held:
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in runs)
