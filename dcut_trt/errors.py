"""Typed errors: one class per thing that a caller would do differently."""

from __future__ import annotations


class DcutError(Exception):
    """Base of every error this package raises for its callers or its environment."""


class InvalidRequest(DcutError):
    """A request field is out of range. The message names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field


class DuplicateRequest(DcutError):
    """The request id is live already."""


class QueueFull(DcutError):
    """The server is at capacity; try again later."""


class DeadlineExceeded(DcutError):
    """The request's deadline passed before it finished."""


class EngineUnavailable(DcutError):
    """The engine is warming up, draining or dead; no request can be admitted."""


class StepFailed(DcutError):
    """The engine failed while computing this request."""


class UnknownModel(DcutError):
    """A model directory, repo id, or file is not there or is not one we can read."""


class UnsupportedModel(DcutError):
    """The checkpoint is readable, but its architecture or an option of it is not supported."""


class DrafterMismatch(DcutError):
    """The drafter was trained for another target. The message names both identities."""


class BundleError(DcutError):
    """The bundle directory is missing, truncated, corrupt or of another schema."""


class EngineMismatch(DcutError):
    """The bundle was built for another runtime, version or device."""


class UnsupportedOption(DcutError):
    """An option is valid in general and not supported here; it is refused instead of ignored."""


class CostTableError(DcutError):
    """A cost table cannot be read, or holds values that no machine can have."""
