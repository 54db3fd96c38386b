from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from consumers.item import Item, Lease
from contract.routing import Route
from gpu_workers.credits import Need
from gpu_workers.lanes import Lanes, Waiting

LEASE = Lease("t", 0, 1, Route("default", "online", "short"), collections.deque())


def waiting(number: int, class_name: str = "online", *, long: bool = False) -> Waiting:
    return Waiting(Item(LEASE, number, number, None, None, []), Need(class_name, long, 1))


def test_long_head_does_not_hide_the_short_ones_and_the_older_goes_first() -> None:
    lanes = Lanes(["online"])
    lanes.add([waiting(1, long=True)])
    lanes.add([waiting(2)])
    assert [lane[0].item.offset for lane in lanes.by_age("online")] == [1, 2]
    lanes.put_back([waiting(0)])
    assert [lane[0].item.offset for lane in lanes.by_age("online")] == [0, 1]


def test_what_is_put_back_keeps_its_order_at_the_front() -> None:
    lanes = Lanes(["online"])
    lanes.add([waiting(3)])
    lanes.put_back([waiting(1), waiting(2)])
    assert [one.item.offset for one in lanes.by_age("online")[0]] == [1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["online", "offline"]), st.booleans()), max_size=50), st.integers(2, 5))
def test_taking_out_some_leaves_the_others_in_order(places: list[tuple[str, bool]], every: int) -> None:
    lanes = Lanes(["online", "offline"])
    for number, (class_name, long) in enumerate(places):
        lanes.add([waiting(number, class_name, long=long)])
    taken = lanes.take_all(lambda item: item.offset % every == 0)
    assert sorted(item.offset for item in taken) == list(range(0, len(places), every))
    left = [one.item.offset for name in lanes.classes() for lane in lanes.by_age(name) for one in lane]
    assert len(lanes) == len(left) == len(places) - len(taken)
    for name in lanes.classes():
        for lane in lanes.by_age(name):
            assert [one.item.offset for one in lane] == sorted(one.item.offset for one in lane)
