"""How calls reach the server: TLS, tokens and limits, read and checked before anything is loaded."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dcut_server.ops.auth import BearerTokenInterceptor, read_tokens
from dcut_server.ops.observers import CallContextInterceptor
from dcut_server.serve_options import ServeOptions
from dcut_trt.errors import UnsupportedOption

MIB = 1 << 20

GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # otherwise a second server on the same port starts, and takes half of the calls
    # A client whose machine vanished never says so: pings find out, and its slot is freed.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Transport:
    """The defaults are plain text, no token, and gRPC's own limits.

    credentials: of the server, for TLS.  tokens: one of them must come with every call, when there are any.
    """

    credentials: Any = None
    tokens: tuple[str, ...] = ()
    max_message_bytes: int = 4 * MIB
    max_concurrent_streams: int | None = None

    @classmethod
    def of(cls, options: ServeOptions) -> Transport:
        """Reads the files that the options name. Raises UnsupportedOption naming option, file and fault."""
        credentials: Any = None
        tokens: tuple[str, ...] = ()
        if options.tls_cert is not None and options.tls_key is not None:
            credentials = server_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
        if options.auth_token_file is not None:
            tokens = read_tokens(options.auth_token_file)
            if credentials is None and not is_loopback(options.host):
                raise UnsupportedOption(
                    f"auth_token_file={options.auth_token_file}: tokens would cross the network unencrypted on "
                    f"host={options.host}; add tls_cert and tls_key, or listen on 127.0.0.1"
                )
        return cls(credentials, tokens, options.max_message_mib * MIB, options.max_concurrent_streams)

    def new_server(self) -> Any:
        """A gRPC server with these limits that asks for these tokens; listen() opens its port."""
        interceptors: list[Any] = [CallContextInterceptor()]
        if self.tokens:
            interceptors.append(BearerTokenInterceptor(self.tokens))
        options = [*GRPC_OPTIONS, ("grpc.max_receive_message_length", self.max_message_bytes)]
        if self.max_concurrent_streams is not None:
            options.append(("grpc.max_concurrent_streams", self.max_concurrent_streams))
        return grpc.aio.server(options=options, interceptors=interceptors)

    def listen(self, server: Any, address: str) -> int:
        """The bound port. Raises RuntimeError as gRPC does."""
        if self.credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self.credentials))


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> Any:
    """Credentials from PEM files; with client_ca, callers need a certificate that it signed.

    Raises UnsupportedOption naming option, file and fault.
    """
    pair = read_pair(cert, key)
    if client_ca is None:
        return grpc.ssl_server_credentials([pair])
    roots = read_authorities("tls_client_ca", client_ca)
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=True)


def read_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Key and certificate chain. Raises UnsupportedOption; gRPC itself would only fail the handshakes later."""
    pair = (_read("tls_key", key), _read("tls_cert", cert))
    try:
        # An encrypted key fails with this password; without one, OpenSSL would ask a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UnsupportedOption(f"tls_cert={cert} tls_key={key}: {_fault(error)}") from error
    return pair


def read_authorities(option: str, path: Path) -> bytes:
    """PEM certificates of authorities. Raises UnsupportedOption naming the option."""
    text = _read(option, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise UnsupportedOption(f"{option}={path}: holds no PEM certificate ({_fault(error)})") from error
    return text


def is_loopback(host: str) -> bool:
    """Whether every address of this host name is on the machine itself."""
    try:
        addresses: Sequence[Any] = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(str(address[4][0]).startswith("127.") or address[4][0] == "::1" for address in addresses)


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnsupportedOption(f"{option}={path}: {error.strerror}") from error


def _fault(error: Exception) -> str:
    match getattr(error, "reason", None):
        case "KEY_VALUES_MISMATCH":
            return "the key does not belong to the certificate"
        case "NO_START_LINE" | None:
            return "not a PEM certificate and its unencrypted PEM key"
        case reason:
            return str(reason).lower().replace("_", " ")
