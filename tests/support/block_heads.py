"""Tiny heads that correct a block by the tokens drafted in it, with random weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.heads import dflash_parts, random_matrices, save_head


def save_dspark(
    directory: Path, target: str, tokens: list[int] | None = None, scale: float = 1.0,
    root_predicts: bool = True,
) -> str:  # fmt: skip
    """A DSpark head of one layer: blocks of 8, mask token 0.

    Args:
        target: Folder of a Llama model, whose embedding it shares.
        tokens: The target's tokens that it may draft, ascending, by a copy of their part of the
            target's output; None: all.
        scale: How sure it is of what it drafts.
        root_predicts: The root's position predicts the first level.
    """
    config, weights = dflash_parts(target, scale)
    random, rank = random_matrices(1), 8
    vocab = config["vocab_size"]
    drafted = vocab if tokens is None else len(tokens)
    weights |= {
        "markov_head.markov_w1.weight": random(vocab, rank) * rank**0.5,
        "markov_head.markov_w2.weight": scale * random(drafted, rank) * rank**0.5,
    }
    if tokens is not None:
        output = load_file(Path(target) / "model.safetensors")["lm_head.weight"]
        weights["lm_head.weight"] = output[tokens]
        weights["d2t"] = torch.tensor(tokens) - torch.arange(drafted)
    own = {
        "architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "draft_vocab_size": drafted,
        "sample_from_anchor": root_predicts,
    }  # fmt: skip
    return save_head(directory, {**config, **own}, weights)


def save_dflash2(directory: Path, target: str, top_k: int = 4, scale: float = 1.0) -> str:
    """A DFlash2 head of one layer with so many candidates: blocks of 8, mask token 0."""
    config, weights = dflash_parts(target, scale)
    random, rank = random_matrices(1), 8
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights |= _convolutions(hidden) | {
        "candidate_selector.predecessor_codebook": random(vocab, rank) * rank**0.5,
        "candidate_selector.successor_codebook": scale * random(vocab, rank) * rank**0.5,
        "candidate_selector.hidden_projection.weight": random(rank, hidden),
    }
    own = {"selector_rank": rank, "selector_top_k": top_k, **_CONVOLUTION}
    config["dflash_config"] |= own
    return save_head(directory, {**config, "architectures": ["DFlash2DraftModel"]}, weights)


def save_lilicorr(directory: Path, target: str) -> str:
    """A LiLiCorr head of one layer with four candidates: blocks of 8, mask token 0."""
    config, weights = dflash_parts(target)
    random, heads, factors, block = random_matrices(1), 2, 8, config["block_size"]
    hidden = config["hidden_size"]

    def matrix(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        bias = 0.1 * random(1, rows)[0]
        return {f"{name}.weight": random(rows, columns), f"{name}.bias": bias}

    own = {
        **matrix("pass_hidden_proj", hidden, hidden), **matrix("context_proj", hidden, hidden),
        "feature_norm.weight": torch.ones(5), "feature_norm.bias": torch.zeros(5),
        **matrix("feature_mlp.up_proj", hidden, 5),
        **matrix("feature_mlp.down_proj", hidden, hidden),
        "slot_embedding": random(block - 1, hidden).view(1, 1, block - 1, 1, hidden),
        "rank_embedding": random(4, hidden).view(1, 1, 1, 4, hidden),
        "relative_slot_bias": random(heads, 2 * block - 1), "same_slot_bias": random(1, heads)[0],
        "layers.0.attn_norm.weight": torch.ones(hidden),
        "layers.0.attn.in_proj_weight": random(3 * hidden, hidden),
        "layers.0.attn.in_proj_bias": torch.zeros(3 * hidden),
        **matrix("layers.0.attn.out_proj", hidden, hidden),
        "layers.0.mlp_norm.weight": torch.ones(hidden),
        **matrix("layers.0.mlp.up_proj", hidden, hidden),
        **matrix("layers.0.mlp.down_proj", hidden, hidden),
        "output_norm.weight": torch.ones(hidden), "anchor_norm.weight": torch.ones(hidden),
        **matrix("factor_input_proj", hidden, 3 * hidden),
        **matrix("out_head", factors, hidden), **matrix("in_head", factors, hidden),
        **matrix("anchor_out_head", factors, hidden),
    }  # fmt: skip
    weights |= {f"lilicorr.{name}": weight for name, weight in own.items()}
    weights |= _convolutions(hidden)
    config["dflash_config"] |= {
        "lilicorr_enabled": True, "lilicorr_hidden_size": hidden, "lilicorr_num_layers": 1,
        "lilicorr_candidate_topk": 4, "lilicorr_num_heads": heads, "lilicorr_mlp_ratio": 1.0,
        "lilicorr_factor_dim": factors, "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 4.0, "block_size": block, **_CONVOLUTION,
    }  # fmt: skip
    return save_head(directory, {**config, "architectures": ["LiLiCorrDraftModel"]}, weights)


_CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 8}


def _convolutions(hidden: int) -> dict[str, torch.Tensor]:
    """Convolutions of the only layer: mostly a position itself, and a little of those before it."""
    random, taps = random_matrices(2), _CONVOLUTION["conv_kernel_size"]
    groups = hidden // _CONVOLUTION["conv_group_size"]
    base = torch.zeros(2, taps, hidden)
    base[:, 0], base[:, 1] = 1.0, 0.3
    return {
        name: tensor
        for place in ("attention_conv", "mlp_conv")
        for name, tensor in (
            (f"layers.0.{place}.base_kernel", base.clone()),
            (f"layers.0.{place}.kernel_projection.weight", 0.2 * random(2 * taps * groups, hidden)),
        )
    }
