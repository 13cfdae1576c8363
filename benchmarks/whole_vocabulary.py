"""Gives a draft that knows some of the target's tokens the target's whole vocabulary.

``python -m benchmarks.whole_vocabulary TARGET DRAFT FOLDER`` writes a draft that proposes the same
tokens. vLLM's own chains can then run on Model Runner V2 with it, side by side with trees: with
another vocabulary vLLM falls back to V1.

Tokens that the draft lacks get a logit far below all others, which needs a hidden state whose sign
is known. So the hidden size grows by some channels. One of them holds a constant, and the others
hold zeros. The constant is too small to change what norms divide by. Rounding aside, other logits
stay; where several of the draft's tokens mean one of the target's, one of them is kept.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.synthetic_target.checkpoint import (
    SourceCheckpoint,
    copy_tokenizer,
    find_checkpoint,
    make_new,
    write_checkpoint,
)
from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.measuring.engines import compare_models

if TYPE_CHECKING:
    from torch import Tensor

    from sequoia_vllm.vocabulary.matching import Matching

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CONSTANT = 0.01
# The final norm's weight for the constant. Such a logit is then the negative of 10,000 over the
# root mean square of the final state, which is 1 to 300 in models that we looked at.
_AMPLIFIED = 1e6
_DTYPES = ("bfloat16", "float32")  # float16 ends at 65,504
_ALIGNED = 16  # channels, which GPUs read at once
_EMBEDDING, _OUTPUT, _FINAL_NORM = (
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
)  # fmt: skip


@app.command()
def main(
    target: Annotated[str, typer.Argument(help="The target's folder.")],
    draft: Annotated[Path, typer.Argument(help="Folder of a Llama-type draft.")],
    folder: Annotated[Path, typer.Argument(help="Where the new draft goes.")],
) -> None:
    """Give a draft that knows some of the target's tokens the target's whole vocabulary."""
    with friendly_errors():
        write(target, draft, folder, matching_of(target, draft))


def matching_of(target: str, draft: Path) -> Matching:
    """How the tokens of two models with different vocabularies belong together."""
    matching = compare_models(target, str(draft)).matching
    if matching is None:
        raise SequoiaError(f"{draft} has the target's vocabulary already")
    return matching


def write(target: str, draft: Path, folder: Path, matching: Matching) -> None:
    """Writes the draft with the target's whole vocabulary and tokenizer, into an empty folder."""
    config = json.loads((draft / "config.json").read_text("utf-8"))
    check(config, draft)
    if not (Path(target) / "tokenizer.json").is_file():
        raise SequoiaError(f"{target}: give the target's folder, with its tokenizer.json")
    make_new(folder)
    checkpoint = SourceCheckpoint(find_checkpoint(str(draft)))
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    write_checkpoint(folder, iter(widened(tensors, config, matching).items()))
    copy_tokenizer(Path(target), folder)
    (folder / "config.json").write_text(json.dumps(widened_config(config, matching), indent=1))


def check(config: dict[str, Any], draft: Path) -> None:
    """Checks that a draft with this config.json can be widened."""
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise SequoiaError(f"{draft} is {config.get('architectures')}; can use LlamaForCausalLM")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise SequoiaError(f"{draft} has biases, which cannot be widened: use another draft")
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise SequoiaError(f"{draft} has {dtype} weights; convert it to {' or '.join(_DTYPES)}")


def wide_size(config: dict[str, Any]) -> int:
    """The new hidden size: transformers wants a multiple of the heads."""
    step = math.lcm(config["num_attention_heads"], _ALIGNED)
    return int((config["hidden_size"] // step + 1) * step)


def widened_config(config: dict[str, Any], matching: Matching) -> dict[str, Any]:
    """The draft's configuration with the new sizes."""
    hidden, wide = config["hidden_size"], wide_size(config)
    return {
        **config,
        "vocab_size": len(matching.drawn),
        "tie_word_embeddings": False,
        "hidden_size": wide,
        "head_dim": config.get("head_dim") or hidden // config["num_attention_heads"],
        "rms_norm_eps": config["rms_norm_eps"] * hidden / wide,
    }


def widened(
    tensors: dict[str, Tensor], config: dict[str, Any], matching: Matching
) -> dict[str, Tensor]:
    """The draft's tensors with more channels and the target's tokens."""
    import torch
    from torch.nn.functional import pad

    hidden, wide = config["hidden_size"], wide_size(config)
    added = wide - hidden
    drawn = torch.from_numpy(matching.drawn)
    read = torch.arange(len(drawn)) if matching.read is None else torch.from_numpy(matching.read)
    embedding = tensors[_EMBEDDING]
    output = tensors.get(_OUTPUT, embedding)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "norm" in name:  # of more channels: they divide by the root of a smaller mean
            found[name] = pad(tensor.float() * (hidden / wide) ** 0.5, (0, added)).to(tensor.dtype)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = pad(tensor, (0, 0, 0, added))
        elif name not in (_EMBEDDING, _OUTPUT):
            found[name] = pad(tensor, (0, added))
    found[_EMBEDDING] = pad(embedding[read], (0, added))
    found[_EMBEDDING][:, hidden] = _CONSTANT
    found[_OUTPUT] = pad(output[drawn.clamp(min=0)], (0, added))
    found[_OUTPUT][drawn < 0] = 0
    found[_OUTPUT][drawn < 0, hidden] = -1
    found[_FINAL_NORM][hidden] = _AMPLIFIED
    return found


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.whole_vocabulary")
