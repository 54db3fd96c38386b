"""Who answers a key, and what the losers are told. Real Postgres, one worker or two."""

from __future__ import annotations

import datetime as dt
import time
from decimal import Decimal

import msgspec
import pytest
import sqlalchemy as sa

from contract.errors import Fenced
from contract.statuses import ANSWERS, REFUSALS, Status, Waste
from storage.mapping import texts, words
from storage.partitions import name_of
from storage.rows import Claim, Suspect, day_of
from storage.store import Store
from tests.integration.storage.build import TOPIC, Worker, execute, now_ms, one, rows_of

REFUSED = sorted(REFUSALS)
ANSWERED = sorted(ANSWERS)


def test_arrays_reach_the_server_as_they_were_given(store: Store) -> None:
    odd = [None, "", "NULL", "null", "a,b", "{x}", '"', "\\", '\\"', " ", "tab\tline\n", "é\U0001f600", "'"]
    ask = sa.text("SELECT CAST(:odd AS text[]), CAST(:numbers AS bigint[]), CAST(:days AS date[])")
    numbers, days = [1, -5, 2**62], [dt.date(1970, 1, 1), dt.date(9999, 12, 30)]
    for chosen in (odd, []):
        found = {"odd": texts(chosen), "numbers": words(numbers), "days": words(days)}
        row = store.database.run(lambda connection, found=found: connection.execute(ask, found).one())  # type: ignore[misc]
        assert tuple(row) == (chosen, numbers, days)


def test_what_is_settled_is_read_back_field_by_field(store: Store) -> None:
    worker = Worker(store)
    given = worker.outcome(
        "a",
        verified=True,
        business_line="search",
        type="summary",
        error_code="c",
        error_message="m",
        error_param="p",
        altered=True,
        usage_contradictory=True,
        latency_ms=12.25,
        queue_ms=1.5,
        inference_ms=10.125,
        degrade_level=2,
        attempt=3,
        tags={"team": "a", "é": "ü"},
        batch_id="b",
        custom_id="line\t1\\n",
    )
    given.attempts[0].charge_usd = Decimal("0.00000165000000000000000000001")
    (verdict,) = store.settle([given])
    assert verdict.won
    assert verdict.result is given.result
    stored = store.stored_results([given.result.key])[given.result.key]
    assert stored == given.result
    assert stored.charge_usd == Decimal("0.00000165000000000000000000001")


def test_verdicts_come_in_the_order_of_the_batch(store: Store) -> None:
    worker = Worker(store)
    batch = [worker.outcome(f"id-{number}") for number in range(50)]
    assert [verdict.result.id for verdict in store.settle(batch)] == [f"id-{number}" for number in range(50)]
    assert store.settle([]) == []


def test_same_record_again_is_a_duplicate_whatever_the_outcome_was(store: Store) -> None:
    first, second = Worker(store, "first"), Worker(store, "second")
    for number, status in enumerate(Status):
        store.settle([first.outcome(f"{status}", status, offset=number)])
        (verdict,) = store.settle([second.outcome(f"{status}", Status.OK, offset=number)])
        assert (verdict.won, verdict.result.status, verdict.result.worker) == (False, status, "first")
    assert one(store, "SELECT count(*) FROM results") == len(Status)
    assert one(store, "SELECT count(*) FROM attempts WHERE waste = 'duplicate'") == len(Status)


@pytest.mark.parametrize("status", ANSWERED)
def test_same_id_on_a_new_record_after_an_answer_gets_the_stored_answer(store: Store, status: Status) -> None:
    first, second = Worker(store, "first"), Worker(store, "second")
    store.settle([first.outcome("a", status, offset=1)])
    late = second.outcome("a", offset=2)
    late.attempts[0].charge_usd = Decimal("0.5")
    (verdict,) = store.settle([late])
    assert (verdict.won, verdict.result.generation, verdict.result.offset) == (False, 1, 1)
    waste = rows_of(store, "SELECT waste, charge_usd, generation FROM attempts WHERE worker_epoch = %s", second.epoch)
    assert waste == [("duplicate", 0, 1)]
    assert late.attempts[0].waste is None, "a later call must still find the attempt as it was"


