"""A target that costs what a larger one does, and computes exactly the same function."""

from __future__ import annotations

import shutil
from pathlib import Path


def grow_target(target: Path, folder: Path, layers: int, width: int) -> Path:
    """Writes a copy of a Llama with more layers and wider MLPs that change nothing.

    Added layers have zero output projections (each is then the identity), and
    the added MLP columns are zero: every forward pays for them in full, in
    compute and memory traffic. Speeds measured on such a model are those of a
    larger target whose draft agrees with it as often as the small pair does.

    Args:
        target: A Llama checkpoint.
        folder: Where the copy goes.
        layers: Layers to add.
        width: MLP width of all layers; at least the model's own.

    Returns:
        ``folder``.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    small = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = small.config
    own_width, own_layers = config.intermediate_size, config.num_hidden_layers
    config.num_hidden_layers = own_layers + layers
    config.intermediate_size = max(width, own_width)
    config.dtype = torch.float32
    grown = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in grown.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.02)
        for name, parameter in small.state_dict().items():
            place = grown.get_parameter(name)
            if place.shape != parameter.shape:
                place.zero_()
            place[tuple(slice(length) for length in parameter.shape)] = parameter
        for layer in grown.model.layers[own_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    grown.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder / name)
    return folder
