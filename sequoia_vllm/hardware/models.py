"""Model shapes and the model classes (target size / draft size) of the library."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sequoia_vllm.drafters.registry import HeadShape, drafter
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.json_input import read_json

_FILE = Path(__file__).with_name("models.json")


class Experts(FileModel):
    """The routed experts of a model's sparse layers, and what is beside them. A pass over more rows
    reads more of them (docs/predictions.md)."""

    count: int = Field(ge=2, description="Routed experts of a layer.")
    per_token: int = Field(ge=1, description="Routed experts that a token goes to.")
    width: int = Field(ge=1, description="Width of a routed expert.")
    layers: int = Field(ge=1, description="Layers with experts; the others are dense.")
    shared: int = Field(default=0, ge=0, description="Width of what every token goes to, too.")
    weight_bytes: float | None = Field(default=None, gt=0)  # where these alone are quantized


class Recurrent(FileModel):
    """Recurrent layers, which have a state per request in place of keys and values: Gated
    DeltaNet's, Kimi Delta Attention's, or Mamba2's, whose queries and keys are C and B."""

    layers: int = Field(ge=1, description="Layers of this kind.")
    attending: int | None = Field(default=None, ge=0)  # layers that attend; none: all others
    heads: int = Field(ge=1, description="Heads of queries and keys.")
    value_heads: int = Field(ge=1, description="Heads of values.")
    key: int = Field(ge=1, description="Size of a key.")
    value: int = Field(ge=1, description="Size of a value.")
    gate_rank: int = Field(default=0, ge=0)  # of two gates by channel; 0: others, of full rank

    @property
    def state_values(self) -> int:
        """Numbers of a request's states, in float32; last inputs are a hundredth of them."""
        return self.layers * self.value_heads * self.value * self.key

    def parameters(self, hidden: int) -> int:
        """Parameters: queries, keys, values and gates in, values out."""
        values = self.value_heads * self.value
        width = 2 * self.heads * self.key + 2 * values + self.value_heads
        gates = hidden * (values + self.value_heads)
        if self.gate_rank:
            gates = 2 * self.gate_rank * (hidden + values)
        return self.layers * (hidden * width + gates)

    def scoring_operations(self, tokens: int) -> int:
        """Products of a request's tokens with states and keys, in all layers."""
        return self.layers * self.value_heads * 4 * tokens * self.key * (self.value + tokens)


class Latent(FileModel):
    """Latent attention (MLA), whose KV cache holds one latent per token and layer."""

    query_rank: int = Field(ge=0, description="Rank of the queries' latents; 0: they have none.")
    rank: int = Field(ge=1, description="Channels of a latent without positions.")
    positions: int = Field(ge=0, description="Its channels with positions.")
    key: int = Field(ge=1, description="Size of a head's key without positions.")
    value: int = Field(ge=1, description="Size of a head's value.")

    def parameters(self, hidden: int, heads: int) -> int:
        """Parameters of a layer's attention."""
        queries, width = heads * (self.key + self.positions), self.query_rank
        into = width * (hidden + queries) if width else hidden * queries
        keys = hidden * (self.rank + self.positions) + self.rank * heads * (self.key + self.value)
        return into + keys + heads * self.value * hidden


class SharedBlocks(FileModel):
    """Attention and MLPs that layers share (Zamba 2): each layer reads them, they are kept once,
    and adapters of single layers are not counted."""

    count: int = Field(ge=1, description="Blocks that are kept, each with an attention and an MLP.")
    width: int = Field(ge=1, description="Width of what their attention reads.")