@pytest.mark.parametrize("status", REFUSED)
def test_same_id_on_a_new_record_after_a_refusal_is_the_next_generation(store: Store, status: Status) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a", status, offset=1)])
    again = worker.outcome("a", offset=2)
    again.attempts[0].charge_usd = Decimal("0.25")
    (verdict,) = store.settle([again])
    assert (verdict.won, verdict.result.generation) == (True, 2)
    key = again.result.key
    (known,) = store.look_up(worker.epoch, [], [key]).settled.values()
    assert (known.generation, known.status) == (2, Status.OK)
    assert known.records == (f"{TOPIC}/0/1", f"{TOPIC}/0/2")
    assert store.stored_results([key])[key].charge_usd == Decimal("0.25")
    assert [row.generation for row in store.find_result("a", "tests")] == [2, 1]


def test_an_old_record_redelivered_after_a_resubmission_does_not_open_a_third_generation(store: Store) -> None:
    worker, other = Worker(store), Worker(store, "other")
    store.settle([worker.outcome("a", Status.SHED, offset=1)])
    store.settle([worker.outcome("a", Status.FAILED, offset=2)])
    (verdict,) = store.settle([other.outcome("a", offset=1)])
    assert (verdict.won, verdict.result.generation, verdict.result.status) == (False, 2, Status.FAILED)


def test_the_same_id_of_two_sources_is_two_requests(store: Store) -> None:
    worker = Worker(store)
    verdicts = store.settle([worker.outcome("a", source="x"), worker.outcome("a", source="y")])
    assert [verdict.won for verdict in verdicts] == [True, True]
    assert {row.source for row in store.find_result("a")} == {"x", "y"}
    assert [row.source for row in store.find_result("a", "y")] == ["y"]
    key = verdicts[0].result.key
    assert [row.source for row in store.find_result(key)] == ["x"]
    assert [row.source for row in store.find_result(key.upper())] == ["x"]


def test_of_a_key_twice_in_a_batch_the_first_answer_wins(store: Store) -> None:
    worker = Worker(store)
    batch = [
        worker.outcome("a", Status.FAILED, offset=1),
        worker.outcome("a", offset=2, business_line="winner"),
        worker.outcome("b", offset=3),
        worker.outcome("a", offset=4),
        worker.outcome("a", Status.EXPIRED, offset=5),
    ]
    verdicts = store.settle(batch)
    assert [verdict.won for verdict in verdicts] == [False, True, True, False, False]
    assert {verdicts[place].result.business_line for place in (0, 1, 3, 4)} == {"winner"}
    assert rows_of(store, "SELECT waste, count(*) FROM attempts GROUP BY waste ORDER BY 1") == [
        ("duplicate", 1),
        (None, 2),
    ]


def test_a_refused_key_twice_in_a_batch_is_a_resubmission_unless_it_is_the_same_record(store: Store) -> None:
    worker = Worker(store)
    batch = [worker.outcome("a", Status.SHED, offset=1) for _ in range(2)]
    batch += [worker.outcome("a", Status.INVALID, offset=2)]
    verdicts = store.settle(batch)
    assert [(verdict.won, verdict.result.generation) for verdict in verdicts] == [(True, 1), (False, 2), (True, 2)]
    assert one(store, "SELECT count(*) FROM results") == 2


def test_a_flood_of_one_id_in_one_batch_costs_one_statement_not_one_each(store: Store) -> None:
    worker = Worker(store)
    started = time.monotonic()
    verdicts = store.settle([worker.outcome("a") for _ in range(2_000)])
    assert sum(verdict.won for verdict in verdicts) == 1
    assert verdicts[0].won
    assert time.monotonic() - started < 10
    assert one(store, "SELECT count(*) FROM attempts WHERE waste = 'duplicate'") == 1_999
    again = store.settle([worker.outcome("a") for _ in range(500)])
    assert {(verdict.won, verdict.result.offset) for verdict in again} == {(False, 1)}


