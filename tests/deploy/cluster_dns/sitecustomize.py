"""The cluster's DNS for processes that stand in for containers: names of services and pods, from a file of JSON."""

import json
import os
import socket
from pathlib import Path
from typing import Any

_real = socket.getaddrinfo


def _getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
    names = json.loads(Path(os.environ["CLUSTER_DNS"]).read_text())
    name = host.decode() if isinstance(host, bytes) else host
    if name not in names:
        return _real(host, port, *args, **kwargs)
    return [found for address in names[name] for found in _real(address, port, *args, **kwargs)]


if "CLUSTER_DNS" in os.environ:
    socket.getaddrinfo = _getaddrinfo
