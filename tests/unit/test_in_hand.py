from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from consumers.in_hand import InHand
from consumers.item import Item, Lease
from contract.routing import Route

ROUTE = Route("default", "online", "short")


def make(lease: Lease, key: str, offset: int) -> Item:
    item = Item(lease, offset, 0, None, None, [])
    item.key = key
    return item


def new_lease() -> tuple[Lease, collections.deque[tuple[Lease, int]]]:
    completions: collections.deque[tuple[Lease, int]] = collections.deque()
    return Lease("t", 0, 1, ROUTE, completions), completions


def test_second_record_of_a_key_waits_and_comes_back_when_the_first_is_done() -> None:
    again: list[Item] = []
    in_hand, (lease, completions) = InHand(again.extend), new_lease()
    first, second, other = make(lease, "a", 0), make(lease, "a", 1), make(lease, "b", 2)
    assert in_hand.admit([first, second, other]) == [first, other]
    assert again == []
    in_hand.complete([first])
    assert again == [second]
    assert list(completions) == [(lease, 0)]
    assert in_hand.admit([second]) == [second]


def test_follower_of_a_dropped_leader_is_not_lost_with_it() -> None:
    again: list[Item] = []
    in_hand, (lease, completions) = InHand(again.extend), new_lease()
    first, second = make(lease, "a", 0), make(lease, "a", 1)
    in_hand.admit([first, second])
    in_hand.drop([first])
    assert again == [second]
    assert list(completions) == [(lease, -1)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_every_record_ends_exactly_once_and_never_two_of_a_key_side_by_side(records: list[tuple[str, bool]]) -> None:
    queue: collections.deque[Item] = collections.deque()
    in_hand, (lease, completions) = InHand(queue.extend), new_lease()
    queue.extend(make(lease, key, offset) for offset, (key, _) in enumerate(records))
    ends: list[int] = []
    while queue:
        batch = [queue.popleft() for _ in range(len(queue))]
        leaders = in_hand.admit(batch)
        assert len({item.key for item in leaders}) == len(leaders)
        for item in leaders:
            ends.append(item.offset)
            (in_hand.drop if records[item.offset][1] else in_hand.complete)([item])
    assert sorted(ends) == list(range(len(records)))
    assert len(completions) == len(records)
    assert len(in_hand) == 0
