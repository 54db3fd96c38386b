"""A request that failed is tried again from its dead letter, and never computed twice after an answer."""

from __future__ import annotations

import msgspec
import orjson
from click.testing import CliRunner, Result

from contract import settings as contract_settings
from headrace import cli
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World


def dead(world: World, *arguments: str) -> Result:
    environment = contract_settings.environment(world.settings)
    result = CliRunner().invoke(cli.main, ["dead", *arguments], env=environment, prog_name="headrace")
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_replayed_request_is_tried_again_and_a_second_replay_is_answered_from_the_store(world: World) -> None:
    broken = world.worker().ready()
    failing = [one | {"prompt": "FAULT:transient x"} for one in world.requests(2, prefix="bad")]
    world.publish([*failing, *world.requests(3), b"{"])
    world.wait_settled(6)
    world.wait_results(6)
    # Offsets move when the letters are acknowledged.
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    assert broken.terminate() == 0
    listed = [orjson.loads(line) for line in dead(world, "list", "--reason", "fault", "--json").stdout.splitlines()]
    assert {(letter["id"], letter["attempts"]) for letter in listed} == {("bad-0", 2), ("bad-1", 2)}

    world.settings = msgspec.structs.replace(
        world.settings, engine=msgspec.structs.replace(world.settings.engine, simulated_faults=False)
    )
    mended = world.worker().ready()
    assert "2 replayed, 0 refused" in dead(world, "replay", "--all").stderr
    results = world.wait_results(8)
    bad = sorted((result.id, result.generation, result.status) for result in results if (result.id or "")[:3] == "bad")
    assert bad == [("bad-0", 1, "failed"), ("bad-0", 2, "ok"), ("bad-1", 1, "failed"), ("bad-1", 2, "ok")]
    attempts = "SELECT count(*) FROM attempts"
    computed = world.value(attempts)

    assert "2 replayed, 0 refused" in dead(world, "replay", "--id", "bad-0", "--id", "bad-1").stderr
    results = world.wait_results(10)
    answers = {(result.id, orjson.dumps(result.output)) for result in results if result.generation == 2}
    assert len(answers) == 2, "the stored answers, once more"
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    assert mended.terminate() == 0
    assert world.value(attempts) == computed
    assert (
        world.value(f"{attempts} WHERE charge_usd > 0 AND key IN (SELECT key FROM results WHERE id LIKE 'bad-%%')") == 2
    )
    assert len(world.read(world.settings.names.dead)) == 3, "nothing was given up again"
    assert world.reconcile() == []
