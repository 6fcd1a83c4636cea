"""The SDK's examples in the README, run as they stand against a router on another port."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from harness import LocalCluster, config_of

README = Path(__file__).parents[2] / "README.md"


async def test_the_sdk_examples_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    examples = [code for code in blocks if "pd_cluster.client" in code]
    assert len(examples) == 2
    async with LocalCluster(config_of("demo"), http=True) as cluster:
        for code in examples:
            script = code.replace("127.0.0.1:8001", f"127.0.0.1:{cluster.router.grpc_port}")
            assert script != code
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, errors = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, errors.decode()
            assert len(out.decode().split()) > 20
