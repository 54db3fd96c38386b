"""What a plain install of the client loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORBIDDEN = ("sqlalchemy", "psycopg", "alembic", "torch", "transformers", "tokenizers", "vllm", "storage", "consumers")


@pytest.mark.parametrize(
    "code",
    [
        "import headrace; headrace.Client; headrace.AsyncClient",
        "from headrace import Client; from contract.settings import Settings; Client(Settings())",
        "import headrace.commands.submit, headrace.commands.results, headrace.commands.topics",
        "import producers.backends.kafka_python",
    ],
)
def test_client_loads_no_database_and_no_engine(code: str) -> None:
    check = f"import sys; {code}; print(*set({_FORBIDDEN!r}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
