"""A launcher starts rank processes somewhere and lets the supervisor watch and end them.

Two stand behind this contract: `process` (children of this process) and `ray` (actors of a Ray cluster). One thread
starts ranks and closes the launcher, another one polls and ends them; a handle may be polled by both.
"""

from typing import Protocol

from pd_cluster.config import LaunchSection
from pd_cluster.errors import ConfigError
from pd_cluster.launch.spec import RankSpec

NODE_LOST = -1000
"""The exit code of a rank that was lost with its node, which no request can be blamed for."""


class RankHandle(Protocol):
    """One rank process, from its start to its end."""

    @property
    def spec(self) -> RankSpec:
        """What it was started with, as the launcher completed it."""

    @property
    def pid(self) -> int | None:
        """Its process id on its host; None while unknown."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or NODE_LOST; None while it lives. After that no instruction of it runs
        any more.
        """

    def terminate(self) -> None:
        """Ask it to end by itself."""

    def kill(self) -> None:
        """End it now."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; None when it still lives after `timeout_s`."""

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines it wrote to stdout and stderr."""


class Launcher(Protocol):
    @property
    def host(self) -> str:
        """The address of this process as ranks reach it."""

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        """Start ranks of one or more engines, all or none.

        Raises Unavailable when there is no room now, ConfigError when it can never work.
        """

    def close(self) -> None:
        """Release everything; ranks still alive are killed."""


def create_launcher(section: LaunchSection) -> Launcher:
    """The launcher a configuration names. Blocks while Ray starts. Raises ConfigError or Unavailable."""
    if section.launcher == "process":
        from pd_cluster.launch.process import ProcessLauncher

        return ProcessLauncher()
    try:
        from pd_cluster.launch.ray import RayLauncher
    except ImportError as error:
        raise ConfigError(
            f"the ray launcher cannot import Ray ({error}): pip install 'ray[serve]', or use `--launcher process`"
        ) from error
    return RayLauncher(section.ray_address)
