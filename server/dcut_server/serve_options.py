"""What an operator may set on the server around the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dcut_trt.errors import UnsupportedOption

MAX_PORT = 65535
MAX_MESSAGE_MIB = 1024
MAX_STREAMS = 2**31 - 1
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Raises UnsupportedOption naming option, value and limit.

    host, port: where to listen, port 0 takes a free one.  stats: print one line a second.
    grace_seconds: how long live streams may go on after a signal.
    openai_port, dashboard_port, metrics_port: also serve these, on the same host; None does not, 0 takes a free port.
    tls_cert, tls_key: PEM files; both, or neither.  tls_client_ca: callers need certificates too.
    auth_token_file: callers need one of its tokens.  max_message_mib: largest request.
    max_concurrent_streams: calls at once on one connection, None for no limit.
    log_format: "text" or "json".  otlp_endpoint: where traces go.
    trace_sample_rate: share of the traced requests, in [0, 1], whose spans show every step.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    grace_seconds: float = 30.0
    stats: bool = False
    openai_port: int | None = None
    dashboard_port: int | None = None
    metrics_port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_token_file: Path | None = None
    max_message_mib: int = 4
    max_concurrent_streams: int | None = None
    log_format: str = "text"
    otlp_endpoint: str | None = None
    trace_sample_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("port", "openai_port", "dashboard_port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= MAX_PORT:  # gRPC would take it modulo 2**16
                raise UnsupportedOption(f"{name}={port}: must be in [0, {MAX_PORT}]")
        if not (math.isfinite(self.grace_seconds) and self.grace_seconds >= 0):
            raise UnsupportedOption(f"grace_seconds={self.grace_seconds}: must be finite and at least 0")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise UnsupportedOption(f"max_message_mib={self.max_message_mib}: must be in [1, {MAX_MESSAGE_MIB}]")
        if self.max_concurrent_streams is not None and not 1 <= self.max_concurrent_streams <= MAX_STREAMS:
            raise UnsupportedOption(
                f"max_concurrent_streams={self.max_concurrent_streams}: must be in [1, {MAX_STREAMS}]"
            )
        if self.log_format not in LOG_FORMATS:
            raise UnsupportedOption(f"log_format={self.log_format!r}: must be one of {', '.join(LOG_FORMATS)}")
        if not 0 <= self.trace_sample_rate <= 1:
            raise UnsupportedOption(f"trace_sample_rate={self.trace_sample_rate}: must be in [0, 1]")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UnsupportedOption(f"tls_cert={self.tls_cert} tls_key={self.tls_key}: each needs the other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UnsupportedOption(f"tls_client_ca={self.tls_client_ca}: needs tls_cert and tls_key")
        if self.trace_sample_rate and self.otlp_endpoint is None:
            raise UnsupportedOption(f"trace_sample_rate={self.trace_sample_rate}: needs otlp_endpoint")
        if self.openai_port is not None and (self.tls_cert is not None or self.auth_token_file is not None):
            option = "tls_cert" if self.tls_cert is not None else "auth_token_file"
            raise UnsupportedOption(
                f"openai_port={self.openai_port}: cannot be combined with {option}; the gateway calls this server in "
                "plain text and without a token. Run a second server on 127.0.0.1 for it"
            )
