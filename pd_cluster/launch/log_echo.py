"""What ranks write to their log files, on the stderr of the process that started them: a container has one log."""

import asyncio
import contextlib
import sys
from pathlib import Path

POLL_S = 0.25
CHUNK_BYTES = 1 << 20


class LogEcho:
    """Follows every `*.log` of a directory from its start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.copy()
            await asyncio.sleep(POLL_S)

    def copy(self) -> None:
        """Everything that is new, whole lines only."""
        for path in sorted(self._directory.glob("*.log")):
            offset = self._offsets.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
                end = len(data) if len(data) == CHUNK_BYTES else data.rfind(b"\n") + 1
                if end:
                    sys.stderr.write(data[:end].decode(errors="replace"))
                    self._offsets[path] = offset + end
        sys.stderr.flush()
