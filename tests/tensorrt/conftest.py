"""The folders whose tiny models these tests compile."""

import sys
from pathlib import Path

for folder in ("parity", "unit"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
