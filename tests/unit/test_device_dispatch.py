"""Libraries for GPUs are refused by name where they cannot serve; rows are translated as their interface says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.ids import Rank
from pd_cluster.model.moe import ExpertSlots
from pd_cluster.parallel.codec import FP8_ERROR
from pd_cluster.parallel.device_dispatch import DeviceDispatcher, GroupComm, Sizes, open_device_dispatcher
from pd_cluster.parallel.dispatch import Dispatcher, combine
from pd_cluster.parallel.dispatchers import Traffic, make_dispatcher
from pd_cluster.parallel.groups import Group, Groups
from pd_cluster.parallel.placement import spread
from pd_cluster.parallel.replicated import single_rank

SLOTS, H, K, ROOM = 5, 256, 3, 16


class StandIn:
    """One rank's buffer as the libraries document it: room for every token in each slot, garbage behind the count."""

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, *, use_fp8: bool
    ) -> tuple[Any, Tensor, Any, Any, Any]:
        assert max_tokens == ROOM
        assert num_experts == SLOTS
        received = torch.full((SLOTS, ROOM, H), float("nan"), dtype=torch.bfloat16)
        sources = []
        for slot in range(SLOTS):
            tokens = (topk_idx == slot).any(dim=1).nonzero().squeeze(1).flip(0)  # in no particular order
            received[slot, : len(tokens)] = x[tokens]
            sources.append(tokens)
        counts = torch.tensor([len(tokens) for tokens in sources], dtype=torch.int32)
        if not use_fp8:
            return received, counts, sources, None, None
        blocks = received.float().view(SLOTS, ROOM, H // 128, 128)
        scales = blocks.abs().amax(dim=3) / 448
        codes = (blocks / scales.unsqueeze(3)).view(SLOTS, ROOM, H).to(torch.float8_e4m3fn)
        return (codes, scales), counts, sources, None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, Any, Any]:
        out = torch.zeros(len(topk_idx), H)
        for slot, tokens in enumerate(handle):
            for row, token in enumerate(tokens.tolist()):
                weight = topk_weights[token][topk_idx[token] == slot].sum()
                out[token] += weight * x[slot, row].float()
        return out.bfloat16(), None, None


def compute(dispatcher: Dispatcher, experts: ExpertSlots, *tokens: Tensor) -> Tensor:
    combining = dispatcher.dispatch(0, *tokens)
    return combine(combining, [experts(arrived) for arrived in combining.arrived()])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_what_arrives_and_returns_is_what_the_plain_form_computes(num_tokens: int, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, H, generator=generator).bfloat16()
    slots = torch.rand(num_tokens, SLOTS, generator=generator).topk(K).indices
    weights = torch.rand(num_tokens, K, generator=generator)
    gate_up = torch.randn(SLOTS, 64, H, generator=generator).bfloat16() / 16
    experts = ExpertSlots(gate_up, torch.randn(SLOTS, H, 32, generator=generator).bfloat16())
    sizes = Sizes(num_ranks=1, slots_per_rank=SLOTS, max_tokens=ROOM, hidden_size=H, fp8=fp8)
    ours = compute(DeviceDispatcher(Rank(0), StandIn(), sizes), experts, hidden, slots, weights)
    plain = compute(single_rank(SLOTS), experts, hidden, slots, weights)
    assert ours.shape == plain.shape
    if num_tokens:
        error = float((ours.double() - plain.double()).norm() / plain.double().norm())
        assert error < (FP8_ERROR[0] if fp8 else 0.01)


@pytest.mark.parametrize("name", ["deepep", "nixl_ep"])
def test_a_library_that_is_not_here_is_refused_by_name(name: Any) -> None:
    placement = spread(8, 2, 1)
    groups = Groups(rank=Rank(0), data_parallel=2)
    traffic = Traffic(max_tokens=8, num_chosen=2, hidden_size=256, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=rf'dispatcher = "{name}" (needs the package|is for GPUs)'):
        make_dispatcher(name, groups, placement, traffic)
    single = Traffic(max_tokens=8, num_chosen=2, hidden_size=256, dtype=torch.float32)
    with pytest.raises(ConfigError, match="sends bfloat16"):
        make_dispatcher(name, groups, placement, single)


def test_a_library_that_is_here_still_wants_a_gpu_and_fitting_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.parallel.device_dispatch.find_library", lambda name: torch)
    sizes = Sizes(num_ranks=1, slots_per_rank=SLOTS, max_tokens=ROOM, hidden_size=H, fp8=False)
    with pytest.raises(ConfigError, match="is for GPUs; this engine runs on cpu"):
        open_device_dispatcher("deepep", Rank(0), None, None, sizes, torch.device("cpu"))
    odd = Sizes(num_ranks=1, slots_per_rank=SLOTS, max_tokens=ROOM, hidden_size=100, fp8=False)
    with pytest.raises(ConfigError, match="128 divides, got 100"):
        open_device_dispatcher("deepep", Rank(0), None, None, odd, torch.device("cuda"))
    with pytest.raises(ConfigError, match="several ranks"):
        open_device_dispatcher("nixl_ep", Rank(0), None, None, sizes, torch.device("cuda"))


def test_small_values_are_gathered_over_a_group_without_pickle() -> None:
    class Alone(Group):
        def all_gather_rows(self, x: Tensor, counts: list[int]) -> Tensor:
            assert counts == [len(x)]
            return x

    comm = GroupComm(Alone(None, 0, 1), torch.device("cpu"))  # type: ignore[arg-type]
    assert (comm.Get_rank(), comm.Get_size()) == (0, 1)
    for value in (7, b"\x00handle", None):
        assert comm.allgather(value) == [value]
    assert comm.allgather(bytearray(b"ipc")) == [b"ipc"]
