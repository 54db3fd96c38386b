"""vLLM's set-up, without vLLM: what is set, what wins over it, what is inherited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from contract import settings as contract_settings
from contract.errors import FatalError
from contract.settings import Engine
from gpu_workers.engines import vllm_profile


def _engine(**fields: Any) -> Engine:
    return contract_settings.build({"engine": {"model_path": "hub/model"} | fields}).engine


def test_settings_win_over_every_default_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_profile, "on_cpu", lambda: True)
    arguments = vllm_profile.engine_arguments(_engine(max_requests=9, max_model_len=5_000))
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (9, 5_000)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= 5_000
    over = {"dtype": "bfloat16", "max_num_seqs": 3, "tokenizer": "other"}
    changed = vllm_profile.engine_arguments(_engine(vllm=over))
    assert {name: changed[name] for name in over} == over


def test_gpu_build_keeps_vllms_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_profile, "on_cpu", lambda: False)
    arguments = vllm_profile.engine_arguments(_engine())
    assert not arguments.keys() & {"dtype", "enforce_eager", "kv_cache_memory_bytes", "enable_chunked_prefill"}
    assert arguments["scheduling_policy"] == "priority"


def test_kv_cache_grows_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_profile, "on_cpu", lambda: True)
    small = vllm_profile.engine_arguments(_engine(model_path=str(tmp_path)))
    assert small["kv_cache_memory_bytes"] == 64 << 20
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)  # sparse
    large = vllm_profile.engine_arguments(_engine(model_path=str(tmp_path)))
    assert large["kv_cache_memory_bytes"] == 1 << 30
    assert "kv_cache_memory_bytes" not in vllm_profile.engine_arguments(_engine())


def test_settings_without_a_model_say_which_one_is_missing() -> None:
    with pytest.raises(FatalError, match=r"engine\.model_path is empty"):
        vllm_profile.engine_arguments(_engine(model_path=""))


def test_environment_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_profile, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    vllm_profile.set_environment()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
