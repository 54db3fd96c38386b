"""Law 6 in its pure part: every nanosecond is somewhere, exactly."""

from hypothesis import given
from hypothesis import strategies as st

from contract.statuses import WorkerState
from gpu_workers.metering import Meter, weight


def test_alone_in_the_engine_pays_for_all_of_it() -> None:
    meter = Meter(1, 0)
    meter.become(WorkerState.IDLE, 10)
    meter.enter(1, 1024, 100)
    assert meter.leave(1, 1100) == 1000
    row = meter.flush(1100, 0)
    assert (row.starting_ns, row.idle_ns, row.busy_ns, row.rounding_ns) == (10, 90, 1000, 0)


def test_equal_weights_share_equally_and_a_latecomer_pays_only_from_its_entry() -> None:
    meter = Meter(1, 0)
    meter.enter(1, 1024, 0)
    meter.enter(2, 1024, 1000)
    assert meter.leave(2, 3000) == 1000
    assert meter.leave(1, 3000) == 2000


def test_weights_divide_the_time() -> None:
    meter = Meter(1, 0)
    meter.enter(1, 3072, 0)
    meter.enter(2, 1024, 0)
    assert meter.leave(1, 4000) == 3000
    assert meter.leave(2, 4000) == 1000


def test_long_prompt_and_more_choices_weigh_more() -> None:
    assert weight(0, 10, 2) == 2 * weight(0, 10, 1)
    assert weight(8000, 10, 1) > weight(80, 10, 1) > weight(0, 10, 1)
    assert weight(100, 0, 1) > 0


def test_clock_that_steps_back_books_nothing_negative() -> None:
    meter = Meter(1, 100)
    meter.advance(200)
    meter.advance(150)
    assert meter.flush(200, 0).starting_ns == 100


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**10),
            st.sampled_from(["enter", "leave", "flush", "stall", "idle"]),
            st.integers(1, 10**7),
        ),
        max_size=200,
    )
)
def test_states_sum_to_provisioned_and_shares_plus_rounding_to_busy(events: list[tuple[int, str, int]]) -> None:
    now, next_id, shares = 5, 0, 0
    meter = Meter(1, now)
    inside: list[int] = []
    rows = []
    for pause_ns, move, number in events:
        now += pause_ns
        if move == "enter":
            next_id += 1
            meter.enter(next_id, number, now)
            inside.append(next_id)
        elif move == "leave" and inside:
            share = meter.leave(inside.pop(number % len(inside)), now)
            assert share >= 0
            shares += share
        elif move == "flush":
            rows.append(meter.flush(now, 0))
        elif move == "stall":
            meter.become(WorkerState.STALLED, now)
        else:
            meter.become(WorkerState.IDLE, now)
    for job_id in inside:
        shares += meter.leave(job_id, now)
    rows.append(meter.flush(now, 0))
    states = sum(r.starting_ns + r.idle_ns + r.busy_ns + r.draining_ns + r.stalled_ns for r in rows)
    assert states == meter.provisioned_ns() == now - 5
    assert shares + sum(r.rounding_ns for r in rows) == sum(r.busy_ns for r in rows)
    assert all(r.rounding_ns >= 0 for r in rows)
    assert [r.seq for r in rows] == list(range(1, len(rows) + 1))
