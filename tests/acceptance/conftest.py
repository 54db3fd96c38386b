from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.settings import Settings
from tests.acceptance.harness import World


@pytest.fixture
def world(settings: Settings, tmp_path: Path) -> Iterator[World]:
    """Topics made, nothing running yet."""
    one = World(settings, tmp_path)
    yield one
    one.close()
