"""The front door: command line, one-machine stack, demo, and the public names.

``from headrace import Client`` is all a publisher needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producers.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `headrace --help` and the stack do not load a Kafka client.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from producers import client

    return getattr(client, name)
