"""Measures the acceptance vector of a model pair on a live engine."""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.counts import TAIL, estimate_acceptance, probing_tree
from sequoia_vllm.calibration.probing import Budget, Checkpoint, Counters, Probe, StoppedBy
from sequoia_vllm.calibration.workload import Workload
from sequoia_vllm.hardware.budget import warm_up_length
from sequoia_vllm.library.files import AcceptanceFile, CalibrationState
from sequoia_vllm.measuring.engines import (
    EngineSpec,
    Progress,
    load_config,
    longest_context,
    open_engine,
)
from sequoia_vllm.measuring.errors import CalibrationError
from sequoia_vllm.measuring.provenance import (
    model_hashes,
    provenance,
    settings_as_data,
)
from sequoia_vllm.measuring.synthetic_target import synthetic_models
from sequoia_vllm.prompts import (
    encode_prompts,
    load_prompts,
    load_tokenizer,
    prompts_sha256,
    source_name,
)
from sequoia_vllm.tree.token_tree import TokenTree
from sequoia_vllm.verification.methods import DEFAULT_METHOD

Save = Callable[[AcceptanceFile], None]


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to measure, and how.

    Attributes:
        engine: Models, and how engines run them.
        prompts: File with prompts (`load_prompts`); None: the built-in set.
        num_prompts: Prompts to use; None: all.
        raw_prompts: Give bare prompts to the target without its chat template.
        max_tokens: Tokens per completion; it may end earlier by itself. Greedy completions go
            no further to be more: a model's long greedy text repeats itself, and repetition is
            easy to draft.
        temperature, top_p: Sampling of every request; temperature 0 is greedy.
        branch: Children offered at a node: entries of a row.
        depth: Rows of the vector at most. They differ: a tree starts where
            drafting has just failed, and goes deep where it is easy.
        precision: Stop when the vector is known this well (`counts.precision`).
        max_tokens_total: Stop when so many tokens were generated.
        batch_size: Requests at once.
        tree: Counts the children of this tree instead of those of a probing tree, which has
            ``branch`` and ``depth``.
        verification: How sampled trees are verified, see `SequoiaConfig`.
    """

    engine: EngineSpec
    _: KW_ONLY
    prompts: Path | None = None
    num_prompts: int | None = None
    raw_prompts: bool = False
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    branch: int = 10
    depth: int = 5
    precision: float = 0.02
    max_tokens_total: int = 100_000
    batch_size: int = 8
    tree: TokenTree | None = None
    verification: str = DEFAULT_METHOD


@dataclass(frozen=True)
class AcceptanceTask:
    """A measurement ready to run.

    Attributes:
        settings: What to measure.
        prompts: Token ids of each prompt.
        tree: Whose children are counted, or the first levels of them.
        measures: What makes two measurements the same one; plain data.
        name: Draft strength class of the result.
    """

    settings: AcceptanceSettings
    prompts: list[list[int]]
    tree: TokenTree
    measures: dict[str, Any]
    name: str

    @classmethod
    def prepare(cls, settings: AcceptanceSettings, name: str) -> AcceptanceTask:
        """Reads prompts and models' files; starts no engine.

        Raises:
            PromptError, CalibrationError, TreeError: If they cannot be used.
        """
        engine = settings.engine
        prompts = load_prompts(settings.prompts, settings.num_prompts)
        tokenizer = load_tokenizer(engine.target)
        encoded = encode_prompts(prompts, tokenizer, raw=settings.raw_prompts)
        # Room for a whole tree after the last token: trees are never trimmed.
        # A draft that is not there is refused here, before an engine starts.
        tail = _tail(settings.depth, load_config(engine.draft))
        tree = settings.tree or probing_tree(settings.branch, settings.depth, tail)
        room = longest_context(engine.target) - tree.size
        fitting = [ids for ids in encoded if len(ids) + settings.max_tokens <= room]
        if not fitting:
            raise CalibrationError(
                f"no prompt leaves room for {settings.max_tokens} tokens in the target's context: "
                "give shorter prompts, or a smaller --max-tokens"
            )
        measures = {
            "target": engine.target,
            "draft": engine.draft,
            "target_sha256": model_hashes(engine.target),
            "draft_sha256": model_hashes(engine.draft),
            "prompts": source_name(settings.prompts),
            "prompts_sha256": prompts_sha256(prompts),
            "prompts_used": len(fitting),
            "raw_prompts": settings.raw_prompts,
            "temperature": settings.temperature,
            "top_p": settings.top_p if settings.temperature > 0 else None,
            "max_tokens": settings.max_tokens,
            "branch": settings.branch,
            "depth": settings.depth,
            "dtype": engine.dtype,
        }
        if settings.tree is None:
            measures["tail"] = tail
        else:
            measures |= {
                "tree": list(settings.tree.parents), "verification": settings.verification
            }  # fmt: skip
        return cls(settings, fitting, tree, measures, name)

    def differences(self, state: CalibrationState) -> list[str]:
        """What an earlier measurement measured otherwise; empty: it is this same one."""
        keys = self.measures.keys() | state.measures.keys()
        return sorted(k for k in keys if self.measures.get(k) != state.measures.get(k))

    def is_done(self, state: CalibrationState) -> bool:
        """Whether an earlier run of this measurement found all that is asked for now."""
        if not state.complete:
            return False
        reached = state.precision is not None and state.precision <= self.settings.precision
        used_up = state.stopped_by == "tokens" and (
            state.most_tokens >= self.settings.max_tokens_total
        )
        return reached or used_up or state.stopped_by == "prompts"

    def can_go_on(self, state: CalibrationState) -> bool:
        """Whether an earlier run of this measurement left what another needs to continue it.

        A finished greedy one did not: its completions are not kept.
        """
        return not state.complete or self.settings.temperature > 0


def measure_acceptance(
    task: AcceptanceTask,
    previous: CalibrationState | None = None,
    progress: Progress | None = None,
    save: Save | None = None,
    *,
    checkpoint_seconds: float = 1.0,
) -> AcceptanceFile:
    """Runs the engine with a wide tree and counts what the verifier accepts.

    Args:
        task: What to measure.
        previous: Where an interrupted run stopped; None: start anew.
        progress: Called with (what is done, trees verified, trees needed as it seems).
        save: Called with what there is so far, marked incomplete, at each checkpoint.
        checkpoint_seconds: Time between checkpoints; 0: after every step.

    Returns:
        The measurement; marked incomplete if a KeyboardInterrupt ended it.

    Raises:
        CalibrationError: If the models cannot be used.
        KeyboardInterrupt: If it came before any tree was verified.
    """
    settings = task.settings
    workload = _workload(task, previous)
    start = Counters() if previous is None else Counters.of_state(previous)
    budget = Budget(settings.precision, settings.max_tokens_total)
    depth = settings.depth if settings.tree is None else None
    probe = Probe(workload, start, budget, interval=checkpoint_seconds, depth=depth)
    report = progress or (lambda what, done, total: None)

    def on_checkpoint(checkpoint: Checkpoint) -> None:
        trees, reached = checkpoint.counters.trees, checkpoint.counters.precision()
        if reached is None:
            return
        needed = _trees_needed(checkpoint.counters, reached, budget)
        report(f"within {reached:.3f}, to be {settings.precision:g}", trees, needed)
        if save is not None:
            save(_file(task, checkpoint, "interrupt"))

    report("starting the engine", 0, 1)
    stopped_by: StoppedBy = "interrupt"
    with suppress(KeyboardInterrupt), _engine(task, seed=workload.started) as llm:
        stopped_by = probe.run(
            llm, settings.temperature, settings.top_p, settings.batch_size, on_checkpoint
        )
    if stopped_by == "interrupt" and probe.checkpoint.counters.trees == 0:
        raise KeyboardInterrupt
    return _file(task, probe.checkpoint, stopped_by)


def _trees_needed(counters: Counters, reached: float, budget: Budget) -> int:
    """Trees until the precision wanted is reached or all tokens are spent, as it seems now."""
    by_precision = (reached / budget.precision) ** 2
    by_tokens = budget.tokens / max(1, counters.tokens)
    return round(counters.trees * max(1.0, min(by_precision, by_tokens)))


def class_name(text: str) -> str:
    """``text`` as the name of a draft strength class."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "measured"


