"""``python -m benchmarks.verification_gain``: a table for each temperature."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.embedded_pair import DRAFT, TARGET, encoded_prompts
from benchmarks.verification_gain.models import (
    TreeReader,
    drafted,
    likeliest,
    likeliest_and_one_drawn,
)
from benchmarks.verification_gain.univer import univer
from sequoia_vllm.tree.token_tree import TokenTree
from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.sampling import draw_without_replacement

METHODS = ("Algorithm 2", "traversal", "UniVer", "likeliest")
OURS = {"Algorithm 2": "sequoia", "traversal": "traversal"}
PROMPT, ANSWER = 64, 48  # tokens of texts that the target writes here
AT_ONCE = 8  # contexts


@dataclass(frozen=True)
class Text:
    """A text of the target's: contexts end within its answer."""

    tokens: NDArray[np.int64]
    prompt: int


def main() -> None:
    """Prints tokens per step of each method, and what each has more than traversal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--draft-model", default=DRAFT)
    parser.add_argument("--data", type=Path, help="of examples/train_drafter draft-data")
    parser.add_argument("--contexts", type=int, default=1000, help="of each temperature")
    parser.add_argument("--sizes", default="8,16,64", help="nodes of trees, the root included")
    parser.add_argument("--temperatures", default="0.6,1")
    parser.add_argument("--repeats", type=int, default=8, help="verifications of each tree")
    parser.add_argument("--acceptance", default="shipped", help="vector that trees are for")
    options = parser.parse_args()
    for temperature in map(float, options.temperatures.split(",")):
        tokens, texts = measure(options, temperature)
        for size, found in tokens.items():
            for line in lines(temperature, size, found, texts):
                print(line, flush=True)


def measure(options: Any, temperature: float) -> tuple[dict[int, NDArray[np.float64]], int]:
    """Expected tokens of a step by size of the tree, ``[contexts, methods]``; number of texts.

    Args:
        options: The command's.
        temperature: Of target and draft.
    """
    from sequoia_vllm.library.tree_reference import find_vector
    from sequoia_vllm.measuring.engines import compare_models
    from sequoia_vllm.tree.optimize import optimize_tree

    vector = find_vector(options.acceptance)
    trees = [optimize_tree(vector, int(size)) for size in options.sizes.split(",")]
    target = TreeReader(options.model)
    rows = int(target.model.config.vocab_size)
    matching = compare_models(options.model, options.draft_model).matching
    draft = TreeReader(options.draft_model, matching, rows)
    torch.manual_seed(0)
    texts = recorded(options.data, temperature) if options.data else written(target, temperature)
    found: dict[int, list[NDArray[np.float64]]] = {tree.size: [] for tree in trees}
    todo = contexts(texts, options.contexts)
    while batch := list(islice(todo, AT_ONCE)):
        for reader in (target, draft):
            reader.read(batch)
        roots = torch.stack([context[-1] for context in batch])
        for tree in trees:
            values = expected((target, draft), tree, roots, temperature, options.repeats)
            found[tree.size].append(values)
    return {size: np.concatenate(values) for size, values in found.items()}, len(texts)


def expected(
    pair: tuple[TreeReader, TreeReader],
    tree: TokenTree,
    roots: torch.Tensor,
    temperature: float,
    repeats: int,
) -> NDArray[np.float64]:
    """Tokens of a step after what both models have read, ``[texts, methods]``.

    Args:
        pair: Target and draft.
        tree: The shape of all trees.
        roots: The texts' last tokens.
        temperature: Of both.
        repeats: Verifications of a tree by Algorithm 2 and by traversal.
    """
    target, draft = pair

    def laws(tokens: torch.Tensor) -> torch.Tensor:
        found = target.logits(tree, tokens, range(tree.size)) / temperature
        target.forget_tree()
        return found.softmax(-1)

    tokens, q = drafted(draft, tree, roots, temperature, draw_without_replacement)
    p = laws(tokens)
    values = [verified(name, tree, tokens, p, q, repeats) for name in OURS.values()]
    tokens, q = drafted(draft, tree, roots, temperature, likeliest_and_one_drawn)
    rows = (one.double().numpy() for one in (laws(tokens), q))
    ends = [univer(tree, *row).accepted for row in zip(tokens.numpy(), *rows, strict=True)]
    values.append(1 + np.stack(ends) @ tree.depths)
    tokens, q = drafted(draft, tree, roots, temperature, likeliest)
    parents = torch.tensor(tree.parents[1:])
    steps = laws(tokens)[:, parents].gather(2, tokens[:, 1:, None])[..., 0].double().numpy()
    reached = np.ones(tokens.shape)
    for node, parent in enumerate(tree.parents[1:], start=1):
        reached[:, node] = reached[:, parent] * steps[:, node - 1]
    return np.stack([*values, reached.sum(1)], 1)


def verified(
    method: str,
    tree: TokenTree,
    tokens: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    repeats: int,
) -> NDArray[np.float64]:
    """Mean tokens of a step of one of this package's methods, for each tree."""
    parents = torch.from_numpy(tree.parents_array.copy()).expand(len(tokens) * repeats, -1)
    result = method_of(method).host_function()(
        lambda requests, nodes: p[requests // repeats, nodes],
        lambda requests, nodes: q[requests // repeats, nodes],
        tokens.repeat_interleave(repeats, 0),
        parents.contiguous(),
    )
    return 1 + result.num_accepted.view(-1, repeats).double().mean(1).numpy()


def written(target: TreeReader, temperature: float) -> list[Text]:
    """What the target writes after the embedded pair's prompts."""
    prompts = torch.tensor([ids[:PROMPT] for ids in encoded_prompts(200)])
    found = target.model.generate(
        prompts, max_new_tokens=ANSWER, do_sample=True, temperature=temperature, top_k=0,
        eos_token_id=None, attention_mask=torch.ones_like(prompts),
    )  # fmt: skip
    return [Text(row, PROMPT) for row in found.numpy()]


def recorded(data: Path, temperature: float) -> list[Text]:
    """Answers at this temperature that draft-data wrote."""
    texts = []
    for path in sorted(data.rglob("*.npz")):
        with np.load(path) as shard:
            ends = shard["ends"].tolist()
            rows = zip([0, *ends[:-1]], ends, shard["prompt_lengths"].tolist(), strict=True)
            texts += [
                Text(shard["tokens"][begin:end].astype(np.int64), prompt)
                for (begin, end, prompt), own in zip(rows, shard["temperatures"], strict=True)
                if abs(float(own) - temperature) < 1e-3 and end - begin > prompt + 1
            ]
    if not texts:
        raise SystemExit(f"{data} has no answers at temperature {temperature:g}")
    return texts


def contexts(texts: Sequence[Text], count: int) -> Iterator[torch.Tensor]:
    """Beginnings of texts that end at random places of their answers, all texts in turn."""
    random = np.random.default_rng(0)
    for number in range(count):
        text = texts[number % len(texts)]
        end = int(random.integers(text.prompt + 1, len(text.tokens)))
        yield torch.from_numpy(text.tokens[:end])


def lines(temperature: float, size: int, found: NDArray[np.float64], texts: int) -> Iterator[str]:
    """A row for each method: tokens per step, and what it has more than traversal in percent.

    Standard errors take texts as independent, and contexts of one text as alike.

    Args:
        temperature: Of target and draft.
        size: Nodes of the trees.
        found: Tokens of a step, ``[contexts, methods]``.
        texts: Texts that contexts are of, in turn.
    """
    clusters = np.array([found[text::texts].mean(0) for text in range(min(texts, len(found)))])
    base = clusters[:, [METHODS.index("traversal")]]
    means, gains = clusters.mean(0), 100 * (clusters - base) / base.mean()
    root = np.sqrt(len(clusters))
    errors, of_gains = clusters.std(0) / root, gains.std(0) / root
    yield f"T = {temperature:g}, {size} nodes, {len(found)} contexts of {len(clusters)} texts"
    for row, method in enumerate(METHODS):
        tokens = f"{means[row]:.3f} ± {errors[row]:.3f}"
        yield f"  {method:12} {tokens}  {gains[:, row].mean():+.1f} ± {of_gains[row]:.1f} %"


if __name__ == "__main__":
    main()
