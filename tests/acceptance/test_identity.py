"""Who is who: the same record twice, the same id again, no id, two sources, two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from contract.settings import Settings
from tests.acceptance.harness import World


def test_same_id_on_a_new_record_after_an_answer_is_answered_from_the_store(world: World) -> None:
    world.worker().ready()
    request = world.requests(1)[0]
    world.publish([request], partition=0)
    world.wait_settled(1)
    world.publish([request | {"prompt": "another prompt, same id"}], partition=1)
    results = world.wait_results(2)
    assert results[0].output == results[1].output
    assert {r.generation for r in results} == {1}
    assert world.value("SELECT count(*) FROM attempts WHERE waste IS NULL") == 1
    world.assert_sound(1)


def test_same_id_after_a_refusal_is_a_new_generation_with_its_own_charge(world: World) -> None:
    world.worker().ready()
    request = world.requests(1)[0]
    world.publish([request | {"deadline": "2020-01-01T00:00:00Z"}], partition=0)
    world.wait_settled(1)
    assert world.value("SELECT outcome FROM settled") == "expired"
    world.publish([request], partition=1)
    results = world.wait_results(2)
    assert [(r.status, r.generation) for r in sorted(results, key=lambda r: r.generation)] == [
        ("expired", 1),
        ("ok", 2),
    ]
    assert world.query("SELECT outcome, generation FROM settled") == [("ok", 2)]
    assert world.value("SELECT count(*) FROM attempts WHERE charge_usd > 0") == 1


def test_same_id_from_two_sources_are_two_requests(world: World) -> None:
    world.worker().ready()
    request = world.requests(1)[0]
    world.publish([request | {"source": "a"}, request | {"source": "b"}])
    world.wait_settled(2)
    world.wait_results(2)
    world.assert_sound(2)


def test_records_without_an_id_are_each_their_own(world: World) -> None:
    world.worker().ready()
    world.publish([{"prompt": "same text", "max_tokens": 2}] * 3)
    world.wait_settled(3)
    world.wait_results(3)
    world.assert_sound(3)


def test_same_id_many_times_at_once_is_computed_once_per_worker_and_charged_once(world: World) -> None:
    first, second = world.worker(), world.worker()
    first.ready(), second.ready()
    request = world.requests(1)[0]
    for partition in range(world.settings.topics.partitions):
        world.publish([request] * 25, partition=partition)
    world.wait_results(100)
    assert len({r.output["choices"][0]["text"] for r in world.results() if r.output}) == 1
    assert world.value("SELECT count(*) FROM attempts") <= 2
    world.assert_sound(1)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_two_workers_share_the_load_without_loss_or_double(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest, protocol: Literal["classic", "consumer"]
) -> None:
    kafka = msgspec.structs.replace(settings.kafka, group_protocol=protocol)
    world = World(msgspec.structs.replace(settings, kafka=kafka), tmp_path)
    request.addfinalizer(world.close)
    first, second = world.worker(), world.worker()
    first.ready(), second.ready()
    world.publish(world.requests(2_000))
    world.wait_settled(2_000)
    world.wait_results(2_000)
    world.assert_sound(2_000)
    assert world.value("SELECT count(DISTINCT worker_epoch) FROM results") == 2
    assert first.terminate() == 0
    assert second.terminate() == 0
    assert world.lag() == 0
    assert world.reconcile() == []
