"""Linear KV caches: which row of them holds which request, and the copies that keep decoding requests dense.

A call over B requests reads and writes cache rows 0 .. B - 1, so the requests that decode must be exactly there; a
prompt is filled wherever it stands, alone, through the address of its row.

  row:       0    1    2    3    4    5        a, b, c decode, x is filled, b has just finished
  before:    a    b    c    x    .    .        plan_moves([0, 2], [3], 6) = [2 -> 1]
  after:     a    c    .    x    .    .
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Copy cache row `source` over row `to`."""

    source: int
    to: int


def plan_moves(members: Sequence[int], others: Collection[int], rows: int) -> tuple[Move, ...]:
    """The fewest copies, in order, after which the members stand in rows 0 .. B - 1 and the others are unharmed.

    members, others: distinct rows that hold something; others may end up anywhere from B on.
    rows: of the cache; one more than members and others, unless nobody has to make way.
    """
    batch, taken = len(members), {*members, *others}
    arriving = sorted((row for row in members if row >= batch), reverse=True)
    holes = [row for row in range(batch) if row not in taken]
    in_the_way = sorted(row for row in others if row < batch)
    free = [row for row in range(rows - 1, batch - 1, -1) if row not in taken]  # the lowest is taken first
    moves = []
    while arriving:
        if holes:
            move = Move(arriving.pop(), holes.pop(0))
            free.append(move.source)
        else:
            move = Move(in_the_way.pop(), free.pop())
            holes.append(move.source)
        moves.append(move)
    return tuple(moves)


class SlotMap:
    """Cache row of every live request, by the slot that the scheduler gave it.

    Nobody says when a request ends: all decoding requests come to every decode call, so one that is missing has left;
    one that was being filled is kept until its slot is filled anew.
    """

    def __init__(self, slots: int) -> None:
        self.rows = slots + (slots > 1)  # the spare row lets two requests change places when every slot is taken
        self._row_of: dict[int, int] = {}
        self._filling: set[int] = set()

    def fill(self, slot: int, past: int) -> int:
        """The row where a prompt goes on after `past` tokens; 0 starts a new request in this slot."""
        if past == 0:
            self._row_of.pop(slot, None)
            self._filling.discard(slot)
            taken = set(self._row_of.values())
            decoding = len(self._row_of) - len(self._filling)
            free = [row for row in range(self.rows) if row not in taken]
            # Past the decoding requests it is in nobody's way, and right behind them it need not move to join them.
            self._row_of[slot] = next((row for row in free if row >= decoding), free[0])
            self._filling.add(slot)
        return self._row_of[slot]

    def row(self, slot: int) -> int:
        return self._row_of[slot]

    def gather(self, slots: Sequence[int]) -> tuple[Move, ...]:
        """Copies that bring all decoding requests, those of `slots`, to rows 0 .. B - 1; from now on they are there."""
        members = [self._row_of[slot] for slot in slots]
        self._filling.difference_update(slots)
        self._row_of = {slot: row for slot, row in self._row_of.items() if slot in self._filling or slot in slots}
        moves = plan_moves(members, [self._row_of[slot] for slot in self._filling], self.rows)
        holder = {row: slot for slot, row in self._row_of.items()}
        for move in moves:
            slot = holder.pop(move.source)
            holder[move.to] = slot
            self._row_of[slot] = move.to
        return moves
