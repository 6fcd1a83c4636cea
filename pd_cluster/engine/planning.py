"""The process that plans placements for an engine: started when first asked, ended with its engine.

Planning is Python and takes milliseconds to seconds, during which it would take the interpreter from the thread that
computes steps. The process reads questions on stdin, each a length and msgpack, and answers in the same form on stdout.
An engine that is killed closes the pipes: its planning process then ends at its next read or write, without a word.
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from typing import BinaryIO

import msgspec

from pd_cluster.errors import EngineError
from pd_cluster.parallel.planner import Answer, Question, answer

TIMEOUT_S = 60.0
NICENESS = 10

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode
_decode_question = msgspec.msgpack.Decoder(Question).decode


class Planner:
    """Asked on an event loop, one question at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    async def ask(self, question: Question) -> Answer:
        """Raises EngineError when the process died or took too long; the next question starts another."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.to_thread(self._ask, question)
        except TimeoutError as error:
            self.close()
            raise EngineError(f"planning a placement took more than {TIMEOUT_S:g} s") from error

    async def ask_here(self, question: Question) -> Answer:
        """Without another process: while no step runs there is nobody to disturb."""
        return await asyncio.to_thread(answer, question)

    def _ask(self, question: Question) -> Answer:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pd_cluster.engine.planning"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            body = _encode(question)
            try:
                process.stdin.write(len(body).to_bytes(8, "big") + body)
                process.stdin.flush()
                size = process.stdout.read(8)
                return _decode(process.stdout.read(int.from_bytes(size, "big")))
            except (OSError, msgspec.DecodeError) as error:
                self.close()
                raise EngineError(f"the planning process failed: {error}") from error

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # it flushes what could not be written before
                        pipe.close()


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more."""
    while size := questions.read(8):
        body = _encode(answer(_decode_question(questions.read(int.from_bytes(size, "big")))))
        answers.write(len(body).to_bytes(8, "big") + body)
        answers.flush()


def main() -> None:
    """Answer questions on stdin until there are no more, or nobody is left who asks."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an answer that nobody takes ends the process
    os.nice(NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except msgspec.DecodeError:
        asking = select.poll()
        asking.register(sys.stdin, 0)
        if not asking.poll(0):  # else its end was cut off with whoever asked
            raise


if __name__ == "__main__":
    main()
