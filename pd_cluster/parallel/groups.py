"""Which ranks compute together: the tensor-parallel group of a DP rank, and the group of all ranks of an engine.

Process groups are built directly on a store, never as torch's default group: a rank can leave one and build the next,
and several ranks may be threads of one process. Nothing here pickles. An engine of one rank has no group at all.
"""

# T rows of one rank, V columns

from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import Rank


class Backend(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def _allgather_base(self, output: Tensor, input: Tensor) -> dist.Work: ...

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: list[int],
        input_counts: list[int],
    ) -> dist.Work: ...


FIRST_RANK = Rank(0)


class Group:
    """Ranks that call the same collectives in the same order. Empty tensors take part in exchanges and skip
    reductions.
    """

    def __init__(self, backend: Backend, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place and bitwise equal on all of them; `x` is contiguous and of one shape on every
        rank.
        """
        if x.numel():
            self._wait(self._backend.allreduce([x]))
        return x

    def all_gather_rows(self, x: Tensor, counts: list[int]) -> Tensor:
        """Rows of all ranks in rank order: rank r gives `counts[r]` rows, a list that every rank knows."""
        most = max(counts)
        if most == 0:
            return x
        if len(x) < most:
            x = torch.cat([x, x.new_zeros((most - len(x), *x.shape[1:]))])
        gathered = x.new_empty((self.size * most, *x.shape[1:]))
        self._wait(self._backend._allgather_base(gathered, x.contiguous()))
        if min(counts) == most:
            return gathered
        return torch.cat([gathered[r * most : r * most + count] for r, count in enumerate(counts)])

    def all_gather_columns(self, x_TV: Tensor) -> Tensor:
        """[T, V] of every rank side by side: [T, size * V]."""
        num_rows, num_columns = x_TV.shape
        gathered = self.all_gather_rows(x_TV, [num_rows] * self.size)
        return gathered.view(self.size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, -1)

    def all_to_all_rows(self, x: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Send `send_counts[r]` rows, in order, to rank r; the rows received, in rank order. Any count may be 0."""
        received = x.new_empty((sum(receive_counts), *x.shape[1:]))
        self._wait(self._backend.alltoall_base(received, x.contiguous(), receive_counts, send_counts))
        return received

    def minimum(self, value: int, device: torch.device | None = None) -> int:
        """The least of what the ranks give."""
        values = self.all_gather_rows(torch.tensor([value], dtype=torch.int64, device=device), [1] * self.size)
        return int(values.min())

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a collective of {self.size} ranks failed on rank {self.rank}: {error}") from error


class Groups:
    """Where a rank stands in its engine, and the groups it computes with (None where it is alone)."""

    def __init__(
        self,
        *,
        rank: Rank = FIRST_RANK,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        tp: Group | None = None,
        engine: Group | None = None,
    ) -> None:
        self.rank = rank
        self.tp_size = tensor_parallel
        self.dp_size = data_parallel
        self.dp_rank, self.tp_rank = divmod(rank, tensor_parallel)
        self.num_ranks = tensor_parallel * data_parallel
        self.tp = tp
        self.engine = engine
        self.store: Store | None = None
        """Where the ranks met, for whatever else they have to tell each other."""

    @classmethod
    def connect(
        cls,
        store: Store,
        *,
        rank: Rank,
        tensor_parallel: int,
        data_parallel: int,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
        name: str = "groups",
        elastic: bool = False,
    ) -> "Groups":
        """Meet the other ranks on `store`; blocks until all are there. `elastic`: DP ranks come and go, so only those
        of one DP rank are a group.

        `name` tells one meeting from the next on the same store. Raises ConfigError when the rank is not one of the
        engine, EngineError when the others do not come within `timeout_s`.
        """
        num_ranks = tensor_parallel * data_parallel
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank must be between 0 and {num_ranks - 1}, got {rank}")
        groups = cls(rank=rank, tensor_parallel=tensor_parallel, data_parallel=data_parallel)
        if num_ranks == 1:
            return groups
        on_gpu = device is not None and device.type == "cuda"
        groups.store = PrefixStore(name, store)
        if not elastic:
            groups.engine = _build(f"{name}/engine", store, rank, num_ranks, on_gpu, timeout_s)
        if data_parallel == 1:
            groups.tp = groups.engine
        elif tensor_parallel > 1:
            groups.tp = _build(f"{name}/tp{groups.dp_rank}", store, groups.tp_rank, tensor_parallel, on_gpu, timeout_s)
        return groups


def _build(name: str, store: Store, rank: int, size: int, on_gpu: bool, timeout_s: float) -> Group:
    timeout = timedelta(seconds=timeout_s)
    prefixed = PrefixStore(name, store)
    try:
        if on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return Group(cast(Backend, dist.ProcessGroupNCCL(prefixed, rank, size, options)), rank, size)
        return Group(cast(Backend, dist.ProcessGroupGloo(prefixed, rank, size, timeout)), rank, size)
    except RuntimeError as error:
        raise EngineError(f"rank {rank} could not meet the other {size - 1} ranks of {name}: {error}") from error


def share(num_items: int, rank: int, size: int) -> tuple[int, int]:
    """[start, end) of `rank`'s part of `num_items`, in parts of ceil(num_items / size); the last parts may be short
    or empty.
    """
    part = -(-num_items // size)
    return min(rank * part, num_items), min((rank + 1) * part, num_items)


def share_counts(num_items: int, size: int) -> list[int]:
    """How many items every rank gets by `share`."""
    bounds = [share(num_items, rank, size) for rank in range(size)]
    return [end - start for start, end in bounds]
