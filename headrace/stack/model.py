"""Makes a tiny Llama on the spot: random weights, its own tokenizer, its own chat template.

A real model for a real vLLM, without a download: 0.1 M parameters, 0.5 MB, about a second of work.
Its answers mean nothing, but the same request gives the same answer on every machine. Neither torch
nor transformers is imported: the files are written in their published formats.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT_TOKENS = 2_048

_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
_BOS, _EOS, _PAD = range(3)
_CORPUS = "the quick brown fox jumps over the lazy dog and a headrace brings water to the wheel of the mill "
_VOCABULARY = 283


def make_tiny_model(path: Path, *, hidden: int = 64, layers: int = 2, heads: int = 2, kv_heads: int = 1) -> Path:
    """Writes the model to the folder ``path`` and returns it; does nothing when it is there already.

    The folder appears whole or not at all: it is written beside and renamed, so that any number of
    processes may make it at once. Needs ``tokenizers``, ``safetensors`` and ``numpy``, which come with vLLM.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        vocabulary = _write_tokenizer(beside)
        config = _config(vocabulary, hidden, layers, heads, kv_heads)
        _write_weights(beside / "model.safetensors", config)
        _write_json(beside / "config.json", config)
        _write_json(
            beside / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
        )
        beside.chmod(0o755)
        (beside / "model.safetensors").chmod(0o644)
        try:
            os.rename(beside, path)
        except OSError:
            # Another process was first; its model is equal to ours.
            if not (path / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return path


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[_BOS],
            "eos_token": _SPECIAL[_EOS],
            "pad_token": _SPECIAL[_PAD],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    size: int = tokenizer.get_vocab_size()
    return size


def _config(vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _write_weights(file: Path, config: dict[str, Any]) -> None:
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden)}
    norms = ["model.norm"]
    for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.self_attn.q_proj": (hidden, hidden), f"{layer}.self_attn.o_proj": (hidden, hidden)}
        shapes |= {f"{layer}.self_attn.{name}_proj": (kv, hidden) for name in ("k", "v")}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, inner)}
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {f"{name}.weight": random.normal(0.0, 0.02, shape).astype("float32") for name, shape in shapes.items()}
    weights |= {f"{name}.weight": numpy.ones(hidden, "float32") for name in norms}
    save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    print(make_tiny_model(Path(sys.argv[1])))
