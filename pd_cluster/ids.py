"""Ids are distinct types, so that a block id is never passed where a rank is meant."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One request as its router names it; unique over the cluster and the worker's lifetime."""

TransferId = NewType("TransferId", str)
"""One attempt to move a request's KV from one engine to another; a retry gets a new one."""

EngineId = NewType("EngineId", str)
"""A stable name such as `prefill-0` or `decode-0`; survives restarts."""

EngineEpoch = NewType("EngineEpoch", str)
"""One life of an engine: a fresh random id at every start."""

WorkerId = NewType("WorkerId", str)
"""One DP rank of an engine, what a router talks to: `decode-0/1`."""

RouterId = NewType("RouterId", str)
Rank = NewType("Rank", int)
"""A process within its engine: `dp_rank * tensor_parallel + tp_rank`."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in a rank's arena; equal on all TP ranks of a worker."""

UnitHash = NewType("UnitHash", bytes)
"""Chained hash of one 16-token unit and of everything before it."""

ExpertId = NewType("ExpertId", int)
"""A logical expert of a layer."""

SlotId = NewType("SlotId", int)
"""A physical expert slot of a layer, counted over all ranks: `rank * slots_per_rank + local_slot`."""


def new_epoch() -> EngineEpoch:
    return EngineEpoch(secrets.token_hex(8))


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_hex(8))


def worker_id(engine_id: EngineId, dp_rank: int) -> WorkerId:
    return WorkerId(f"{engine_id}/{dp_rank}")
