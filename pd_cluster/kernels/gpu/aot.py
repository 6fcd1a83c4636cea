"""Compile every kernel ahead of time, on a machine without a GPU: `python -m pd_cluster.kernels.gpu.aot [TARGET ...]`.

Each launcher is called with tensors on torch's meta device, shaped like DeepSeek-V3 and Llama-3-8B; what it would have
launched is compiled for the targets, as Triton would specialise it, and asked for its registers, shared memory and
spills. Exits with 1 when a kernel spills on sm_90 or does not fit a target's shared memory.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pd_cluster.kernels.gpu.launch import INTERPRETED, Launch, recording
from pd_cluster.kernels.gpu.shapes import FURTHER, SHAPES

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes that one program may have."""

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


class Resources(NamedTuple):
    """What one compiled kernel needs. `registers` are per thread, the rest bytes: `spilled` per thread."""

    kernel: str
    target: str
    num_warps: int
    registers: int
    shared: int
    spilled: int


def launches(target: str, *, few: bool = False) -> Iterator[tuple[str, Launch]]:
    """Every launch of every shape, under a name; a launcher that starts two kernels gives two. `few`: one form of
    each kernel.
    """
    for name, call in (SHAPES if few else SHAPES | FURTHER).items():
        with recording(TARGETS[target].backend) as recorder:
            call()
        for each in recorder.launches:
            yield f"{each.kernel.__name__.lstrip('_')} {name}", each


def _source(launch: Launch) -> ASTSource:
    """As Triton specialises at a call: ones are constants, multiples of 16 are known to be."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = launch.kernel.arg_names
    for index, (name, parameter) in enumerate(zip(names, launch.kernel.params, strict=True)):
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[name] = launch.constants[name]
            continue
        value = launch.args[index]
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_for(target: str, name: str, launch: Launch) -> Resources:
    """Compile one launch for one of TARGETS. Raises Triton's errors."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(_source(launch), target=TARGETS[target], options=options)
    registers, spilled = _of_hsaco(compiled.asm) if target == "gfx942" else _of_cubin(compiled.asm["cubin"])
    return Resources(name, target, launch.num_warps, registers, compiled.metadata.shared, spilled)


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    # local memory is where spilled registers go, and these kernels have nothing else to put there
    spilled = sum(_number(rf"\b{place}:(\d+)", printed) for place in ("STACK", "LOCAL"))
    return _number(r"\bREG:(\d+)", printed), spilled


def _of_hsaco(asm: dict[str, Any]) -> tuple[int, int]:
    text = asm["amdgcn"]
    registers = _number(r"\.vgpr_count:\s*(\d+)", text)
    return registers, _number(r"\.private_segment_fixed_size:\s*(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text[:2000]}"
    return int(found[1])


def compile_all(targets: list[str], on_done: Callable[[Resources], None], *, few: bool) -> list[Resources]:
    results = []
    for target in targets:
        for name, launch in launches(target, few=few):
            resources = compile_for(target, name, launch)
            on_done(resources)
            results.append(resources)
    return results


def complaints(results: list[Resources]) -> list[str]:
    """What may not be: spills on sm_90, more shared memory than a target has."""
    said = [f"{r.kernel} spills {r.spilled} bytes on {r.target}" for r in results if r.target == "sm_90" and r.spilled]
    return said + [
        f"{r.kernel} needs {r.shared} bytes of shared memory, {r.target} has {SHARED_LIMIT[r.target]}"
        for r in results
        if r.shared > SHARED_LIMIT[r.target]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every GPU kernel and say what it needs.")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--few", action="store_true", help="one form of each kernel")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args()
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled")

    def show(r: Resources) -> None:
        if not options.json:
            line = f"{r.kernel:34} {r.target:7} {r.num_warps:5} {r.registers:9} {r.shared:8} {r.spilled:8}"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    if not options.json:
        sys.stdout.write(f"{'kernel':34} {'target':7} warps registers   shared  spilled\n")
    results = compile_all(options.targets or list(TARGETS), show, few=options.few)
    if options.json:
        sys.stdout.write(msgspec.json.encode([r._asdict() for r in results]).decode() + "\n")
    sys.exit("\n".join(complaints(results)) or 0)


if __name__ == "__main__":
    main()
