"""python -m dcut_server.dynamo BUNDLE --address HOST:PORT."""

from __future__ import annotations

import sys

from dcut_trt.errors import DcutError


def main() -> int:
    """Serve until a signal; 2 with one line on stderr for an error that the caller can act on."""
    try:
        from dynamo.common.backend.run import run  # noqa: PLC0415
    except ImportError:
        print("dcut_server.dynamo: ai-dynamo is not installed here; see docs/scale-out.md", file=sys.stderr)
        return 2
    from dcut_server.dynamo.engine import DcutEngine  # noqa: PLC0415 - needs Dynamo

    try:
        run(DcutEngine)
    except DcutError as error:
        print(f"dcut_server.dynamo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
