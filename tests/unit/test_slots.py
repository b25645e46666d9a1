"""Rows of linear KV caches: nobody's content is lost, decoders are dense, and no plan has fewer copies."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.kv.slots import Move, SlotMap, plan_moves

Rows = tuple[str, ...]


def fewest(members: tuple[int, ...], others: tuple[int, ...], rows: int) -> int:
    """By trying every copy after every other, over what each row holds."""
    holds = ["."] * rows
    for name, row in enumerate((*members, *others)):
        holds[row] = chr(ord("a") + name) if row in members else chr(ord("A") + name)
    start, names = tuple(holds), {*holds} - {"."}
    batch = len(members)
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        state, count = queue.popleft()
        if all(name.islower() for name in state[:batch]) and len({*state[:batch]}) == batch and names <= {*state}:
            return count
        for source, to in itertools.permutations(range(rows), 2):
            after = list(state)
            after[to] = state[source]
            if names <= {*after} and (reached := tuple(after)) not in seen:
                seen.add(reached)
                queue.append((reached, count + 1))
    raise AssertionError("no way")


def carried_out(moves: tuple[Move, ...], holds: dict[int, str]) -> dict[int, str]:
    rows = dict(holds)
    for move in moves:
        rows[move.to] = rows[move.source]
    return rows


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_moves_are_right_and_the_fewest(rows: int) -> None:
    for owners in itertools.product("mo.", repeat=rows):
        members = tuple(row for row, owner in enumerate(owners) if owner == "m")
        others = tuple(row for row, owner in enumerate(owners) if owner == "o")
        if not members or len(members) + len(others) == rows:
            continue
        moves = plan_moves(members, others, rows)
        holds = {row: f"{owners[row]}{row}" for row in (*members, *others)}
        after = carried_out(moves, holds)
        batch = len(members)
        assert {after[row] for row in range(batch)} == {f"m{row}" for row in members}
        # What an other was copied from may be overwritten later; its newest place is what counts.
        assert {f"o{row}" for row in others} <= {name for row, name in after.items() if row >= batch}
        assert len(moves) == fewest(members, others, rows), owners


def test_a_batch_that_fills_every_row_needs_no_spare() -> None:
    assert plan_moves([2, 0, 1], [], 3) == ()
    assert plan_moves([0], [], 1) == ()


def test_the_drawing_of_the_module() -> None:
    assert plan_moves([0, 2], [3], 6) == (Move(2, 1),)


class Model:
    """Requests that come, are filled in parts, decode, leave or are cancelled; rows hold request and length."""

    def __init__(self, slots: int) -> None:
        self.map = SlotMap(slots)
        self.rows: list[tuple[int, int] | None] = [None] * self.map.rows
        self.free = list(range(slots))
        self.live: dict[int, tuple[int, int, bool]] = {}  # request -> slot, length, decodes
        self.born = 0

    def come(self) -> None:
        if self.free:
            slot = self.free.pop()
            self.live[self.born] = slot, 0, False
            self.born += 1
            self.fill(self.born - 1)

    def fill(self, request: int) -> None:
        slot, length, _ = self.live[request]
        row = self.map.fill(slot, length)
        assert length == 0 or self.rows[row] == (request, length)
        owners = {holder[0] for place, holder in enumerate(self.rows) if holder and place != row}
        assert self.live.keys() - {request} <= owners, "a prompt was filled over a live request"
        self.rows[row] = request, length + 1
        self.live[request] = slot, length + 1, length >= 1

    def leave(self, request: int) -> None:
        self.free.append(self.live.pop(request)[0])

    def decode(self) -> int:
        members = [request for request, (_, _, decodes) in self.live.items() if decodes]
        slots = [self.live[request][0] for request in members]
        if not members:
            return 0
        moves = self.map.gather(slots)
        for move in moves:
            self.rows[move.to] = self.rows[move.source]
        assert sorted(self.map.row(slot) for slot in slots) == list(range(len(members)))
        for request, slot in zip(members, slots, strict=True):
            assert self.rows[self.map.row(slot)] == (request, self.live[request][1])
            self.live[request] = slot, self.live[request][1] + 1, True
            self.rows[self.map.row(slot)] = request, self.live[request][1]
        return len(moves)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("cfld"), st.integers(0, 5)), max_size=80))
def test_every_request_keeps_its_rows(slots: int, events: list[tuple[str, int]]) -> None:
    model = Model(slots)
    for event, pick in events:
        filling = [request for request, (_, _, decodes) in model.live.items() if not decodes]
        if event == "c":
            model.come()
        elif event == "f" and filling:
            model.fill(filling[pick % len(filling)])
        elif event == "l" and model.live:
            model.leave(list(model.live)[pick % len(model.live)])
        elif event == "d":
            model.decode()


def test_requests_that_join_in_turn_never_move() -> None:
    model = Model(8)
    for _ in range(8):
        model.come()
        model.fill(model.born - 1)
        assert model.decode() == 0


def test_one_that_leaves_costs_one_copy_at_most() -> None:
    model = Model(8)
    for _ in range(8):
        model.come()
        model.fill(model.born - 1)
    model.decode()
    for request in (3, 0, 7, 5):
        last = model.map.row(model.live[request][0]) == len(model.live) - 1
        model.leave(request)
        assert model.decode() == (0 if last else 1)


def test_one_slot_has_no_spare_row() -> None:
    assert SlotMap(1).rows == 1
    assert SlotMap(2).rows == 3
