"""One call of vLLM's ``LLM.generate`` on all prompts: the least anybody can do with them."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

SAMPLE_S = 0.25


def main() -> None:
    given = json.loads(sys.argv[1])
    llm = LLM(**given["arguments"])
    ask(llm, given["warm_up"])
    running: list[tuple[float, int]] = []
    ended = threading.Event()
    watch = threading.Thread(target=sample, args=(llm, running, ended), daemon=True)
    started_s = time.monotonic()
    watch.start()
    outputs = ask(llm, given["requests"])
    seconds = time.monotonic() - started_s
    ended.set()
    watch.join()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    Path(given["out"]).write_text(json.dumps({"seconds": seconds, "output_tokens": tokens, "running": running}))


def ask(llm: LLM, file: str) -> list[Any]:
    requests = [json.loads(line) for line in Path(file).read_text().splitlines()]
    params = [
        SamplingParams(max_tokens=one["max_tokens"], temperature=one["temperature"], ignore_eos=one["ignore_eos"])
        for one in requests
    ]
    outputs: list[Any] = llm.generate([one["prompt"] for one in requests], params, use_tqdm=False)
    return outputs


def sample(llm: LLM, running: list[tuple[float, int]], ended: threading.Event) -> None:
    """Seconds since the start, and requests that the scheduler runs, for the picture."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0
    started_s = time.monotonic()
    while not ended.wait(SAMPLE_S):
        running.append((time.monotonic() - started_s, len(scheduler.running)))


if __name__ == "__main__":
    main()
