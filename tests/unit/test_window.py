from hypothesis import given
from hypothesis import strategies as st

from consumers.window import Closing, Window
from contract.settings import Window as Bounds

MS = 1_000_000


def test_empty_window_never_closes() -> None:
    window: Window[int] = Window(Bounds(max_requests=1, max_wait_ms=0))
    assert window.closing(10**18, hungry=True) is None
    assert window.wait_s(0) == float("inf")


def test_each_bound_closes_by_itself() -> None:
    bounds = Bounds(max_requests=3, max_tokens=100, max_wait_ms=20)
    window: Window[int] = Window(bounds)
    window.add(1, 10, 0)
    assert window.closing(19 * MS, hungry=False) is None
    assert window.closing(20 * MS, hungry=False) is Closing.WAIT
    assert window.closing(0, hungry=True) is Closing.HUNGRY
    window.add(2, 90, 0)
    assert window.closing(0, hungry=False) is Closing.TOKENS
    window.drain()
    for number in range(3):
        window.add(number, 1, 0)
    assert window.closing(0, hungry=False) is Closing.REQUESTS


def test_wait_counts_from_the_first_record_not_the_last() -> None:
    window: Window[int] = Window(Bounds(max_wait_ms=20))
    window.add(1, 1, 5 * MS)
    window.add(2, 1, 24 * MS)
    assert window.closing(25 * MS, hungry=False) is Closing.WAIT
    assert window.wait_s(15 * MS) == 0.01


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=200), st.integers(1, 20), st.integers(1, 200)
)
def test_no_record_is_lost_or_doubled_and_no_bound_is_overrun(
    records: list[tuple[int, int]], max_requests: int, max_tokens: int
) -> None:
    window: Window[int] = Window(Bounds(max_requests=max_requests, max_tokens=max_tokens, max_wait_ms=20))
    now, out = 0, []
    for index, (tokens, pause_ms) in enumerate(records):
        now += pause_ms * MS
        window.add(index, tokens, now)
        if window.closing(now, hungry=False):
            drained = window.drain()
            assert len(drained) <= max_requests
            assert sum(records[i][0] for i in drained[:-1]) < max_tokens
            out += drained
    out += window.drain()
    assert out == list(range(len(records)))
    assert len(window) == 0
