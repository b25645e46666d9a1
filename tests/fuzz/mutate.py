"""Broken inputs from valid ones: bytes for every format, and structure where the format is JSON."""

from __future__ import annotations

import json
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**64, -(2**63), 1e308, "", "\x00", "../../etc/passwd", "é" * 40),
    *([], {}, [[]], [None], {"a": {"b": []}}, [1, "x"], [-1, 1], [2**40, 2**41]),
)


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """`count` broken copies, the same for the same seed."""
    random_ = random.Random(seed)
    parsed, prefix, rest = _json_part(data)
    made = []
    for index in range(count):
        if parsed is not None and index % 2:
            text = json.dumps(_odd(parsed, random_)).encode()
            made.append((len(text).to_bytes(8, "little") if prefix else b"") + text + rest)
        else:
            made.append(_bytes(data, random_))
    return made


def _json_part(data: bytes) -> tuple[Any, bool, bytes]:
    """The JSON in it, whether its length stands before it (safetensors), and what follows."""
    try:
        return json.loads(data), False, b""
    except ValueError:
        pass
    size = int.from_bytes(data[:8], "little")
    try:
        return json.loads(data[8 : 8 + size]), True, data[8 + size :]
    except ValueError:
        return None, False, b""


def _odd(value: Any, random_: random.Random) -> Any:
    """A copy with one place changed: walk down, and replace, drop, or double what is there."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        key = random_.choice(list(value))
        changed = dict(value)
        if random_.random() < 0.1:
            del changed[key]
        else:
            changed[key] = _odd(value[key], random_)
        return changed
    if isinstance(value, list) and value and random_.random() < 0.8:
        index = random_.randrange(len(value))
        if random_.random() < 0.2:
            return [*value[: index + 1], *value[index:]]
        return [*value[:index], _odd(value[index], random_), *value[index + 1 :]]
    if isinstance(value, int) and random_.random() < 0.5:
        return value + random_.choice((-1, 1, 8, 1 << 20, -value * 2))
    return random_.choice(ODD_VALUES)


def _bytes(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 8))):
        # Half of all changes fall into the first bytes, where headers are.
        place = random_.randrange(min(len(changed), 400) if random_.random() < 0.5 else len(changed)) if changed else 0
        match random_.randrange(5):
            case 0:
                changed[place : place + 1] = bytes([random_.randrange(256)])
            case 1:
                del changed[place : place + random_.choice((1, 4, 100))]
            case 2:
                changed[place:place] = random_.randbytes(random_.choice((1, 8)))
            case 3:
                changed[place : place + 8] = random_.choice((2**64 - 1, 2**63, 2**32, 0)).to_bytes(8, "little")
            case _:
                del changed[place:]
    return bytes(changed)