def test_the_same_record_twice_in_a_batch_wins_once_also_when_settled_again(store: Store) -> None:
    worker = Worker(store)
    batch = [worker.outcome("a", Status.EXPIRED, offset=1) for _ in range(2)]
    for _ in range(2):
        assert [verdict.won for verdict in store.settle(batch)] == [True, False]


@pytest.mark.parametrize("appended_ms", [-1, 0, 2**62])
def test_a_record_with_an_impossible_time_gets_its_outcome(store: Store, appended_ms: int) -> None:
    worker = Worker(store)
    (verdict,) = store.settle([worker.outcome("a", appended_ms=appended_ms)])
    assert (verdict.won, verdict.result.status) == (True, Status.OK)
    assert store.stored_results([verdict.result.key])[verdict.result.key].appended_ms == appended_ms


def test_keep_output_false_leaves_the_output_out_of_the_table_only(store: Store) -> None:
    worker = Worker(store)
    private = worker.outcome("a", keep_output=False)
    (verdict,) = store.settle([private])
    assert verdict.result.output is not None
    assert one(store, "SELECT output FROM results") is None
    assert store.stored_results([verdict.result.key])[verdict.result.key].output is None
    (again,) = store.settle([private])
    assert again.won
    assert again.result.output is not None, "whoever settles again has the output in hand and publishes it"


def test_settling_the_same_batch_again_is_a_success_and_writes_nothing(store: Store) -> None:
    worker = Worker(store)
    retry = worker.attempt(waste=Waste.RETRY)
    batch = [
        worker.outcome("a"),
        worker.outcome("b", Status.FAILED, attempts=[retry]),
        worker.outcome("c", Status.EXPIRED),
        worker.outcome("d", attempts=[worker.attempt(waste=Waste.RETRY), worker.attempt()]),
    ]
    store.settle([Worker(store, "earlier").outcome("e")])
    batch.append(worker.outcome("e"))
    first = store.settle(batch)
    before = rows_of(store, "SELECT * FROM attempts ORDER BY worker_epoch, seq")
    second = store.settle(batch)
    assert [verdict.won for verdict in first] == [True, True, True, True, False]
    assert second == first
    assert rows_of(store, "SELECT * FROM attempts ORDER BY worker_epoch, seq") == before
    assert one(store, "SELECT count(*) FROM results") == 5


def test_a_worker_that_was_declared_dead_settles_nothing(store: Store) -> None:
    zombie, heir = Worker(store, "zombie"), Worker(store, "heir")
    zombie.fall_silent()
    assert store.reap(30) == [zombie.epoch]
    with pytest.raises(Fenced):
        store.settle([zombie.outcome("a")])
    assert one(store, "SELECT count(*) FROM settled") == 0
    (verdict,) = store.settle([heir.outcome("a")])
    assert verdict.won


def test_attempts_carry_what_cost_reports_need(store: Store) -> None:
    worker = Worker(store)
    yesterday = now_ms() - 86_400_000
    settlement = worker.outcome("a", business_line="search", type="summary", appended_ms=yesterday)
    store.settle([settlement])
    row = settlement.result
    (attempt,) = rows_of(
        store,
        "SELECT day, result_day, key::text, generation, pool, class, bucket, business_line, source, type, model,"
        " number, waste, allocated_ns FROM attempts",
    )
    today, result_day = day_of(settlement.attempts[0].ended_ms), day_of(yesterday)
    copied = ("default", "online", "short", "search", "tests", "summary", "tiny")
    assert attempt == (today, result_day, row.key, 1, *copied, 1, None, settlement.attempts[0].allocated_ns)


