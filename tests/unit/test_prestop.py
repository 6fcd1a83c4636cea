"""The door for preStop hooks: it drains, it says how that went, and only its own user may knock."""

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.launch.prestop import PrestopDoor, ask_to_drain


async def ask(path: Path, timeout_s: float = 5.0) -> bool:
    return await asyncio.to_thread(ask_to_drain, path, timeout_s)


async def test_the_hook_hears_whether_all_was_finished(tmp_path: Path) -> None:
    given: list[float] = []
    answers = [True, False]

    async def drain(timeout_s: float) -> bool:
        given.append(timeout_s)
        return answers.pop(0)

    path = tmp_path / "door"
    async with PrestopDoor(path, drain):
        assert await ask(path, 7.5) is True
        assert await ask(path, 0.25) is False
    assert given == [7.5, 0.25]
    assert not path.exists()


async def test_nobody_else_may_knock(tmp_path: Path) -> None:
    async def drain(timeout_s: float) -> bool:
        return True

    path = tmp_path / "door"
    async with PrestopDoor(path, drain):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_socket_that_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    async def drain(timeout_s: float) -> bool:
        return True

    path = tmp_path / "door"
    path.write_text("left over")
    async with PrestopDoor(path, drain):
        assert await ask(path)


async def test_the_latest_of_several_has_the_door_and_an_earlier_one_leaves_it_alone(tmp_path: Path) -> None:
    async def drain(timeout_s: float) -> bool:
        return timeout_s == 1.0

    async def drain_later(timeout_s: float) -> bool:
        return timeout_s == 2.0

    path = tmp_path / "door"
    earlier, later = PrestopDoor(path, drain), PrestopDoor(path, drain_later)
    async with later:
        async with earlier:
            assert await ask(path, 1.0)
        assert not path.exists()
    async with earlier:
        await later.__aenter__()
        assert await ask(path, 2.0)
    assert await ask(path, 2.0)
    await later.__aexit__(None, None, None)
    assert not path.exists()


OPEN_AND_CLOSE = """
import asyncio, sys
from pathlib import Path
from pd_cluster.launch.prestop import PrestopDoor
async def drain(timeout_s): return True
async def main():
    for _ in range(2000):
        async with PrestopDoor(Path(sys.argv[1]), drain): await asyncio.sleep(0)
asyncio.run(main())
"""


@pytest.mark.processes
def test_processes_that_open_the_door_together_are_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "door"
    running = [subprocess.Popen([sys.executable, "-c", OPEN_AND_CLOSE, str(path)]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]


@pytest.mark.parametrize("line", [b"drain\n", b"drain soon\n", b"stop 1\n", b"\x80\x04K\x01.\n", b"x" * 5000 + b"\n"])
async def test_what_is_no_request_drains_nothing(tmp_path: Path, line: bytes) -> None:
    async def drain(timeout_s: float) -> bool:
        raise AssertionError("it drained")

    path = tmp_path / "door"
    async with PrestopDoor(path, drain):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        assert await reader.read() in (b"unknown\n", b"")
        writer.close()


async def test_a_missing_process_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no process of ours answers at .*/door"):
        await ask(tmp_path / "door")


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    async def drain(timeout_s: float) -> bool:
        return True

    with pytest.raises(ConfigError, match="may have 99 bytes"):
        async with PrestopDoor(tmp_path / ("d" * 120), drain):
            pass
