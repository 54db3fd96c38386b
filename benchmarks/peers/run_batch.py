"""``vllm run-batch``: its own program, with a clock around its own function, from reading the file to its output.

A file of warm-up lines goes through the same engine before; start-up is not timed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from vllm.entrypoints.launchers import run_batch as program
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.usage.usage_lib import UsageContext


async def run(given: dict[str, Any], args: Namespace) -> float:
    """Seconds."""
    program.validate_run_batch_args(args)
    async with build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER) as engine:
        wanted, args.input_file = args.input_file, given["warm_up"]
        await program.run_batch(engine, args)
        args.input_file = wanted
        started_s = time.monotonic()
        await program.run_batch(engine, args)
        return time.monotonic() - started_s


def main() -> None:
    given = json.loads(sys.argv[1])
    sys.argv[1:] = ["-i", given["requests"], "-o", given["out"] + "l", *given["command_line"]]
    args = program.parse_args()
    seconds = asyncio.run(run(given, args))
    answers = [json.loads(line) for line in Path(args.output_file).read_text().splitlines()]
    tokens = sum(one["response"]["body"]["usage"]["completion_tokens"] for one in answers)
    Path(given["out"]).write_text(json.dumps({"seconds": seconds, "output_tokens": tokens}))


if __name__ == "__main__":
    main()
