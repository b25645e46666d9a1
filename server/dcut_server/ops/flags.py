"""The operator's flags of `dcut-trt serve`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

_FIELDS = (
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "auth_token_file",
    "max_message_mib",
    "max_concurrent_streams",
    "log_format",
    "otlp_endpoint",
    "trace_sample_rate",
)


def add_operations_flags(parser: argparse.ArgumentParser) -> None:
    security = parser.add_argument_group("security and limits")
    security.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve TLS with this PEM certificate chain")
    security.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's unencrypted PEM key")
    security.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="ask callers for certificates of this CA")
    security.add_argument("--auth-token-file", type=Path, metavar="FILE", help="ask callers for one of these tokens")
    security.add_argument("--max-message-mib", type=int, default=4, metavar="N", help="largest request (default: 4)")
    security.add_argument("--max-concurrent-streams", type=int, metavar="N", help="calls at once on one connection")
    watching = parser.add_argument_group("logs and traces")
    watching.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="one line per finished request at level info"
    )
    watching.add_argument("--otlp-endpoint", metavar="URL", help="send traces to this OpenTelemetry collector (gRPC)")
    watching.add_argument(
        "--trace-sample-rate", type=float, default=0.0, metavar="R", help="share of traces with every step (default: 0)"
    )


def operations_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of ServeOptions that these flags set."""
    return {name: getattr(args, name) for name in _FIELDS}


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """How `dcut-trt client` reaches a server that asks for more than an address."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="speak TLS; PEM file of the server's authority")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="our own PEM certificate, for mutual TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its unencrypted PEM key")
    parser.add_argument("--token", default=os.environ.get("DCUT_TOKEN"), help="bearer token (default: $DCUT_TOKEN)")


def connection_options(args: argparse.Namespace) -> dict[str, Any]:
    """The part of DcutClient's arguments that these flags set."""
    from dcut_server.ops.channel import ClientTls  # noqa: PLC0415 - loads gRPC

    speaks_tls = args.tls_ca or args.tls_cert or args.tls_key
    tls = ClientTls(args.tls_ca, args.tls_cert, args.tls_key) if speaks_tls else None
    return {"tls": tls, "token": args.token or None}
