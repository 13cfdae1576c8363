"""Fields of a model's configuration, by Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from sequoia_vllm.errors import SequoiaError


class ShapeError(SequoiaError, ValueError):
    """A configuration that says too little, or describes something that the cost model does not
    cover.
    """


class Fields:
    """The fields of one configuration.

    Args:
        config: An object or mapping with Hugging Face's names (``hidden_size``).
    """

    def __init__(self, config: Any, name: str = "the draft") -> None:
        self.config = config
        self.name = name

    def value(self, key: str) -> Any:
        """A field; None where there is none of this name."""
        return _field(self.config, key)

    def nested(self, place: str, key: str) -> Any:
        """A field of one of the fields; None where there is none."""
        return _field(self.value(place), key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive number.

        Raises ShapeError: the field is missing and has no default, or is something else.
        """
        found = self.value(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            what = "has no" if found is None else f"has {found!r} as"
            raise ShapeError(f"the configuration of {self.name} {what} {key}")
        return found

    def hidden_state_layers(self) -> list[int]:
        """Layers of the target whose hidden states a head reads; empty: left to vLLM's defaults."""
        names = "eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids", "target_layer_ids"
        places = self.config, self.value("eagle_config"), self.value("dflash_config")
        found = next((f for place in places for name in names if (f := _field(place, name))), ())
        return [int(layer) for layer in found]


def _field(place: Any, key: str) -> Any:
    return place.get(key) if isinstance(place, Mapping) else getattr(place, key, None)
