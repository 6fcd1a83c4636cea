"""The GPU kernels' speed against the card's: `python -m pd_cluster.bench.gpu` on a machine with a CUDA device.

A kernel that moves memory is given as bytes a second and as a share of what a plain copy of 1 GiB reaches in the same
run; one that multiplies as operations a second and as a share of one large torch product. Bytes are those that must
move: keys, values and weights once, whatever the caches do. Medians of several runs, timed by the device.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from pd_cluster.kernels.gpu import attention, fp8, gate, grouped_gemm, norm, permute, rotary, units
from pd_cluster.kernels.paged import GqaPages, MlaPages, Writes

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda")
RUNS = 20
LAYERS = 4
"""Layers of the arenas: rows of one layer lie as far apart as they would, without its memory."""


class Case(NamedTuple):
    """`num_bytes` that must move, or `num_ops` where multiplying is the limit."""

    name: str
    call: Callable[[], object]
    num_bytes: int = 0
    num_ops: int = 0


def median_s(call: Callable[[], object]) -> float:
    """Seconds on the device, after two runs that compile and warm up; the L2 cache is overwritten before each."""
    sweep = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(RUNS):
        sweep.zero_()
        start, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def _segments(num_sequences: int, length: int, new: int, num_kv_heads: int) -> tuple[attention.Segments, Writes]:
    """Sequences of `length` tokens, `new` of them in this step, over units in no order; where their tokens go."""
    each = -(-length // 16)
    order = torch.randperm(num_sequences * each, device=DEVICE)
    rows = [[i * new, new, length - new, i * each, 0] for i in range(num_sequences)]
    positions = torch.arange(length - new, length, device=DEVICE).repeat(num_sequences)
    first_T = (torch.arange(num_sequences, device=DEVICE) * each).repeat_interleave(new)
    segments = attention.Segments(
        torch.tensor(rows, device=DEVICE),
        order,
        torch.arange(num_kv_heads, device=DEVICE),
        num_sequences if new == 1 else 0,
        length,
        new,
    )
    return segments, Writes(order[first_T + positions // 16], positions % 16)


def _gqa_pages(num_units: int) -> GqaPages:
    rows = _random(num_units * 8, LAYERS, 2, 16 * 128)[:, 1]
    shape = (num_units, 8, 16, 128)
    return GqaPages(rows[:, 0].view(shape), rows[:, 1].view(shape), rows[:, 0], rows[:, 1])


def _mla_pages(num_units: int) -> MlaPages:
    rows = _random(num_units, LAYERS, 16 * 576)[:, 1]
    return MlaPages(rows.view(num_units, 16, 576), rows)


def decode_cases(num_sequences: int = 64, length: int = 4096) -> Iterator[Case]:
    num_units = num_sequences * length // 16
    segments, _ = _segments(num_sequences, length, 1, 8)
    call = partial(attention.attend_gqa, _random(num_sequences, 32, 128), _gqa_pages(num_units), segments, 0.1)
    yield Case(f"decode gqa 32/8x128, {num_sequences} x {length}", call, num_sequences * length * 8 * 256 * 2)
    one = segments._replace(read_K=segments.read_K[:1])
    for heads in (16, 128):
        q = _random(num_sequences, heads, 576)
        yield Case(
            f"decode mla {heads}x576, {num_sequences} x {length}",
            partial(attention.attend_mla, q, _mla_pages(num_units), one, 512, 0.1),
            num_sequences * length * 576 * 2,
            2 * heads * (576 + 512) * num_sequences * length,
        )


def prefill_cases(num_sequences: int = 4, length: int = 4096, new: int = 2048) -> Iterator[Case]:
    num_units, num_tokens = num_sequences * length // 16, num_sequences * new
    seen = num_sequences * new * (2 * length - new + 1) // 2
    segments, writes = _segments(num_sequences, length, new, 8)
    gqa, mla = _gqa_pages(num_units), _mla_pages(num_units)
    call = partial(attention.attend_gqa, _random(num_tokens, 32, 128), gqa, segments, 0.1)
    yield Case(f"prefill gqa 32/8x128, {num_tokens} of {num_sequences} x {length}", call, 0, 4 * 32 * 128 * seen)
    one = segments._replace(read_K=segments.read_K[:1])
    call = partial(attention.attend_mla, _random(num_tokens, 16, 576), mla, one, 512, 0.1)
    yield Case(f"prefill mla 16x576, {num_tokens} of {num_sequences} x {length}", call, 0, 2 * 16 * 1088 * seen)
    new_tokens = attention.NewTokens(0, new, length - new, 0)
    expand, q = _random(16, 256, 512), _random(new, 16, 192)
    yield Case(
        f"prefill mla 16x192 expanded, {new} of {length}",
        partial(attention.attend_mla_expanded, q, mla, new_tokens, segments.units, expand, 128, 0.1),
        0,
        2 * 16 * (length * 512 * 256 + 320 * seen // num_sequences),
    )
    qkv, compressed = _random(num_tokens, 48, 128), _random(num_tokens, 576)
    angles = _random(num_tokens, 1, 64, dtype=FP32), _random(num_tokens, 1, 64, dtype=FP32)
    call = partial(rotary.rotate_and_write, qkv, 32, None, 0.0, angles, 128, False, gqa, writes)
    yield Case(f"rotary and cache write 48x128, {num_tokens}", call, 2 * qkv.nbytes + 2 * angles[0].nbytes)
    angles = _random(num_tokens, 1, 32, dtype=FP32), _random(num_tokens, 1, 32, dtype=FP32)
    written = partial(rotary.write_latents, compressed, _random(512), 1e-6, angles, True, mla, writes)
    yield Case(f"latent write 576, {num_tokens}", written, 2 * compressed.nbytes + 2 * angles[0].nbytes)


def row_cases(num_tokens: int = 8192, num_units: int = 2048) -> Iterator[Case]:
    x, add, weight = _random(num_tokens, 7168), _random(num_tokens, 7168), _random(7168)
    yield Case(f"norm 7168, {num_tokens}", partial(norm.rms_norm, x, weight, 1e-6), 2 * x.nbytes)
    call = partial(norm.add_rms_norm, x, add, weight, 1e-6)
    yield Case(f"add and norm 7168, {num_tokens}", call, 4 * x.nbytes)
    arena, chosen = _random(num_units, 61 * 16 * 576), torch.randperm(num_units, device=DEVICE)[: num_units // 4]
    dense = _random(len(chosen), 61 * 16 * 576)
    yield Case(f"gather {len(chosen)} units", partial(units.gather_units, arena, chosen), 2 * dense.nbytes)
    yield Case(f"scatter {len(chosen)} units", partial(units.scatter_units, arena, chosen, dense), 2 * dense.nbytes)


def expert_cases(num_tokens: int, *, reads_weights: bool, num_slots: int = 16) -> Iterator[Case]:
    """DeepSeek-V3's experts, `num_slots` of them; `reads_weights`: so few tokens that reading weights is the limit."""
    E, K, H, size = 256, 8, 7168, 2048
    rule = gate.GateRule(K, True, 8, 4, 2, True, 2.5)
    logits, bias = _random(num_tokens, E, dtype=FP32), _random(E, dtype=FP32)
    slots = gate.Slots(*(torch.arange(E, device=DEVICE).view(E, 1) for _ in range(2)))  # one copy: no threshold is read
    mix, load = torch.arange(num_tokens, device=DEVICE), torch.zeros(E, dtype=torch.int64, device=DEVICE)
    call: Callable[[], object] = partial(gate.gate, logits, bias, mix, slots, rule, load)
    yield Case(f"gate {K} of {E}, {num_tokens}", call, logits.nbytes + mix.nbytes + num_tokens * K * 20)
    x, weights = _random(num_tokens, H), torch.rand(num_tokens, K, device=DEVICE)
    chosen = torch.stack([torch.randperm(num_slots, device=DEVICE)[:K] for _ in range(num_tokens)])
    counts, pair_of, place_of = permute.order_by_slot(chosen, num_slots)
    P = num_tokens * K
    yield Case(f"order {P} pairs", partial(permute.order_by_slot, chosen, num_slots), P * 16)
    permuted = permute.permute(x, pair_of, K)
    moved = x.nbytes + permuted.nbytes
    yield Case(f"permute {P}x{H}", partial(permute.permute, x, pair_of, K), moved)
    yield Case(f"unpermute {P}x{H}", partial(permute.unpermute, permuted, place_of, weights), moved)
    gate_up = _random(num_slots, 2 * size, H)
    ops = 2 * P * H * 2 * size
    call = partial(grouped_gemm.grouped_gemm, x, gate_up, counts, P, pair_of, K)
    yield Case(f"gemm {P} pairs", call, gate_up.nbytes if reads_weights else 0, ops)
    q, factors = fp8.quantise(x)
    q_gate_up = gate_up.to(torch.float8_e4m3fn)
    blocks = torch.rand(num_slots, 2 * size // 128, H // 128, device=DEVICE)
    call = partial(grouped_gemm.grouped_gemm_fp8, q, factors, q_gate_up, blocks, counts, P, pair_of, K)
    yield Case(f"gemm fp8 {P} pairs", call, q_gate_up.nbytes if reads_weights else 0, ops)
    inner = _random(P, 2 * size)
    yield Case(f"silu and product {P}x{size}", partial(fp8.silu_mul, inner), inner.nbytes * 3 // 2)
    yield Case(f"silu, product, fp8 {P}x{size}", partial(fp8.silu_mul_quantise, inner), inner.nbytes * 5 // 4)
    yield Case(f"fp8 {num_tokens}x{H}", partial(fp8.quantise, x), x.nbytes * 3 // 2)


def cases() -> Iterator[Case]:
    yield from decode_cases()
    yield from prefill_cases()
    yield from row_cases()
    yield from expert_cases(32, reads_weights=True)
    yield from expert_cases(4096, reads_weights=False)


def run() -> list[dict[str, Any]]:
    """One row for each kernel, behind the card's own limits of the same run. Needs a CUDA device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    copied = 2 * source.nbytes / median_s(partial(torch.empty_like(source).copy_, source))
    multiplied = 2 * 8192**3 / median_s(partial(torch.mm, _random(8192, 8192), _random(8192, 8192)))
    rows: list[dict[str, Any]] = [
        {"kernel": "card: copy of 1 GiB", "gb_s": copied / 1e9, "of_card": 1.0},
        {"kernel": "card: product of 8192, bf16", "tflop_s": multiplied / 1e12, "of_card": 1.0},
    ]
    for case in cases():
        seconds = median_s(case.call)
        row: dict[str, Any] = {"kernel": case.name, "us": seconds * 1e6}
        if case.num_bytes:
            row["gb_s"] = case.num_bytes / seconds / 1e9
        if case.num_ops:
            row["tflop_s"] = case.num_ops / seconds / 1e12
        row["of_card"] = max(case.num_bytes / seconds / copied, case.num_ops / seconds / multiplied)
        rows.append(row)
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here: nothing was run")
    rows = run()
    if "--json" in sys.argv:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return
    sys.stdout.write(f"{torch.cuda.get_device_name()}\n{'kernel':44} {'us':>9} {'GB/s':>8} {'TFLOP/s':>8} of card\n")
    for row in rows:
        figures = "".join(
            f" {row[key]:{width}.1f}" if key in row else " " * (width + 1)
            for key, width in (("us", 9), ("gb_s", 8), ("tflop_s", 8))
        )
        sys.stdout.write(f"{row['kernel']:44}{figures} {row['of_card']:7.0%}\n")


if __name__ == "__main__":
    main()
