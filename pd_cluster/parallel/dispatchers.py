"""Which dispatcher an engine uses, by name.

| name         | ranks                             | rows travel by                          |
|--------------|-----------------------------------|-----------------------------------------|
| `replicated` | one DP rank                       | nothing: all ranks have all tokens      |
| `collective` | any                               | torch.distributed all-to-all            |
| `nixl`       | any, and they may come and go     | one-sided writes into peers' buffers    |
| `local`      | virtual ones, all in this process | a permutation                           |
| `deepep`     | any, on GPUs                      | the library of this name                |
| `nixl_ep`    | any, on GPUs                      | the library of this name                |

`auto` is `replicated` for one DP rank, else `collective`.
"""

from typing import Literal

import torch
from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.parallel.codec import CodecName, codec_of
from pd_cluster.parallel.collective import CollectiveDispatcher
from pd_cluster.parallel.device_dispatch import Sizes, open_device_dispatcher
from pd_cluster.parallel.dispatch import Dispatcher
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.local import LocalDispatcher
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.replicated import ReplicatedDispatcher

CPU = torch.device("cpu")

DispatcherName = Literal["auto", "replicated", "collective", "local", "nixl", "deepep", "nixl_ep"]


class Traffic(Struct, frozen=True, kw_only=True):
    """What a step sends at most: `max_tokens` of a DP rank, each to `num_chosen` experts."""

    max_tokens: int
    num_chosen: int
    hidden_size: int
    dtype: torch.dtype
    codec: CodecName = "auto"
    device: torch.device = CPU


def make_dispatcher(name: DispatcherName, groups: Groups, placement: Placement, traffic: Traffic) -> Dispatcher:
    """Raises ConfigError for a dispatcher that cannot serve these ranks."""
    codec = codec_of(traffic.codec)
    if name == "local":
        if groups.num_ranks != 1:
            raise ConfigError("the local dispatcher plays all ranks in one process: it needs an engine of one rank")
        return LocalDispatcher(placement.num_ranks, placement.slots_per_rank, codec)
    if placement.num_ranks != groups.num_ranks:
        raise ConfigError(f"the placement is for {placement.num_ranks} ranks, the engine has {groups.num_ranks}")
    max_tokens = -(-traffic.max_tokens // groups.tp_size)
    if name in ("deepep", "nixl_ep"):
        if traffic.dtype is not torch.bfloat16:
            raise ConfigError(f'dispatcher = "{name}" sends bfloat16, but the model runs in {traffic.dtype}')
        sizes = Sizes(
            num_ranks=groups.num_ranks,
            slots_per_rank=placement.slots_per_rank,
            max_tokens=-(-max_tokens // 4) * 4,  # both want a multiple of 4 over all ranks
            hidden_size=traffic.hidden_size,
            fp8=codec.is_fp8,
        )
        return open_device_dispatcher(name, groups.rank, groups.engine, groups.store, sizes, traffic.device)
    if name == "nixl":
        return NixlDispatcher(
            groups.rank,
            groups.num_ranks,
            placement.slots_per_rank,
            max_tokens=max_tokens,
            num_chosen=traffic.num_chosen,
            hidden_size=traffic.hidden_size,
            dtype=traffic.dtype,
            codec=codec,
        )
    if name == "collective" or (name == "auto" and groups.dp_size > 1):
        return CollectiveDispatcher(groups, placement.slots_per_rank, codec)
    if groups.dp_size > 1:
        raise ConfigError(f"the replicated dispatcher needs data_parallel 1, got {groups.dp_size}")
    if codec.is_fp8:
        raise ConfigError("dispatch_dtype fp8 is for ranks that send tokens to each other; with one DP rank none does")
    return ReplicatedDispatcher(groups, placement.slots_per_rank)
