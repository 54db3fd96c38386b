import datetime as dt

import pytest

from consumers.identity import Judgement, judge
from contract.statuses import ANSWERS, REFUSALS, Status
from storage.rows import Settled


def settled(status: Status) -> Settled:
    return Settled("k", 1, status, dt.date(2026, 12, 1), ("t/0/5",))


def test_unknown_key_is_fresh() -> None:
    assert judge(None, "t/0/5") is Judgement.FRESH


@pytest.mark.parametrize("status", sorted(Status))
def test_same_record_redelivered_is_always_a_duplicate(status: Status) -> None:
    assert judge(settled(status), "t/0/5") is Judgement.DUPLICATE


@pytest.mark.parametrize("status", sorted(ANSWERS))
def test_new_record_after_an_answer_is_a_duplicate(status: Status) -> None:
    assert judge(settled(status), "t/0/9") is Judgement.DUPLICATE


@pytest.mark.parametrize("status", sorted(REFUSALS))
def test_new_record_after_a_refusal_is_a_resubmission(status: Status) -> None:
    assert judge(settled(status), "t/0/9") is Judgement.RESUBMISSION
