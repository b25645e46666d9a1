"""The table from error classes to gRPC codes."""

from __future__ import annotations

import inspect
import logging

import grpc
import pytest

from dcut_server.status import CODES, UNEXPECTED, status_of
from dcut_trt import errors

# Raised while a server starts or a bundle is built, never while it answers a call.
START_UP = {
    errors.DcutError,
    errors.UnknownModel,
    errors.UnsupportedModel,
    errors.DrafterMismatch,
    errors.BundleError,
    errors.EngineMismatch,
    errors.CostTableError,
}


def test_every_error_class_is_either_in_the_table_or_of_start_up() -> None:
    classes = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DcutError)}
    assert classes == set(CODES) | START_UP


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_a_typed_error_keeps_its_message(kind: type[Exception], code: grpc.StatusCode) -> None:
    error = errors.InvalidRequest("top_k", -1, "must be >= 0") if kind is errors.InvalidRequest else kind("why")
    assert status_of(error) == (code, str(error))


def test_a_subclass_has_its_parents_code() -> None:
    class Special(errors.QueueFull):
        pass

    assert status_of(Special("full"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("error", [ValueError("secret /path"), AssertionError("secret"), errors.BundleError("secret")])
def test_anything_else_is_internal_logged_and_not_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert status_of(error) == (grpc.StatusCode.INTERNAL, UNEXPECTED)
    assert "secret" in caplog.text
