"""One log line per finished request, and log lines as JSON. Neither ever holds prompt or output text."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dcut_server.ops.observers import REQUEST_ID
from dcut_server.status import status_of
from dcut_trt.types import Request, RequestTimes, StepEvent

_log = logging.getLogger("dcut_server.requests")


class RequestLog:
    """Observes requests (ops/observers.py); the lines are of level INFO."""

    def refused(self, error: Exception) -> None:
        pass

    def submitted(self, request: Request) -> None:
        REQUEST_ID.set(request.request_id)  # log lines of the rest of this call tell it

    def published(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            if event.final and _log.isEnabledFor(logging.INFO):
                fields = request_fields(event)
                text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
                _log.info("request finished %s", text, extra={"fields": {"message": "request finished", **fields}})


def request_fields(event: StepEvent) -> dict[str, Any]:
    """What a final event tells about its request; times in milliseconds, None for what did not happen."""
    times, usage = event.times, event.usage
    code = status_of(event.error)[0].name if event.error is not None else None
    return {
        "request_id": event.request_id,
        "finish": event.finish.value if event.finish is not None else "error",
        "error": code,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "steps": usage.steps,
        "drafted": usage.drafted,
        "verified": usage.verified,
        "accepted": usage.accepted,
        "queue_ms": _between(times, "admitted"),
        "ttft_ms": _between(times, "first_token"),
        "total_ms": _between(times, "finished"),
    }


def _between(times: RequestTimes | None, until: str) -> float | None:
    """Milliseconds from the submission to a moment of a request."""
    moment: float | None = getattr(times, until, None)
    return None if times is None or moment is None else round((moment - times.submitted) * 1e3, 3)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request_id when the line is about one, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The command line's usual format, with the request id of lines that are about one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        request_id = REQUEST_ID.get()
        return f"{text} request_id={request_id}" if request_id and not hasattr(record, "fields") else text


def format_logs(kind: str) -> None:
    """Give the handlers of the root logger this format: "text" or "json"."""
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if kind == "json" else text)
