"""Set-up of the parity tests."""

import importlib.util
import sys

# With server/ on the path (an editable install) the folder server/triton is importable as a namespace package, and
# torch takes any importable `triton` for the compiler. None makes the import fail, as it should.
_spec = importlib.util.find_spec("triton")
if _spec is not None and _spec.origin is None:
    sys.modules["triton"] = None  # type: ignore[assignment]
