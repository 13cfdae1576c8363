"""Counts how often the verifier accepts drafts on a live engine."""

import datetime
from contextlib import AbstractContextManager
from itertools import cycle, islice
from typing import Any, Literal

from sequoia_vllm.calibration.acceptance_task import (
    AcceptanceTask,
    estimate_acceptance,
    precision,
)
from sequoia_vllm.drafters.registry import draft_option, drafts_from_text
from sequoia_vllm.library.files import AcceptanceCounts, AcceptanceFile
from sequoia_vllm.measuring.engines import Progress, open_engine, room_for
from sequoia_vllm.measuring.provenance import (
    model_hashes,
    provenance,
    settings_as_data,
    synthetic_models,
)
from sequoia_vllm.prompts import load_prompts, prompts_sha256, source_name
from sequoia_vllm.verification.methods import DEFAULT_METHOD

_BATCHES = 2  # completed between two looks at the counts: few requests wait for the last


def measure_acceptance(task: AcceptanceTask, progress: Progress | None = None) -> AcceptanceFile:
    """Runs the engine with a wide tree and counts accepted nodes. Raises CalibrationError if the
    models cannot be used, or no tree was verified."""
    report = progress or (lambda what, done, total: None)
    report("starting the engine", 0, 1)
    with _engine(task) as llm:
        counts = _counted(task, llm, report)
    return _file(task, counts)


def _counted(task: AcceptanceTask, llm: Any, report: Progress) -> AcceptanceCounts:
    """Completes prompts until the vector is known, or there is nothing more to count: sampled ones
    again and again, greedy ones once, as their repetition would make intervals too narrow."""
    from vllm import SamplingParams

    settings = task.settings
    # No seed: seeded requests are verified by matching, not by Algorithm 2.
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens,
        detokenize=False,
    )  # fmt: skip
    is_greedy = settings.temperature == 0
    prompts = iter(task.prompts) if is_greedy else cycle(task.prompts)
    llm.collective_rpc("sequoia_stats", args=(True, False))
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
        stats = llm.collective_rpc("sequoia_stats", args=(False, False))[0]
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
        elif is_greedy and asked == len(task.prompts):
            stopped_by = "prompts"
    return AcceptanceCounts(
        stopped_by=stopped_by, precision=known, wanted_precision=settings.precision,
        most_tokens=settings.max_tokens_total, trees=trees, tokens=stats["tokens"],
        offered=offered, accepted=accepted,
    )  # fmt: skip


def _file(task: AcceptanceTask, counts: AcceptanceCounts) -> AcceptanceFile:
    settings, engine = task.settings, task.settings.engine
    estimate = estimate_acceptance(counts.offered, counts.accepted)
    shape = slice(None) if len(estimate.acceptance) > 1 else 0
    sampled = settings.temperature > 0
    how = f"temperature {settings.temperature:g}" if sampled else "greedy"
    if sampled and settings.top_p < 1:
        how += f", top-p {settings.top_p:g}"
    prompts = source_name(settings.prompts)
    return AcceptanceFile(
        name=f"tuned-t{settings.temperature:g}",
        description=f"{engine.target} with {engine.draft}, {how}, {counts.trees} trees on "
        f"{prompts} prompts.",
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
        provenance=provenance(
            settings=settings_as_data(settings, prompts=prompts),
            models={role: model_hashes(getattr(engine, role)) for role in ("target", "draft")},
            prompts_sha256=prompts_sha256(load_prompts(settings.prompts)),
            prompts_used=len(task.prompts),
            grown=synthetic_models(engine.target, engine.draft),
        ),
    )


def _engine(task: AcceptanceTask) -> AbstractContextManager[Any]:
    settings, tree = task.settings, task.tree
    longest = max(map(len, task.prompts)) + settings.max_tokens + tree.size
    speculation = {
        "method": "sequoia", **draft_option(settings.engine.draft),
        "tree": {"parents": list(tree.parents)}, "verification": DEFAULT_METHOD,
        # A model's vector is the draft's alone. Without a model, text is a part of the draft.
        "retrieval": drafts_from_text(settings.engine.draft),
        "dynamic_tree": False,  # counts by child are a static tree's
        # Draft the whole tree at every batch size.
        "num_speculative_tokens_per_batch_size": [(1, 1, tree.num_speculative_tokens)],
    }  # fmt: skip
    return open_engine(
        settings.engine, seed=0, speculative_config=speculation, enable_prefix_caching=False,
        **room_for(longest, settings.batch_size, tree.size),
    )  # fmt: skip
