"""The front door: command line, one-machine stack, demo, and the public names.

``from headrace import Client`` is all a publisher needs.
"""

from producers.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
