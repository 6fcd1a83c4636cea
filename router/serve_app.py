"""The router as a Ray Serve application, in front of pools that are actors of the same Ray cluster.

    serve run router.serve_app:build model=DIR
    serve run router.serve_app:build config=cluster.toml num_replicas=2 decode.data_parallel=2
    serve deploy deploy/ray/serve.yaml

This module is only the door that users name; what stands behind it, and all arguments: `pd_cluster.launch.serve` and
`pd_cluster.launch.serve_options`.
"""

from typing import TYPE_CHECKING, Any

from pd_cluster.launch.serve import application
from pd_cluster.launch.serve_options import read_args

if TYPE_CHECKING:
    from ray import serve


def build(args: dict[str, Any]) -> "serve.Application":
    """The application for `args`. Raises ConfigError that names the argument."""
    config, options = read_args(args)
    return application(config, options)
