"""A round or two of each fault: nothing lost, doubled, charged twice or stuck. ``make faults`` runs all rounds."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.site import Site

SEED = 7
OUTAGE_S = 3.0
CREW = 3


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    one = Site(folder, outage_s=OUTAGE_S, crew=CREW)
    one.start()
    yield one
    one.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.faults
@pytest.mark.xdist_group("faults")  # one broker and one database, broken by one test at a time
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.test_rounds], ids=lambda fault: fault.name)
def test_fault_loses_doubles_and_sticks_nothing(site: Site, fault: Fault) -> None:
    site.start()  # a fault that failed half-way may have left a server down
    row = fault.run(site, random.Random(SEED), fault.test_rounds)
    assert row.sound, row
