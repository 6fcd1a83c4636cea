"""Generates the stubs in pd_cluster/pb from proto/: `python -m pd_cluster.rpc.generate [--check]`.

The stubs are committed, so that nobody needs protoc to run a cluster; `--check` fails when they differ from proto/.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VIRTUAL = "pd_cluster/pb"  # proto/pd_cluster is compiled as if it lay here, so that stubs import each other


def generate(out: Path) -> list[Path]:
    """Compile every .proto file into `out`; returns what was written, relative to `out`. Raises RuntimeError."""
    sources = sorted((ROOT / "proto" / "pd_cluster").rglob("*.proto"))
    names = [f"{VIRTUAL}/{path.relative_to(ROOT / 'proto' / 'pd_cluster')}" for path in sources]
    scripts = Path(sysconfig.get_path("scripts"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{VIRTUAL}={ROOT / 'proto' / 'pd_cluster'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *names,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*.py*"))


def stale(fresh: Path, written: list[Path]) -> list[str]:
    """What in pd_cluster/pb is missing, left over or different from `fresh`."""
    present = {p.relative_to(ROOT) for p in (ROOT / VIRTUAL).rglob("*_pb2*.py*") if "__pycache__" not in p.parts}
    problems = [f"{path} is left over" for path in sorted(present - set(written))]
    for path in written:
        if path not in present:
            problems.append(f"{path} is missing")
        elif (ROOT / path).read_bytes() != (fresh / path).read_bytes():
            problems.append(f"{path} differs from proto/")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the gRPC stubs from proto/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the committed stubs are stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        try:
            written = generate(fresh)
        except RuntimeError as error:
            print(f"cannot generate the stubs: {error}; install the dev extra: pip install -e .[dev]", file=sys.stderr)
            return 1
        problems = stale(fresh, written)
        if check:
            for problem in problems:
                print(f"{problem}: run python -m pd_cluster.rpc.generate", file=sys.stderr)
            return 1 if problems else 0
        for path in written:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fresh / path, ROOT / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
