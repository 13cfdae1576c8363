"""Was a head made for this target? Its configuration tells something of its own target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def target_differences(head: Any, target: Any) -> list[str]:
    """What a head's configuration says of its target that is not so of this one.

    Args:
        head: The head's configuration.
        target: The target's, that of its text model.

    Returns:
        Each in words; empty if the head may have been made for it.
    """
    differences = [
        _different("hidden size", target_hidden_size(head), target.hidden_size),
        _different("vocabulary", getattr(head, "vocab_size", None), target.vocab_size, " tokens"),
        _different(
            "number of layers", getattr(head, "num_target_layers", None), target.num_hidden_layers
        ),
    ]
    highest = max(hidden_state_layers(head), default=0)
    if highest > target.num_hidden_layers:
        differences.append(
            f"it reads the hidden states of layer {highest}, and the target has "
            f"{target.num_hidden_layers} layers"
        )
    return [difference for difference in differences if difference]


def target_hidden_size(head: Any) -> int | None:
    """Width of the hidden states that a head reads; None: its configuration has no widths."""
    stated = getattr(head, "target_hidden_size", None)
    return stated if stated is not None else getattr(head, "hidden_size", None)


def hidden_state_layers(head: Any) -> list[int]:
    """Layers of the target whose hidden states a head reads; empty: left to vLLM's defaults."""
    names = "eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids", "target_layer_ids"
    places = head, getattr(head, "eagle_config", None), getattr(head, "dflash_config", None)
    for place in places:
        for name in names:
            found = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
            if found:
                return [int(layer) for layer in found]
    return []


def _different(what: str, of_head: int | None, of_target: int, unit: str = "") -> str | None:
    if of_head is None or of_head == of_target:
        return None
    return f"its target's {what} is {of_head:,}{unit}, and this one's {of_target:,}{unit}"
