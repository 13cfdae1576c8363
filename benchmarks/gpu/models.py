"""Folders of models that have published shapes and no weights: config.json alone.

vLLM makes the weights up (``load_format="dummy"``). A pass then takes as long as with trained
weights. What depends on logits means nothing: they are nearly flat, and drafts are accepted by
chance. The shapes are those of `sequoia_vllm.hardware.models`.
"""

import json
from pathlib import Path
from typing import Any

from sequoia_vllm.hardware.models import ModelClass, ModelShape, Recurrent, every_class

HEAD_POSITIONS = 2048
"""Longest context of the published EAGLE-3 head."""
_LLAMA_3_ROPE = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_TINY = {"layers": 2, "hidden": 32, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_size": 16,
         "vocab": 256}  # fmt: skip
_TINY_OUTPUT = 128


RECURRENT = "recurrent-9b"
"""Of Qwen3.5-9B's sizes: three of four layers are Gated DeltaNet's. Its own MTP layer drafts."""
_RECURRENT = ModelShape(
    name="Qwen/Qwen3.5-9B", layers=32, hidden=4096, intermediate=12288, heads=16, kv_heads=4,
    head_size=256, vocab=248320,
    recurrent=Recurrent(layers=24, heads=16, value_heads=32, key=128, value=128),
)  # fmt: skip


def pair_of(name: str, tiny: bool = False) -> ModelClass:
    """The pair of a model class of the library."""
    found = every_class()["8b-0.6b" if name == RECURRENT else name]
    if name == RECURRENT:
        found = ModelClass(id=name, target=_RECURRENT, draft=found.draft)
    if not tiny:
        return found
    return ModelClass(id=name, target=_tiny(found.target), draft=_tiny(found.draft))


def _tiny(shape: ModelShape) -> ModelShape:
    layers = min(shape.layers, _TINY["layers"])
    head, recurrent = shape.head, shape.recurrent
    if recurrent is not None:
        layers = 4  # one attends
        recurrent = Recurrent(layers=3, heads=1, value_heads=2, key=16, value=16)
    if head is not None:
        update = {"reads": 2 * _TINY["hidden"], "output_vocab": _TINY_OUTPUT}
        head = head.model_copy(update=update)
    own = {"layers": layers, "head": head, "recurrent": recurrent}
    return shape.model_copy(update={**_TINY, **own})


def write_models(
    pair: ModelClass, folder: Path, tiny: bool = False, head_positions: int = HEAD_POSITIONS
) -> tuple[str, str]:
    """Writes both models; their folders."""
    written = []
    for shape in (pair.target, pair.draft):
        config = _config(shape, tiny, head_positions)
        name = f"{shape.name.split('/')[-1]}-{config['max_position_embeddings']}"
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        written.append(str(folder / name))
    return written[0], written[1]


def _config(shape: ModelShape, tiny: bool, head_positions: int) -> dict[str, Any]:
    """The shape as the publisher's config.json has it; bfloat16, whatever the publisher chose."""
    config = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size,
        "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied,
        "torch_dtype": "float32" if tiny else "bfloat16", "hidden_act": "silu",
        "attention_bias": False, "initializer_range": 0.02,
    }  # fmt: skip
    if shape.name.startswith("Qwen/"):
        return config | _qwen3(shape) | (_qwen3_5(shape) if shape.recurrent else {})
    config |= {"model_type": "llama", "mlp_bias": False, "rms_norm_eps": 1e-5}
    config |= {"bos_token_id": 1, "eos_token_id": 2} if tiny else _LLAMA_3_ENDS
    if shape.head is not None:
        return config | _eagle3(shape, tiny, head_positions)
    factor = 8.0 if shape.layers > 16 else 32.0  # Llama 3.1 and 3.2
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {"factor": factor, **_LLAMA_3_ROPE},
    }


_LLAMA_3_ENDS = {"bos_token_id": 128000, "eos_token_id": 128001}


def _eagle3(shape: ModelShape, tiny: bool, positions: int) -> dict[str, Any]:
    """A head as EAGLE-3's authors publish it, without rope scaling.

    vLLM's table of drafted tokens is all zeros where weights are made up: draft token i is target
    token i.
    """
    assert shape.head is not None
    own: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": positions,
        "draft_vocab_size": shape.head.output_vocab, "rope_theta": 10000.0,
    }  # fmt: skip
    # vLLM's default layers to read do not exist in a target this small.
    read = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    return {**own, **read, "eagle_config": read} if tiny else own


def _qwen3(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "bos_token_id": min(151643, shape.vocab - 2), "eos_token_id": min(151645, shape.vocab - 1),
        "max_position_embeddings": 40960, "max_window_layers": shape.layers, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


def _qwen3_5(shape: ModelShape) -> dict[str, Any]:
    assert shape.recurrent is not None
    turned = max(0.25, 16 / shape.head_size)  # so that a tiny head has pairs for all three axes
    pairs = int(turned * shape.head_size) // 2
    rope = {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": turned,
        "mrope_section": [(pairs + 2 - axis) // 3 for axis in range(3)], "mrope_interleaved": True,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (shape.layers // 4),
        "rope_parameters": rope, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": shape.recurrent.heads,
        "linear_num_value_heads": shape.recurrent.value_heads,
        "linear_key_head_dim": shape.recurrent.key, "linear_value_head_dim": shape.recurrent.value,
    }  # fmt: skip