def test_the_charge_of_a_result_is_that_of_its_attempts_not_what_the_row_claims(store: Store) -> None:
    worker = Worker(store)
    shed = worker.outcome("a", Status.SHED, charge_usd=Decimal(9))
    answered = worker.outcome("b", charge_usd=Decimal(9))
    answered.attempts[0].charge_usd = Decimal("0.125")
    verdicts = store.settle([shed, answered])
    assert [verdict.result.charge_usd for verdict in verdicts] == [0, Decimal("0.125")]
    assert rows_of(store, "SELECT id, charge_usd FROM results ORDER BY id") == [("a", 0), ("b", Decimal("0.125"))]


def test_a_row_the_database_cannot_hold_fails_alone(store: Store) -> None:
    worker = Worker(store)
    batch = [worker.outcome(f"id-{number}") for number in range(64)]
    batch[17].result.output = b"{not json"
    batch[40].result.prompt_tokens = 2**63
    batch[41].result.error_code = "nul \0 in a code"
    batch[42].result.worker = "half a pair \ud83d"
    batch[43].attempts[0].output_tokens = 2**63
    batch[44].result.id = "".join(chr(0x4E00 + number * 37 % 20_000) for number in range(3_000))
    verdicts = store.settle(batch)
    bad = {17, 40, 41, 42, 43, 44}
    for place, verdict in enumerate(verdicts):
        expected = (
            (Status.FAILED, "unstorable", None) if place in bad else (Status.OK, None, batch[place].result.output)
        )
        assert (verdict.result.status, verdict.result.error_code, verdict.result.output) == expected
        assert verdict.won
        assert verdict.result.id == (None if place == 44 else f"id-{place}")
    assert one(store, "SELECT count(*) FROM results WHERE status = 'ok'") == 58
    assert one(store, "SELECT count(*) FROM settled WHERE outcome = 'failed' AND reason = 'unstorable'") == 6
    # The time in the engine was spent, and nobody pays for it. (One attempt does not fit either.)
    assert one(store, "SELECT count(*) FROM attempts WHERE waste = 'retry' AND charge_usd = 0") == 5


