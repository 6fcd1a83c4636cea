"""Records of experts: laid down in pieces, sealed, at strides that make one expert one range."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_cluster.errors import ConfigError
from pd_cluster.ids import ExpertId, Rank, SlotId
from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.model import expert_arena
from pd_cluster.model.expert_arena import ExpertArena, PackedForm, PlainForm, is_intact, seal
from pd_cluster.model.fused_moe import FusedSlotMap
from pd_cluster.model.moe import SlotMap
from pd_cluster.parallel.placement import LayerPlacement, Placement, spread
from pd_cluster.parallel.replicas import choose
from pd_cluster.parallel.slot_table import max_copies, slot_table

E3 = ExpertId(3)


def matrices(hidden: int, size: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def fill(record: Tensor, form: PlainForm | PackedForm, of: dict[str, Tensor]) -> int:
    return sum(1 for _ in form.fill(record, lambda name, first, end: of[name][first:end]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_expert_is_seen_through_the_layers_views(dtype: torch.dtype) -> None:
    form = PlainForm(6, 5, dtype)
    arena = ExpertArena(form, 2, 3, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    of = matrices(6, 5, dtype)
    fill(arena.record(1, 2), form, of)
    assert form.gate_up(arena.layer(1))[2].equal(torch.cat([of["gate"], of["up"]]))
    assert form.down(arena.layer(1))[2].equal(of["down"])
    assert not arena.layer(0).any()
    assert not arena.layer(1)[:2].any()
    assert arena.record(1, 2).data_ptr() == arena.base_address + arena.offset(1, 2)


@pytest.mark.parametrize(("hidden", "size"), [(32, 16), (128, 64), (36, 20), (200, 72), (64, 130)])
def test_experts_packed_in_pieces_equal_whole_ones(hidden: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library()
    if library is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(expert_arena, "READ_BYTES", 1)  # the smallest pieces
    form, memory, of = PackedForm(library, hidden, size), WeightMemory(), matrices(hidden, size, torch.bfloat16)
    arena = ExpertArena(form, 1, 2, memory.take_bytes)
    num_pieces = fill(arena.record(0, 1), form, of)
    assert num_pieces == -(-size // 32) - (-hidden // 64)
    gate_up = Packed(library, memory, torch.cat([of["gate"], of["up"]]), gated=True).values.view(torch.uint8)
    down = Packed(library, memory, of["down"]).values.view(torch.uint8)
    record = arena.record(0, 1)
    assert record[: len(gate_up)].equal(gate_up)
    assert record[form.down_at : form.down_at + len(down)].equal(down)
    assert not arena.record(0, 0).any()


def test_a_seal_tells_damage_and_another_expert() -> None:
    form = PlainForm(6, 5, torch.float32)
    arena = ExpertArena(form, 1, 1, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    record = arena.record(0, 0)
    assert not is_intact(record, 0, E3), "an empty slot"
    fill(record, form, matrices(6, 5, torch.float32))
    seal(record, 0, E3)
    assert is_intact(record, 0, E3)
    assert not is_intact(record, 0, ExpertId(4))
    assert not is_intact(record, 1, E3)
    for byte in (0, form.num_bytes - 1, len(record) - 1):
        record[byte] ^= 1
        assert not is_intact(record, 0, E3)
        record[byte] ^= 1
    assert is_intact(record, 0, E3)


def test_a_map_changes_in_place_and_chooses_by_weights() -> None:
    before = spread(4, 4, 1, slots_per_rank=2)
    columns = max_copies(before)
    assert columns == 4
    table = SlotMap(slot_table(before, 0, columns), torch.device("cpu"))
    addresses = table.slots_EC.data_ptr(), table.thresholds_EC.data_ptr()
    experts, mix = torch.arange(4).repeat(500, 1), torch.arange(500) * 0x3243F6A9 & 0x7FFFFFFF
    assert table(experts, mix)[0].tolist() == [0, 2, 4, 6]
    slots = list(before.layers[0].slots)
    slots[3] = slots[5] = ExpertId(0)  # expert 0 on ranks 0, 1 and 2
    after = Placement(epoch=1, num_ranks=4, num_experts=4, slots_per_rank=2, layers=(LayerPlacement(tuple(slots)),))
    weights = [[0.5, 0.3, 0.2], [1.0], [1.0], [1.0]]
    made = slot_table(after, 0, columns, weights)
    table.set(made)
    assert (table.slots_EC.data_ptr(), table.thresholds_EC.data_ptr()) == addresses
    chosen = table(experts, mix)
    copies = choose(experts.numpy(), mix.numpy(), made.thresholds_EC)
    assert chosen.equal(table.slots_EC[experts, torch.from_numpy(copies)])
    share = torch.bincount(chosen[:, 0], minlength=8) / 500
    assert share[[0, 3, 5]].tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.06)
    assert [after.layers[0].slots[slot] for slot in chosen[7].tolist()] == [0, 1, 2, 3]
    table.set(slot_table(before, 0, columns))
    assert table(experts, mix)[499].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("redundant", [0, 5, 40])
def test_the_kernel_chooses_the_slots_that_torch_does(redundant: int) -> None:
    library = native.library()
    if library is None:
        pytest.skip("no C compiler")
    placement = spread(16, 8, 1, redundant, slots_per_rank=9)
    rng = np.random.default_rng(redundant)
    weights = [rng.dirichlet([1.0] * len(slots)).tolist() for slots in placement.copies(0)]
    table = slot_table(placement, 0, max_copies(placement), weights)
    plain, fused = SlotMap(table, torch.device("cpu")), FusedSlotMap(library, SlotMap(table, torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    experts = torch.randint(0, 16, (300, 4), generator=generator)
    mix = torch.randint(0, 2**31, (300,), generator=generator)
    assert fused(experts, mix).equal(plain(experts, mix))
    assert fused(experts[:0], mix[:0]).shape == (0, 4)
    other = slot_table(spread(16, 8, 1, slots_per_rank=9), 0, max_copies(placement))
    plain.set(other)
    fused.set(other)
    assert fused(experts, mix).equal(plain(experts, mix))


def test_the_widest_table_holds_a_copy_on_every_rank_or_as_many_as_there_are_slots() -> None:
    assert max_copies(spread(256, 320, 1, 64)) == 65
    assert max_copies(spread(8, 4, 1, slots_per_rank=4)) == 4
    assert max_copies(spread(8, 1, 1)) == 1


def test_room_for_experts_is_left_empty() -> None:
    placement = spread(6, 4, 2, redundant=1, slots_per_rank=4)
    assert [len([e for e in placement.rank_slots(1, Rank(r)) if e is not None]) for r in range(4)] == [1, 2, 2, 2]
    assert placement.owner(SlotId(7)) == 1
    with pytest.raises(ConfigError, match="expert_slots_per_rank must be at least 2 for 6 experts"):
        spread(6, 4, 2, redundant=1, slots_per_rank=1)
