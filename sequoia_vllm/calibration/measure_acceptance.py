"""Counts how often the verifier accepts drafts on a live engine, and what the counts tell."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sequoia_vllm.drafters.registry import draft_option, drafts_from_text, is_kind_alone
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.library.files import AcceptanceCounts, AcceptanceFile
from sequoia_vllm.measuring.engines import (
    EngineSpec,
    Progress,
    load_config,
    longest_context,
    open_engine,
    room_for,
)
from sequoia_vllm.measuring.provenance import of_measurement
from sequoia_vllm.prompts import describe_prompts, encode_prompts, load_prompts, load_tokenizer
from sequoia_vllm.tree import Acceptance, TokenTree
from sequoia_vllm.verification.methods import DEFAULT_METHOD

_BATCHES = 2  # completed between two looks at the counts: few requests wait for the last
_Z95 = 1.959964
_DIGITS = 6
_STEP = 1e-3  # of a share, for slopes
FEWEST_TRIALS = 100  # with fewer trials, we treat a share as noise
TAIL = 6  # levels of a probing tree below the counted ones, as far as the draft can
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AcceptanceEstimate:
    """An acceptance vector with its uncertainty; each field is ``[depth][child]``."""

    acceptance: list[list[float]]  # share of trials in which the child was accepted
    low: list[list[float]]
    high: list[list[float]]  # ends of the Wilson 95 % intervals, with `low`
    trials: list[list[int]]  # how often a node of this depth with this child was reached


def probing_tree(branch: int, depth: int = 1, tail: int = 0) -> TokenTree:
    """The wide tree whose children are counted.

    Depth 1 is a star: a root with ``branch`` children. Below it, the first two children of each
    level's first node have ``branch`` children, too: they are reached most often, and one of them
    follows less likely tokens, so a row counts not only easy contexts.

    A tree starts where the one before it ended. If trees ended with the counted levels, many would
    start within a stretch that is easy to draft. So ``tail`` more levels of two children follow.
    """
    parents = [-1]
    leading, second = 0, None
    for level in range(depth + tail):
        children = branch if level < depth else min(2, branch)
        first = len(parents)
        parents += [leading] * children
        if second is not None:
            parents += [second] * children
        leading, second = first, first + 1 if children > 1 else None
    return TokenTree(tuple(parents))


def wilson_interval(
    successes: ArrayLike, trials: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ends of Wilson's 95 % score interval of a proportion; 0 and 1 without trials. Any shape."""
    n = np.maximum(trials, 1)
    share, scale = np.divide(successes, n), 1 + _Z95**2 / n
    middle = (share + _Z95**2 / (2 * n)) / scale
    spread = _Z95 * np.sqrt(share * (1 - share) / n + (_Z95 / (2 * n)) ** 2) / scale
    ends = np.maximum(middle - spread, 0.0), np.minimum(middle + spread, 1.0)
    return np.where(trials, ends[0], 0.0), np.where(trials, ends[1], 1.0)


def estimate_acceptance(offered: Counts, accepted: Counts) -> AcceptanceEstimate:
    """The acceptance vector of these counts (`StepStats.offered`, `StepStats.accepted`).

    Rows below the root with fewer than 100 trials are dropped: the optimizer uses the last row for
    all deeper levels. Late children may have fewer, as trees are trimmed from the end. A row's
    shares are scaled to 1 if they sum to more.

    Raises:
        CalibrationError: No tree was verified.
    """
    if not offered or not offered[0] or offered[0][0] == 0:
        raise CalibrationError("no tree was verified: give more prompts, or more tokens for each")
    enough = takewhile(lambda tried: tried[0] >= FEWEST_TRIALS, offered[1:])
    kept = slice(1 + len(list(enough)))
    tried, taken = np.asarray(offered[kept]), np.asarray(accepted[kept])
    shares = taken / np.maximum(tried, 1)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
    found = (shares, *wilson_interval(taken, tried))
    acceptance, low, high = (part.round(_DIGITS).tolist() for part in found)
    return AcceptanceEstimate(acceptance, low, high, tried.tolist())


