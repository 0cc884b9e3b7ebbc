"""Who goes first: lanes, patience, and the order inside a lane."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ivy_gateway.jobs import Lane
from ivy_gateway.lanes import LaneQueue

PATIENCE = 0.5


@dataclass(eq=False)
class Item:
    lane: Lane
    arrival: float


def drained(items: list[Item]) -> list[Item]:
    queue: LaneQueue[Item] = LaneQueue(PATIENCE)
    for item in items:
        queue.push(item)
    order = []
    while heads := queue.heads():
        queue.discard(heads[0])
        order.append(heads[0])
    return order


def test_bulk_steps_back_for_its_patience_and_no_longer():
    bulk = Item(Lane.BULK, 1.0)
    younger, later = Item(Lane.INTERACTIVE, 1.4), Item(Lane.INTERACTIVE, 1.6)
    assert drained([bulk, younger, later]) == [younger, bulk, later]


def test_an_item_taken_out_of_the_middle_leaves_the_others_in_order():
    first, gone, last = (Item(Lane.BULK, float(i)) for i in range(3))
    queue: LaneQueue[Item] = LaneQueue(PATIENCE)
    for item in (first, gone, last):
        queue.push(item)
    assert queue.discard(gone)
    assert not queue.discard(gone)
    assert len(queue) == 2
    queue.discard(first)
    assert queue.heads() == [last]


arrivals = st.lists(st.tuples(st.sampled_from(Lane), st.floats(0, 3, allow_nan=False)), max_size=40)


@given(arrivals)
def test_order_holds_inside_a_lane_and_nobody_is_passed_by_who_came_after_the_patience(chosen):
    items = [Item(lane, arrival) for lane, arrival in sorted(chosen, key=lambda pair: pair[1])]
    order = drained(items)
    assert sorted(map(id, order)) == sorted(map(id, items))
    for place, item in enumerate(order):
        for earlier in order[:place]:
            if earlier.lane is item.lane:
                assert earlier.arrival <= item.arrival
            elif item.lane is Lane.BULK:
                assert earlier.arrival <= item.arrival + PATIENCE
            else:
                assert earlier.arrival + PATIENCE <= item.arrival
