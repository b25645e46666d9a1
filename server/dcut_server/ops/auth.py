"""Bearer tokens: who may call anything but the health service."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from dcut_trt.errors import UnsupportedOption

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 4096

_SCHEME = "bearer "
_OPEN_METHODS = f"/{health.SERVICE_NAME}/"


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens of a file, one a line; empty lines do not count.

    Raises UnsupportedOption, without telling a token, for an unreadable file and for a line that is no token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UnsupportedOption(f"auth_token_file={path}: {reason}") from error
    tokens = tuple(line.strip() for line in lines)
    for number, token in enumerate(tokens, 1):
        printable = token.isascii() and token.isprintable() and " " not in token
        if token and not (printable and MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH):
            raise UnsupportedOption(
                f"auth_token_file={path}: line {number} is no token; a token is {MIN_TOKEN_LENGTH} to "
                f"{MAX_TOKEN_LENGTH} visible ASCII characters"
            )
    if not any(tokens):
        raise UnsupportedOption(f"auth_token_file={path}: holds no token; one a line is needed")
    return tuple(token for token in tokens if token)


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends every call without one of these tokens with UNAUTHENTICATED; health checks need none."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(_OPEN_METHODS):
            return await continuation(details)
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if not given:
            return _refuse(await continuation(details), "authorization metadata is missing; send 'Bearer TOKEN'")
        if len(given) > 1 or not self._accepts(given[0]):
            return _refuse(await continuation(details), "authorization metadata holds no valid bearer token")
        return await continuation(details)

    def _accepts(self, authorization: str) -> bool:
        """Takes as long for every wrong token: digests are compared whole, and with all of them."""
        scheme, token = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == _SCHEME and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _refuse(handler: Any, details: str) -> Any:
    """A handler of the same kind that only ends the call; None, an unknown method, stays unknown."""
    if handler is None:
        return None

    async def abort(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, details)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[handler.request_streaming, handler.response_streaming]
    return make(abort, handler.request_deserializer, handler.response_serializer)