class ModelShape(FileModel):
    """What the roofline needs of a decoder-only transformer."""

    name: str = Field(min_length=1, description="Model, as on the Hugging Face Hub.")
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1, description="Width of the residual stream.")
    intermediate: int = Field(ge=1, description="Width of the gated MLP, of dense layers.")
    heads: int = Field(ge=1, description="Query heads.")
    kv_heads: int = Field(ge=1, description="Key/value heads.")
    head_size: int = Field(ge=1)
    vocab: int = Field(ge=1)
    tied: bool = Field(default=False, description="Embedding and output matrix are one.")
    gated: bool = Field(default=True, description="The MLP has a gate: three matrices, not two.")
    layer_weight_bytes: float | None = Field(default=None, gt=0)
    """Bytes of a weight in the layers, where quantized; none: the model's type."""
    kv_value_bytes: float | None = Field(default=None, gt=0)
    """Bytes of a number in the KV cache; none: as of weights."""
    experts: Experts | None = Field(default=None, description="None: all layers are dense.")
    recurrent: Recurrent | None = Field(default=None, description="None: all layers attend.")
    latent: Latent | None = Field(default=None, description="None: heads have keys of their own.")
    shared: SharedBlocks | None = None  # None: each layer has its own attention and MLP
    head: HeadShape | None = None  # of a drafter that reads the target's hidden states

    @property
    def is_quantized(self) -> bool:
        """Whether weights of its layers are."""
        return bool(self.layer_weight_bytes or (self.experts and self.experts.weight_bytes))

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers, without norms."""
        return self._dense_parameters + self._routed_parameters() - self._read_again

    @property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads)
        width = self.hidden if self.shared is None else self.shared.width
        into, out = width * (self.heads + 2 * self.kv_heads), self.hidden * self.heads
        return self.head_size * (into + out)

    @property
    def _read_again(self) -> int:
        """Parameters that a pass reads and are kept by another layer, too."""
        if self.shared is None:
            return 0
        block = self._attention_parameters + self._mlp_rows * self.intermediate
        return max(0, self.layers - self.shared.count) * block

    @property
    def _dense_parameters(self) -> int:
        """Parameters of the layers that every token is multiplied with."""
        mlp = self._mlp_rows * self.intermediate
        own = 0 if self.head is None else drafter(self.head.kind).input_parameters(self)
        own += self.attention_layers * self._attention_parameters
        if self.recurrent is not None:
            own += self.recurrent.parameters(self.hidden)
        if (experts := self.experts) is None:
            return self.layers * mlp + own
        others = self.hidden * experts.count + self._mlp_rows * experts.shared
        return (self.layers - experts.layers) * mlp + experts.layers * others + own

    @property
    def _mlp_rows(self) -> int:
        """Rows of all matrices of an MLP or expert."""
        return (3 if self.gated else 2) * self.hidden

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        if self.recurrent is None:
            return self.layers
        attending, others = self.recurrent.attending, self.layers - self.recurrent.layers
        return others if attending is None else attending

    def _routed_parameters(self, rows: float = math.inf) -> int:
        """Parameters of the routed experts that a pass over so many rows is expected to read."""
        if (experts := self.experts) is None:
            return 0
        read = experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)
        return round(experts.layers * read * self._mlp_rows * experts.width)

    @property
    def output_vocab(self) -> int:
        """Tokens that there are logits of."""
        return (self.head and self.head.output_vocab) or self.vocab

    @property
    def output_parameters(self) -> int:
        """Parameters of the output matrix, which may be the target's."""
        return self.hidden * self.output_vocab

    @property
    def reading_parameters(self) -> int:
        """Parameters of a head that only a pass over committed tokens multiplies with; else 0."""
        return 0 if self.head is None else self.head.reads * self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a forward pass multiplies each token with."""
        return self._dense_parameters + self._routed_parameters(1) + self.output_parameters

    @property
    def parameters(self) -> int:
        """All parameters, without norms and without those that a head shares with its target."""
        return self.layer_parameters + self.reading_parameters + self._vocabulary_parameters

    @property
    def _vocabulary_parameters(self) -> int:
        """Parameters of the embedding and output matrix that are the model's own."""
        if self.head is None:
            return (1 if self.tied else 2) * self.hidden * self.vocab
        return 0 if self.head.output_vocab is None else self.output_parameters

    def matmul_bytes(self, value_bytes: float, rows: float = 1) -> float:
        """Bytes that a pass over so many rows reads, the more rows the more experts, with so many
        bytes of a value in the model's type: quantization leaves the output matrix as it is."""
        layers = self._layers_bytes(value_bytes, self._dense_parameters, rows)
        return layers + self.output_parameters * value_bytes

    def reading_bytes(self, value_bytes: float) -> float:
        """Bytes of `reading_parameters`; argument as of `matmul_bytes`."""
        return self.reading_parameters * (self.layer_weight_bytes or value_bytes)

    def layers_bytes(self, value_bytes: float) -> float:
        """Bytes of all layers: what can be offloaded; argument as of `matmul_bytes`."""
        return self._layers_bytes(value_bytes, self._dense_parameters - self._read_again)

    def _layers_bytes(self, value_bytes: float, dense: int, rows: float = math.inf) -> float:
        size = self.layer_weight_bytes or value_bytes
        of_experts = (self.experts and self.experts.weight_bytes) or size
        return dense * size + self._routed_parameters(rows) * of_experts

    def weights_bytes(self, value_bytes: float) -> float:
        """Bytes of all `parameters`; argument as of `matmul_bytes`."""
        own = self.layers_bytes(value_bytes) + self.reading_bytes(value_bytes)
        return own + self._vocabulary_parameters * value_bytes

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        if self.latent is not None:
            return self.attention_layers * (self.latent.rank + self.latent.positions)
        return 2 * self.attention_layers * self.kv_heads * self.head_size

    @property
    def attention_operations(self) -> int:
        """Operations for a token and a position that it attends to, when it is decoded."""
        channels = 2 * self.head_size
        if self.latent is not None:
            channels = 2 * self.latent.rank + self.latent.positions
        return 2 * self.attention_layers * self.heads * channels

    def kv_copies(self, devices: int) -> int:
        """Devices that hold the same key/value head: more than one where heads are too few."""
        return max(1, devices // self.kv_heads)

    def check_split(self, devices: int) -> None:
        """Checks that vLLM can split the model over so many devices.

        Raises:
            ValueError: It cannot; the message names numbers that work.
        """
        if devices < 1:
            raise ValueError(f"tensor parallel size {devices}: at least 1 device")
        if self.splits(devices):
            return
        possible = [size for size in (1, 2, 4, 8, 16) if self.splits(size)]
        raise ValueError(
            f"{self.name} cannot be split over {devices} devices, which must divide its "
            f"{self.heads} heads and divide, or be divided by, its {self.kv_heads} key/value "
            f"heads: use {', '.join(map(str, possible))}"
        )

    def splits(self, devices: int) -> bool:
        """Whether vLLM can divide the heads among this many devices."""
        shared = self.kv_heads % devices == 0 or devices % self.kv_heads == 0
        return self.heads % devices == 0 and shared


class ModelClass(FileModel):
    """A target and draft size that trees are computed for."""

    id: str = Field(min_length=1, description="<target size>-<draft size>.")
    target: ModelShape
    draft: ModelShape
    devices: list[str] = Field(default=[])
    """Devices that the library has trees for with the target offloaded."""


@cache
def _catalogue() -> tuple[dict[str, ModelShape], Any]:
    """Shapes by their models' names, and all that is in the file."""
    file = read_json(_FILE, "model shapes", ValueError)
    return {shape["name"]: ModelShape.model_validate(shape) for shape in file["shapes"]}, file


@cache
def model_classes(
    part: Literal["classes", "heads", "offloaded"] = "classes",
) -> dict[str, ModelClass]:
    """The library's model classes by id. "heads": the draft is a head, of which the library has no
    trees; "offloaded": the target is offloaded."""
    shapes, file = _catalogue()
    devices = file["offloaded_on"]
    return {
        id_: ModelClass(
            id=id_, target=shapes[target], draft=shapes[draft], devices=devices.get(id_, [])
        )
        for id_, (target, draft) in file[part].items()
    }


def every_class() -> dict[str, ModelClass]:
    """All of them; a class that is in several parts is one."""
    return model_classes() | model_classes("heads") | model_classes("offloaded")


def published_shape(name: str) -> ModelShape | None:
    """The shape of a published model of our classes, or its Instruct version, by name; or None."""
    shapes, _ = _catalogue()
    found = shapes.get(name) or shapes.get(name.removesuffix("-Instruct"))
    return found and found.model_copy(update={"name": name})


def parameters_from_name(name: str) -> float | None:
    """Parameter count written in a model's name ("Qwen3-0.6B", "llama-68m"), if any."""
    found = re.findall(
        r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])", name.rsplit("/", 1)[-1]
    )
    if not found:
        return None
    number, unit = found[-1]
    return float(number) * (1e9 if unit in "bB" else 1e6)


def size_name(parameters: float | None) -> str:
    """Parameters as they are written in model names: "6.74b", "68m"."""
    if parameters is None:
        return "unknown"
    return f"{parameters / 1e9:.3g}b" if parameters >= 1e9 else f"{parameters / 1e6:.3g}m"