def _file(task: AcceptanceTask, checkpoint: Checkpoint, stopped_by: StoppedBy) -> AcceptanceFile:
    settings, counters = task.settings, checkpoint.counters
    engine = settings.engine
    estimate = estimate_acceptance(counters.offered, counters.accepted)
    shape = slice(None) if len(estimate.acceptance) > 1 else 0
    state = _state(task, checkpoint, stopped_by)
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    if settings.temperature > 0 and settings.top_p < 1:
        how += f", top-p {settings.top_p:g}"
    if settings.tree is not None:
        how += f", {settings.verification} on a tree of {settings.tree.size} nodes"
    unfinished = "" if state.complete else " (interrupted)"
    return AcceptanceFile(
        name=task.name,
        description=f"{engine.target} with {engine.draft}, {how}, {counters.trees} trees on "
        f"{source_name(settings.prompts)} prompts{unfinished}.",
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        target=engine.target,
        draft=engine.draft,
        temperature=settings.temperature,
        top_p=settings.top_p if settings.temperature > 0 else None,
        acceptance=estimate.acceptance[shape],
        trials=estimate.trials[shape],
        low=estimate.low[shape],
        high=estimate.high[shape],
        calibration=state,
        provenance=provenance(
            settings=settings_as_data(
                settings,
                prompts=task.measures["prompts"],
                **({} if settings.tree is None else {"tree": list(settings.tree.parents)}),
            ),
            grown=synthetic_models(engine.target, engine.draft),
        ),
    )


