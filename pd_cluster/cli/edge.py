"""The edge between commands and the shell: one line for an error, an exit code, and a clean end on Ctrl-C.

Exit codes: 0 done, 1 it failed, 2 the command or its configuration is wrong, 130 interrupted.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer

from pd_cluster import env
from pd_cluster.errors import ConfigError, ModelError, PdClusterError, RequestError
from pd_cluster.log import configure_logging

P = ParamSpec("P")
T = TypeVar("T")

USAGE_ERRORS = (ConfigError, ModelError, RequestError)


def guard(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors that a user can meet into one line on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except PdClusterError as error:
            if env.debug():
                raise
            fail(error.message, code=2 if isinstance(error, USAGE_ERRORS) else 1)
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except typer.Exit:
            raise
        except Exception as error:
            if env.debug():
                raise
            fail(f"internal error: {type(error).__name__}: {error}; PD_CLUSTER_DEBUG=1 shows where")

    return guarded


def quiet_logs() -> None:
    """For commands whose output is for people: of the log, only what went wrong."""
    configure_logging("debug" if env.debug() else "warning")


def fail(message: str, code: int = 1) -> None:
    """Say what happened and what to do, and end the command."""
    sys.stderr.write(f"pd-cluster: {message}\n")
    raise typer.Exit(code)


def leave() -> NoReturn:
    """End a server's process that has released everything: taking torch apart would take seconds of a pod's grace."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop. SIGINT and SIGTERM cancel it, so that whatever it holds is released; a second one is
    harder. Raises KeyboardInterrupt after the first."""
    import uvloop

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        told = False

        def terminate() -> None:  # not by way of SIGINT: who starts us in the background may have it ignored
            nonlocal told
            if told:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            told = True
            task.cancel()

        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await main
        except asyncio.CancelledError:
            if told:
                raise KeyboardInterrupt from None
            raise

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(guarded())
