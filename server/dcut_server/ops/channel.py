"""How a client reaches a server: TLS with our own authority, a certificate of the client's, a bearer token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dcut_server.ops.transport import is_loopback, read_authorities, read_pair
from dcut_trt.errors import UnsupportedOption


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. ca: who signed the server's certificate, None for gRPC's list.  cert, key: ours, for mutual TLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> Any:
        """Raises UnsupportedOption naming option, file and fault."""
        if (self.cert is None) != (self.key is None):
            raise UnsupportedOption(f"tls_cert={self.cert} tls_key={self.key}: each needs the other")
        roots = None if self.ca is None else read_authorities("tls_ca", self.ca)
        cert, key = None, None
        if self.cert is not None and self.key is not None:
            key, cert = read_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=cert)


def open_channel(address: str, options: Sequence[tuple[str, Any]], tls: ClientTls | None, token: str | None) -> Any:
    """A channel to a server. Raises UnsupportedOption for a token that would leave this machine unencrypted."""
    if tls is not None:
        return grpc.aio.secure_channel(address, tls.credentials(), options=list(options))
    host = address.rpartition(":")[0].strip("[]")
    if token is not None and not is_loopback(host):
        raise UnsupportedOption(f"token: would reach {address} unencrypted; add tls_ca")
    return grpc.aio.insecure_channel(address, options=list(options))


def with_token(stub: Any, token: str | None) -> Any:
    """The same stub, whose calls carry the token."""
    if token is not None:
        metadata = (("authorization", f"Bearer {token}"),)
        for name, method in list(vars(stub).items()):
            setattr(stub, name, functools.partial(method, metadata=metadata))
    return stub
