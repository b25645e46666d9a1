"""The command line of the Dynamo worker."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcut_server.ops.channel import ClientTls
from dcut_server.ops.flags import add_connection_flags, connection_options


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """address: of a dcut-trt server.  bundle: what it serves.  card: where the model card goes.

    served_name: what callers say as "model".  grace_seconds: for live streams at SIGTERM.
    tls, token: how to reach the server.  The rest names the worker and its surroundings as Dynamo does.
    """

    address: str
    bundle: Path
    card: Path | None
    served_name: str | None
    grace_seconds: float
    tls: ClientTls | None
    token: str | None
    namespace: str
    component: str
    endpoint: str
    discovery_backend: str
    request_plane: str
    event_plane: str | None


def parse_worker_options(argv: Sequence[str] | None = None) -> WorkerOptions:
    """Dynamo's own settings default to the environment variables that its frontend reads."""
    parser = argparse.ArgumentParser(
        prog="python -m dcut_server.dynamo",
        description="a Dynamo worker that answers from one dcut-trt server; it lives as long as that server serves",
    )
    environment = os.environ.get
    parser.add_argument("bundle", type=Path, metavar="DIR", help="the bundle that the server serves")
    parser.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="default: 127.0.0.1:50051")
    parser.add_argument("--card", type=Path, metavar="DIR", help="write the model card here (default: in the cache)")
    parser.add_argument("--served-name", metavar="NAME", help="default: the target's identity")
    parser.add_argument("--grace-seconds", type=float, default=30.0, metavar="S", help="for live streams at SIGTERM")
    add_connection_flags(parser)
    parser.add_argument("--namespace", default=environment("DYN_NAMESPACE", "dynamo"), help="default: dynamo")
    parser.add_argument("--component", default=environment("DYN_COMPONENT", "backend"), help="default: backend")
    parser.add_argument("--endpoint", default=environment("DYN_ENDPOINT", "generate"), help="default: generate")
    parser.add_argument("--discovery-backend", default=environment("DYN_DISCOVERY_BACKEND", "etcd"), metavar="NAME")
    parser.add_argument("--request-plane", default=environment("DYN_REQUEST_PLANE", "tcp"), metavar="NAME")
    parser.add_argument("--event-plane", default=environment("DYN_EVENT_PLANE"), metavar="NAME")
    args = parser.parse_args(argv)
    own = {name: value for name, value in vars(args).items() if name in WorkerOptions.__slots__}
    return WorkerOptions(**own | connection_options(args))
