"""Field case B10: a later success never commits past an earlier, unfinished record."""

from hypothesis import given
from hypothesis import strategies as st

from consumers.offsets import Done, OffsetTracker


def test_later_success_does_not_commit_past_hanging_record() -> None:
    tracker = OffsetTracker(10)
    for offset in (10, 11, 12):
        assert tracker.take(offset, 1)
    assert tracker.done(11) is Done.HELD
    assert tracker.done(12) is Done.HELD
    assert tracker.position == 10
    assert tracker.done(10) is Done.MOVED
    assert tracker.position == 13


def test_nothing_taken_gives_the_start_back() -> None:
    assert OffsetTracker(7).position == 7
    assert OffsetTracker(None).position is None


def test_next_offset_follows_the_last_taken_whatever_is_unfinished() -> None:
    tracker = OffsetTracker(10)
    assert tracker.next_offset == 10
    for offset in (10, 11, 15):
        assert tracker.take(offset, 1)
    assert tracker.next_offset == 16
    tracker.done(11)
    assert (tracker.position, tracker.next_offset) == (10, 16)


def test_record_seen_again_is_not_taken_twice() -> None:
    tracker = OffsetTracker(0)
    assert tracker.take(5, 1)
    assert not tracker.take(5, 1)
    assert not tracker.take(3, 1)
    assert tracker.in_flight == 1


def test_late_answer_of_another_assignment_is_unknown() -> None:
    tracker = OffsetTracker(0)
    tracker.take(0, 1)
    assert tracker.done(99) is Done.UNKNOWN
    tracker.done(0)
    assert tracker.done(0) is Done.UNKNOWN


@given(
    start=st.integers(0, 5),
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    data=st.data(),
)
def test_position_is_the_lowest_unfinished_offset_in_any_order(
    start: int, gaps: list[int], data: st.DataObject
) -> None:
    tracker = OffsetTracker(start)
    offsets, offset = [], start
    for gap in gaps:
        assert tracker.take(offset, offset)
        offsets.append(offset)
        offset += gap
    open_offsets = set(offsets)
    committed = tracker.position
    for done in data.draw(st.permutations(offsets)):
        tracker.done(done)
        open_offsets.remove(done)
        position = tracker.position
        assert position == (min(open_offsets) if open_offsets else offsets[-1] + 1)
        assert committed is not None
        assert position is not None
        assert position >= committed
        committed = position
        assert tracker.in_flight == len(open_offsets)
        assert tracker.in_flight_bytes == sum(open_offsets)
        assert tracker.distance == (offsets[-1] + 1 - min(open_offsets) if open_offsets else 0)
