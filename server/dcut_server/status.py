"""Which gRPC code each error class becomes. The only such table."""

from __future__ import annotations

import logging

import grpc

from dcut_trt import errors

_log = logging.getLogger(__name__)

CODES: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedOption: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StepFailed: grpc.StatusCode.INTERNAL,
}
UNEXPECTED = "internal error; the server's log has the details"


def code_of(error: Exception) -> grpc.StatusCode:
    """INTERNAL for what is not in the table."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Code and message for the caller. What is not in the table is logged here and told as INTERNAL without details."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind], str(error)
    _log.error("unexpected error while serving a call", exc_info=error)
    return grpc.StatusCode.INTERNAL, UNEXPECTED