def _state(task: AcceptanceTask, checkpoint: Checkpoint, stopped_by: StoppedBy) -> CalibrationState:
    counters, workload = checkpoint.counters, dict(checkpoint.workload)
    complete = stopped_by != "interrupt"
    if complete:
        del workload["completions"]  # nothing goes on from here
    return CalibrationState(
        complete=complete,
        stopped_by=stopped_by,
        precision=counters.precision(),
        wanted_precision=task.settings.precision,
        most_tokens=task.settings.max_tokens_total,
        trees=counters.trees,
        tokens=counters.tokens,
        offered=counters.offered,
        accepted=counters.accepted,
        measures=task.measures,
        **workload,
    )


def _workload(task: AcceptanceTask, previous: CalibrationState | None) -> Workload:
    settings = task.settings
    workload = Workload(
        prompts=task.prompts,
        greedy=settings.temperature == 0,
        max_tokens=settings.max_tokens,
    )
    return (
        workload
        if previous is None
        else replace(
            workload,
            started=previous.started,
            completions=previous.completions,
            ended=set(previous.ended),
        )
    )


def _tail(depth: int, draft: Any) -> int:
    """Levels below those that are counted, as far as a draft of this configuration drafts them."""
    from sequoia_vllm.engine.frontend.drafter_kind import drafted_levels, recognise

    levels = drafted_levels(recognise(draft).kind, lambda: draft)
    return TAIL if levels is None else max(0, min(TAIL, levels - depth))


@contextmanager
def _engine(task: AcceptanceTask, seed: int) -> Iterator[Any]:
    settings, tree = task.settings, task.tree
    longest = max(map(len, task.prompts)) + settings.max_tokens + tree.size
    longest = max(longest, warm_up_length(tree.size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.json"
        tree.save(path)
        options = {
            "speculative_config": {
                "method": "sequoia", "model": settings.engine.draft, "tree": str(path),
                "verification": settings.verification,
                # Whole trees are counted, at every batch size.
                "num_speculative_tokens_per_batch_size": [(1, 1, tree.num_speculative_tokens)],
            },
            "max_model_len": longest,
            "max_num_seqs": settings.batch_size,
            # As when profiling: trees take at most half, and starting takes longer with more.
            "max_num_batched_tokens": max(512, longest, 2 * settings.batch_size * (tree.size + 1)),
            "enable_prefix_caching": False,
        }  # fmt: skip
        with open_engine(settings.engine, seed=seed, **options) as llm:
            yield llm