def test_an_attempt_number_used_twice_spoils_only_its_own_row(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a")])
    taken = worker.attempt()
    taken.seq = 1
    verdicts = store.settle([worker.outcome("b", attempts=[taken]), worker.outcome("c")])
    assert [verdict.result.status for verdict in verdicts] == [Status.FAILED, Status.OK]


def test_an_unstorable_row_settled_again_stays_what_it_is(store: Store) -> None:
    worker = Worker(store)
    bad = worker.outcome("a")
    bad.result.output = b"["
    store.settle([bad])
    (verdict,) = store.settle([bad])
    assert (verdict.won, verdict.result.error_code) == (True, "unstorable")
    assert one(store, "SELECT count(*) FROM results") == 1


def test_a_record_that_comes_again_after_its_key_was_forgotten_is_still_a_duplicate(store: Store) -> None:
    worker, other = Worker(store), Worker(store, "other")
    store.settle([worker.outcome("a", offset=1, appended_ms=now_ms() - 9 * 86_400_000)])
    store.drop_old()
    assert one(store, "SELECT count(*) FROM settled") == 0
    late = other.outcome("a", Status.EXPIRED, offset=1, appended_ms=now_ms() - 9 * 86_400_000)
    neighbour = other.outcome("b")
    verdicts = store.settle([late, neighbour])
    assert [(verdict.won, verdict.result.status) for verdict in verdicts] == [(False, Status.OK), (True, Status.OK)]
    assert one(store, "SELECT count(*) FROM results") == 2


def test_a_duplicate_whose_result_retention_took_goes_out_uncharged(store: Store) -> None:
    worker, other = Worker(store), Worker(store, "other")
    store.settle([worker.outcome("a", offset=1)])
    execute(store, f"DROP TABLE {name_of('results', dt.datetime.now(dt.UTC).date())}")
    late = other.outcome("a", offset=2)
    late.attempts[0].charge_usd = Decimal(1)
    (verdict,) = store.settle([late])
    assert (verdict.won, verdict.result.charge_usd, verdict.result.generation) == (False, Decimal(0), 1)
    assert one(store, "SELECT waste FROM attempts WHERE worker_epoch = %s", other.epoch) == "duplicate"


def test_a_partition_dropped_behind_our_back_is_made_again(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a")])
    for parent in ("results", "attempts"):
        execute(store, f"DROP TABLE {name_of(parent, dt.datetime.now(dt.UTC).date())}")
    (verdict,) = store.settle([worker.outcome("b")])
    assert (verdict.won, verdict.result.status) == (True, Status.OK)


def test_settle_does_not_change_rows_it_did_not_commit(store: Store) -> None:
    worker = Worker(store)
    lost = worker.outcome("a", offset=2)
    before = msgspec.structs.asdict(lost.result)
    store.settle([Worker(store, "first").outcome("a", offset=1)])
    store.settle([lost])
    assert msgspec.structs.asdict(lost.result) == before


def test_look_up_notes_claims_and_tells_what_is_settled_in_one_round_trip(store: Store) -> None:
    worker = Worker(store)
    keys = [verdict.result.key for verdict in store.settle([worker.outcome("a"), worker.outcome("b", Status.SHED)])]
    known = store.look_up(
        worker.epoch, [Claim(TOPIC, 0, 1, 5), Claim(TOPIC, 3, 7, 7)], [*keys, worker.outcome().result.key]
    )
    assert {key: (one.generation, one.status) for key, one in known.settled.items()} == {
        keys[0]: (1, Status.OK),
        keys[1]: (1, Status.SHED),
    }
    store.look_up(worker.epoch, [Claim(TOPIC, 0, 4, 9)], [])
    claims = rows_of(store, "SELECT partition, first_offset, last_offset FROM claims ORDER BY partition")
    assert claims == [(0, 4, 9), (3, 7, 7)]
    store.release_claims(worker.epoch, [(TOPIC, 0), (TOPIC, 9)])
    assert rows_of(store, "SELECT partition FROM claims") == [(3,)]


def test_open_claims_are_what_others_never_gave_back(store: Store) -> None:
    dead, alive, stopped, me = (Worker(store, name) for name in ("dead", "alive", "stopped", "me"))
    for worker, first in ((dead, 1), (alive, 2), (stopped, 3), (me, 4)):
        store.look_up(worker.epoch, [Claim(TOPIC, 0, first, first + 10)], [])
    stopped.close()
    dead.fall_silent()
    store.reap(30)
    store.look_up(dead.epoch, [Claim(TOPIC, 0, 50, 60)], [])  # a zombie claims nothing any more
    alive_too = [(1, 11), (2, 12)]  # it still holds a partition that is ours now: it lost it without giving it back
    assert store.open_claims(TOPIC, 0, me.epoch) == alive_too
    assert store.open_claims(TOPIC, 1, me.epoch) == []
    store.release_claims(alive.epoch, [(TOPIC, 0)])
    assert store.open_claims(TOPIC, 0, me.epoch) == [(1, 11)]


def test_deaths_of_a_request_only_rise_and_say_in_whose_engine_it_is(store: Store) -> None:
    me, other = Worker(store, "me"), Worker(store, "other")
    one, two = (me.outcome().result.key for _ in range(2))
    store.write_suspects({one: 1, two: 2}, me.epoch)
    store.write_suspects({one: 2, two: 1}, None)
    found = store.look_up(other.epoch, [], [one, two]).suspects
    assert found == {one: Suspect(one, 2, None), two: Suspect(two, 2, None)}
    store.write_suspects({one: 2}, other.epoch)
    store.clear_suspects([two])
    assert store.look_up(me.epoch, [], [one, two]).suspects == {one: Suspect(one, 2, other.epoch)}