def precision(estimate: AcceptanceEstimate) -> float:
    """How well the vector is known: the number that `AcceptanceSettings.precision` bounds.
    It is the largest product of an entry's half-width (95 %) and the share of trees that reach its
    depth: the expected accepted nodes of that depth may be wrong by so much."""
    roots = estimate.trials[0][0]
    return max(
        (high - low) / 2 * trials[0] / roots
        for lows, highs, trials in zip(estimate.low, estimate.high, estimate.trials, strict=True)
        for low, high in zip(lows, highs, strict=True)
    )


def tokens_margin(tree: TokenTree, acceptance: Acceptance, trials: Counts) -> float:
    """Half-width of the 95 % interval of a tree's expected tokens, from counting noise alone;
    ``trials`` are those of each entry of the vector (`AcceptanceEstimate`)."""
    table, tokens = acceptance.table, tree.expected_tokens(acceptance)
    variance = 0.0
    for depth, tried in enumerate(trials):
        if not tried or tried[0] == 0:
            continue
        slopes = np.empty(len(tried))
        for child in range(len(tried)):
            lower = table.copy()
            lower[depth, child] *= 1 - _STEP
            change = tokens - tree.expected_tokens(Acceptance(lower))
            slopes[child] = change / max(_STEP * table[depth, child], _STEP**2)
        # At most one of a node's children is accepted, so the shares are one multinomial's.
        shares = table[depth, : len(tried)]
        variance += float(shares @ slopes**2 - (shares @ slopes) ** 2) / tried[0]
    return _Z95 * math.sqrt(max(variance, 0.0))


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to measure, and how."""

    engine: EngineSpec
    _: KW_ONLY
    prompts: Path | None = None  # file with prompts (`load_prompts`); None: the built-in set
    max_tokens: int = 128
    """Tokens per completion. Make them as long as those to be served: long greedy texts repeat
    themselves, and repetition is easy to draft."""
    temperature: float = 0.0
    top_p: float = 1.0  # sampling of every request, with `temperature`, which is 0 for greedy
    branch: int = 10  # children offered at a node: entries of a row
    depth: int = 5  # the most rows of the vector
    precision: float = 0.02  # stop when the vector is known this well (see `precision`)
    max_tokens_total: int = 100_000
    batch_size: int = 8


def measure_acceptance(
    settings: AcceptanceSettings, progress: Progress | None = None
) -> AcceptanceFile:
    """Runs the engine with a wide tree and counts accepted nodes.

    Raises:
        PromptError, CalibrationError: Prompts or models cannot be used, or no tree was verified.
    """
    from sequoia_vllm.engine.frontend.drafts import drafted_levels

    engine = settings.engine
    encoded = encode_prompts(load_prompts(settings.prompts), load_tokenizer(engine.target))
    from_text = drafts_from_text(engine.draft)
    levels = None if is_kind_alone(engine.draft) else drafted_levels(load_config(engine.draft))
    tail = TAIL if levels is None else max(0, min(TAIL, levels - settings.depth))
    tree = probing_tree(settings.branch, settings.depth, tail)
    # Trees must not be trimmed: leave room for a whole one after the last token.
    room = longest_context(engine.target) - tree.size
    prompts = [ids for ids in encoded if len(ids) + settings.max_tokens <= room]
    if not prompts:
        raise CalibrationError(
            f"no prompt leaves room for {settings.max_tokens} tokens in the target's context: "
            "give shorter prompts, or a smaller --max-tokens"
        )
    longest = max(map(len, prompts)) + settings.max_tokens + tree.size
    speculation = {
        "method": "sequoia", **draft_option(engine.draft),
        "tree": {"parents": list(tree.parents)}, "verification": DEFAULT_METHOD,
        # A model's vector is the draft's alone. Without a model, text is a part of the draft.
        "retrieval": from_text,
        "dynamic_tree": False,  # counts by child are a static tree's
        # Draft the whole tree at every batch size.
        "num_speculative_tokens_per_batch_size": [(1, 1, tree.num_speculative_tokens)],
    }  # fmt: skip
    report = progress or (lambda what, done, total: None)
    report("starting the engine", 0, 1)
    with open_engine(
        engine, seed=0, speculative_config=speculation, enable_prefix_caching=False,
        **room_for(longest, settings.batch_size, tree.size),
    ) as llm:  # fmt: skip
        counts = _counted(settings, prompts, tree.num_speculative_tokens, llm, report)
    return _file(settings, counts, len(prompts))


def _counted(
    settings: AcceptanceSettings,
    encoded: list[list[int]],
    most_drafts: int,
    llm: Any,
    report: Progress,
) -> AcceptanceCounts:
    """Completes prompts until the vector is known, or there is nothing more to count: sampled ones
    again and again, greedy ones once, as their repetition would make intervals too narrow."""
    from vllm import SamplingParams

    # No seed: seeded requests are verified by matching, not by Algorithm 2.
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens,
        detokenize=False,
    )  # fmt: skip
    is_greedy = settings.temperature == 0
    prompts = iter(encoded) if is_greedy else cycle(encoded)
    llm.collective_rpc("sequoia_limit_drafts", args=(most_drafts,))  # so none is a branch
    llm.collective_rpc("sequoia_stats", args=(True,))
    asked, generated = 0, 0
    stopped_by: Literal["precision", "tokens", "prompts"] | None = None
    while stopped_by is None:
        left = -(-(settings.max_tokens_total - generated) // settings.max_tokens)
        chosen = list(islice(prompts, min(left, _BATCHES * settings.batch_size)))
        requests = [{"prompt_token_ids": prompt} for prompt in chosen]
        outputs = llm.generate(requests, params, use_tqdm=False)
        asked += len(chosen)
        generated += sum(len(one.outputs[0].token_ids) for one in outputs)
        # The counters of `StepStats.to_dict`.
        stats = llm.collective_rpc("sequoia_stats", args=(False,))[0]
        offered, accepted = (stats[name][: settings.depth] for name in ("offered", "accepted"))
        known, trees = precision(estimate_acceptance(offered, accepted)), stats["tree_steps"]
        # Until the wanted precision is reached, or all tokens are spent.
        more = (known / settings.precision) ** 2
        more = max(1.0, min(more, settings.max_tokens_total / max(1, generated)))
        wanted = f"within {known:.3f}, to be {settings.precision:g}"
        report(wanted, trees, round(trees * more))
        if known <= settings.precision:
            stopped_by = "precision"
        elif generated >= settings.max_tokens_total:
            stopped_by = "tokens"
        elif is_greedy and asked == len(encoded):
            stopped_by = "prompts"
    return AcceptanceCounts(
        stopped_by=stopped_by, precision=known, wanted_precision=settings.precision,
        most_tokens=settings.max_tokens_total, trees=trees, tokens=stats["tokens"],
        offered=offered, accepted=accepted,
    )  # fmt: skip


def _file(
    settings: AcceptanceSettings, counts: AcceptanceCounts, prompts_used: int
) -> AcceptanceFile:
    engine = settings.engine
    estimate = estimate_acceptance(counts.offered, counts.accepted)
    shape = slice(None) if len(estimate.acceptance) > 1 else 0
    sampled = settings.temperature > 0
    how = f"temperature {settings.temperature:g}" if sampled else "greedy"
    if sampled and settings.top_p < 1:
        how += f", top-p {settings.top_p:g}"
    described = describe_prompts(settings.prompts, load_prompts(settings.prompts))
    return AcceptanceFile(
        name=f"tuned-t{settings.temperature:g}",
        description=f"{engine.target} with {engine.draft}, {how}, {counts.trees} trees on "
        f"{described['prompts']} prompts.",
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        target=engine.target,
        draft=engine.draft,
        temperature=settings.temperature,
        top_p=settings.top_p if sampled else None,
        acceptance=estimate.acceptance[shape],
        trials=estimate.trials[shape],
        low=estimate.low[shape],
        high=estimate.high[shape],
        calibration=counts,
        provenance=of_measurement(settings, **described, prompts_used=prompts_used),
    )
