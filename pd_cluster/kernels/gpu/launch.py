"""One way to start a Triton kernel: on the device, in Triton's interpreter, or into a list for a compiler.

`recording` collects what the launchers would run instead of running it. They read shapes only, so tensors on torch's
meta device serve: what is compiled ahead of time is then exactly what the engine launches.
"""

# Triton compiles its functions from their source: they have no types
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1 before this package was imported: kernels run in numpy, on CPU tensors."""

_WIDENS = tl.constexpr(INTERPRETED)


class Launch(NamedTuple):
    """`args` in the order of the kernel's parameters; `constants` are its compile-time parameters."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


class Recorder:
    """Launches instead of running them. `backend` is that of the machine to compile for."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.launches: list[Launch] = []


_recorder: Recorder | None = None


@contextmanager
def recording(backend: str) -> Iterator[Recorder]:
    """Collect launches for `backend` ("cuda" or "hip"). One at a time."""
    global _recorder  # noqa: PLW0603
    assert _recorder is None
    _recorder = recorder = Recorder(backend)
    try:
        yield recorder
    finally:
        _recorder = None


def backend() -> str:
    """Whose machine code this process makes: "cuda" or "hip"."""
    if _recorder is not None:
        return _recorder.backend
    return "hip" if torch.version.hip else "cuda"


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
) -> None:
    """Run `kernel` over `grid`, which must not be empty."""
    assert all(size > 0 for size in grid), grid
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, args, constants, num_warps, num_stages))
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    assert device.type != "cpu" or INTERPRETED, "Triton kernels run on a GPU, or on a CPU with TRITON_INTERPRET=1"
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if device.type == "cpu":
        kernel[grid](*args, **constants, **options)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **constants, **options)


def power_of_two(size: int, at_least: int = 1) -> int:
    """The smallest power of two that is neither below `size` nor below `at_least`."""
    return max(at_least, 1 << max(0, size - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies: float32, the dtype of exact comparisons, is never rounded to tf32."""
    return "ieee" if dtype is torch.float32 else "tf32"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. The interpreter would multiply the bit patterns of bfloat16."""
    if _WIDENS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
