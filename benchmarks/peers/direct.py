"""Straight into vLLM's AsyncLLM, in one asyncio program: a few at a time, then as given at a share of capacity."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


class Asker:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._tokenizer = llm.renderer.get_tokenizer()

    async def ask(self, request: dict[str, Any]) -> float:
        """Milliseconds from the text to the whole answer."""
        asked_s = time.monotonic()
        prompt = tokens_input(self._tokenizer.encode(request["prompt"]))
        params = SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            ignore_eos=request["ignore_eos"],
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in self._llm.generate(prompt, params, request_id=request["id"]):
            assert len(output.outputs[0].token_ids) == request["max_tokens"]
        return (time.monotonic() - asked_s) * 1e3


async def run(given: dict[str, Any]) -> dict[str, Any]:
    """The rate, and each request's latency, of both ways of asking."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given["arguments"]))
    asker = Asker(llm)
    await few_at_a_time(asker, read(given["warm_up"]), given["at_once"])
    few_ms = await few_at_a_time(asker, read(given["few"]), given["at_once"])
    probe = read(given["probe"])
    started_s = time.monotonic()
    await asyncio.gather(*map(asker.ask, probe))
    per_s = given["share"] * len(probe) / (time.monotonic() - started_s)
    tasks = []
    due_s = time.monotonic()
    for request, gap_s in zip(read(given["open"]), given["gaps_s"], strict=True):
        due_s += gap_s / per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(asker.ask(request)))
    latencies_ms = await asyncio.gather(*tasks)
    await asyncio.to_thread(llm.shutdown)
    return {"per_s": per_s, "open_ms": latencies_ms, "few_ms": few_ms}


async def few_at_a_time(asker: Asker, requests: list[dict[str, Any]], at_once: int) -> list[float]:
    """Each request's latency when ``at_once`` callers ask one after the other."""
    left = iter(requests)
    latencies_ms: dict[str, float] = {}

    async def caller() -> None:
        for request in left:
            latencies_ms[request["id"]] = await asker.ask(request)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return list(latencies_ms.values())


def read(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(asyncio.run(run(given))))
