"""Rows as bytes and back: exact as they are, within the stated error as FP8, in torch and in C alike."""

import numpy as np
import pytest
import torch

from pd_cluster.kernels import native
from pd_cluster.parallel.codec import FP8_ERROR, HIGHEST, LEAST_AMAX, RAW, Codec, Fp8, num_scales
from pd_cluster.parallel.native_wire import NativeWire
from pd_cluster.parallel.wire import ARRIVED, DISPATCH, Buffers, PlainWire, Shape, Wire, tag_of


def wild(num_rows: int, hidden_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows whose values span many powers of ten, with zeros and signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, hidden_size, generator=generator)
    values *= 10 ** torch.randint(-6, 5, (num_rows, hidden_size), generator=generator).float()
    values[:, ::7] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("hidden_size", [1, 64, 128, 129, 300, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [RAW, Fp8()], ids=["raw", "fp8"])
def test_rows_have_the_stated_bytes_and_come_back(
    codec: Codec, dtype: torch.dtype, hidden_size: int, num_rows: int
) -> None:
    hidden_RH = wild(num_rows, hidden_size, torch.float32).clamp(-6e4, 6e4).to(dtype)
    rows_RB = codec.encode(hidden_RH)
    assert rows_RB.dtype == torch.uint8
    assert rows_RB.shape == (num_rows, codec.row_bytes(hidden_size, dtype))
    back_RH = codec.decode(rows_RB, hidden_size, dtype)
    assert back_RH.dtype == dtype
    assert back_RH.shape == hidden_RH.shape
    if not codec.is_fp8:
        assert torch.equal(back_RH, hidden_RH)


@pytest.mark.parametrize("hidden_size", [64, 128, 300])
def test_fp8_is_within_its_stated_error(hidden_size: int) -> None:
    codec = Fp8()
    for seed in range(20):
        hidden_RH = wild(8, hidden_size, torch.float32, seed)
        back_RH = codec.decode(codec.encode(hidden_RH), hidden_size, torch.float32)
        for first in range(0, hidden_size, 128):
            block, back = hidden_RH[:, first : first + 128], back_RH[:, first : first + 128]
            scale = block.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_AMAX) / HIGHEST
            bound = torch.maximum(block.abs() * FP8_ERROR[0], scale * FP8_ERROR[1])
            assert ((block - back).abs() <= bound * (1 + 1e-6)).all()


def test_fp8_halves_what_bfloat16_sends() -> None:
    assert Fp8().row_bytes(7168, torch.bfloat16) == 7168 + 4 * 56
    assert RAW.row_bytes(7168, torch.bfloat16) == 2 * 7168
    assert num_scales(7168 + 1) == 57


def test_values_that_are_not_numbers_stay_so_and_spoil_their_block_alone() -> None:
    hidden_RH = torch.ones(2, 256)
    hidden_RH[0, 3], hidden_RH[1, 200] = float("nan"), float("inf")
    back_RH = Fp8().decode(Fp8().encode(hidden_RH), 256, torch.float32)
    assert back_RH[0, :128].isnan().all()
    assert torch.equal(back_RH[0, 128:], torch.ones(128))
    assert torch.equal(back_RH[1, :128], torch.ones(128))
    assert not back_RH[1, 128:].isfinite().any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden_size", [7, 128, 300])
def test_c_writes_and_reads_the_bytes_that_torch_does(hidden_size: int, dtype: str, fp8: bool) -> None:
    library = native.library()
    if library is None:
        pytest.skip("there is no C compiler")
    shape = Shape(
        num_ranks=2,
        slots_per_rank=3,
        max_tokens=20,
        num_chosen=2,
        hidden_size=hidden_size,
        dtype=dtype,  # type: ignore[arg-type]
        fp8=fp8,
    )
    torch_dtype: torch.dtype = getattr(torch, dtype)
    hidden_TH = wild(17, hidden_size, torch_dtype)
    if fp8:
        hidden_TH[3, 5], hidden_TH[4, 0], hidden_TH[5, 1] = float("nan"), float("inf"), -1e-30
    generator = torch.Generator().manual_seed(1)
    slots_TK = torch.rand(17, 6, generator=generator).topk(2).indices
    weights_TK = torch.rand(17, 2, generator=generator)
    tag, messages, rows = tag_of(3, 4), [], []
    for native_code in (False, True):
        buffers = Buffers(shape, Fp8() if fp8 else RAW, 1, 99)
        wire: Wire = NativeWire(library, buffers) if native_code else PlainWire(buffers)
        sent = wire.pack(hidden_TH, slots_TK, weights_TK, tag, 0)
        num_bytes = sent.num_bytes.tolist()
        messages.append(
            (buffers.sent(0, DISPATCH, 0)[: num_bytes[0]], buffers.received(0, DISPATCH, 1)[: num_bytes[1]], num_bytes)
        )
        state, counts = np.array([ARRIVED, 0], np.uint8), np.zeros((2, 2), np.int64)
        assert wire.look(DISPATCH, 0, tag, state, counts, 0.0, False) == 0
        rows.append(wire.unpack(0, tag, state, counts))
    assert messages[0][2] == messages[1][2]
    if not fp8:  # which of its many codes a value that is not a number gets is nobody's concern
        assert np.array_equal(messages[0][0], messages[1][0])
        assert np.array_equal(messages[0][1], messages[1][1])
    assert torch.equal(rows[0].hidden_RH.nan_to_num(7.0, 8.0), rows[1].hidden_RH.nan_to_num(7.0, 8.0))
    for field in ("pair_row_P", "pair_slot_P", "pair_weight_P"):
        assert torch.equal(getattr(rows[0], field), getattr(rows[1], field))
    assert rows[0].slot_counts == rows[1].slot_counts
