"""Models for the tests: the embedded pair, and tiny ones made on the spot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

MODELS = Path(__file__).parents[2] / "examples" / "models"
TARGET = str(MODELS / "target")
DRAFT = str(MODELS / "draft")
# What configurations of the tiny models have in common.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


def prompts(count: int) -> list[str]:
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def save_config(folder: Path, config: dict[str, Any]) -> str:
    """Saves a configuration alone, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def save_llama(path: Path, seed: int, scale: float = 1.0, **config) -> Path:
    """A random Llama; ``scale`` multiplies its output weights (a sharper distribution)."""
    settings = {**SMALL, "num_hidden_layers": 1, "tie_word_embeddings": False, **config}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(path)
    return path


def save_pair(directory: Path, target: Any, draft: Any) -> tuple[str, str]:
    """Saves both below a folder, and returns their own folders."""
    paths = str(directory / "target"), str(directory / "draft")
    for model, path in zip((target, draft), paths, strict=True):
        model.save_pretrained(path)
    return paths


def save_broken(path: Path, draft: str | Path, tokens: Any) -> str:
    """A copy of this draft that gives NaN once it has read one of these tokens, an index."""
    shutil.copytree(draft, path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def save_spoilt_pair(folder: Path, token: int, like: int, value: float) -> tuple[str, str]:
    """Copies of the embedded pair. The target reads this token as NaN or infinity. The draft
    drafts it wherever it would another one."""
    for name, source in (("target", TARGET), ("draft", DRAFT)):
        path = shutil.copytree(source, folder / name)
        config = json.loads((path / "config.json").read_text())
        save_config(path, {**config, "tie_word_embeddings": False})
        weights = load_file(path / "model.safetensors")
        read = weights["model.embed_tokens.weight"]
        head = weights.setdefault("lm_head.weight", read.clone())
        if name == "target":
            read[token] = value
        else:
            head[token] = 1.2 * head[like]
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(folder / "target"), str(folder / "draft")


def save_random_draft(path: Path) -> Path:
    """An untrained draft with the embedded pair's vocabulary and tokenizer."""
    save_llama(path, seed=1, vocab_size=4096, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, path / name)
    return path


def next_probabilities(
    path: str | Path, tokens: list[list[int]], temperature: float, top_p: float = 1.0,
    top_k: int = 0, min_p: float = 0.0, edit: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> np.ndarray:  # fmt: skip
    """Exact law of the token after each of ``tokens``, ``[rows, places, V]``.

    As vLLM's parameters of these names say: of each the tokens are kept that are ``min_p``
    as likely as the likeliest, of these the ``top_k`` likeliest (0: all), and of these the
    likeliest that together hold ``top_p``. Before all that ``edit`` changes the logits,
    float64 ``[rows, places, V]``.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = edit(model(torch.tensor(tokens)).logits.double())
    law = torch.softmax(logits / temperature, dim=-1).numpy()
    order = np.argsort(-law, axis=-1)
    ranked = np.take_along_axis(law, order, axis=-1)
    ranked[ranked < min_p * ranked[..., :1]] = 0
    if top_k:
        ranked[..., top_k:] = 0
    ranked /= ranked.sum(axis=-1, keepdims=True)
    kept = np.cumsum(ranked, axis=-1) - ranked < top_p
    truncated = np.zeros_like(law)
    np.put_along_axis(truncated, order, ranked * kept, axis=-1)
    return truncated / truncated.sum(axis=-1, keepdims=True)


def save_word_tokenizer(path: Path) -> None:
    """A tokenizer for the model in ``path``: word i is "wi", and all others are word 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w2").save_pretrained(path)
