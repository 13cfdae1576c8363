"""Times the steps of a plain and a Sequoia engine, and makes a profile of them."""

import datetime
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_vllm.drafters.registry import draft_option, drafts_from_text, drafts_in_one_pass
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.hardware.choose import MAX_DEPTH
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.hardware.step_curves import (
    BatchTimes,
    StepRecord,
    batch_curves,
    check_steady,
    draft_curves,
    measuring_tree,
    middle_round,
    steady_steps,
)
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.measuring.engines import (
    EngineSpec,
    Progress,
    count_parameters,
    longest_context,
    open_engine,
    room_for,
    token_windows,
    wait_for_quiet,
)
from sequoia_vllm.measuring.provenance import of_measurement
from sequoia_vllm.measuring.step_recorder import EXTENSION
from sequoia_vllm.prompts import describe_prompts, encode_prompts, load_prompts, load_tokenizer
from sequoia_vllm.tree import Acceptance, Frontier

_SMALLEST_TREE = 4  # with a second level: its draft pass can be timed
_MOST_PLAIN_STEPS = 12.0
# Percentile of "quickest" times: one slow moment must not end the ladder.
_QUICK = 25


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure, and how."""

    engine: EngineSpec
    _: KW_ONLY
    prompts: Path | None = None
    """File with prompts (`load_prompts`), cut and joined to length; None: the built-in set."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Tree sizes, root included; 1 is plain decoding. `goes_on` decides where to end."""
    contexts: tuple[int, ...] = (256, 1024)  # tokens of a request amid its completion
    max_tokens: int = 32
    rounds: int = 3  # how often to measure everything; the middle round counts
    temperature: float = 0.0
    enough_seconds: float | None = None
    """No round begins after so much time: slow steps vary little. None: no limit."""

    @property
    def trees(self) -> list[int]:
        """Tree sizes."""
        return [size for size in self.tokens if size > 1]


def measure_profile(
    settings: ProfileSettings, progress: Progress | None = None, vectors: Sequence[Acceptance] = ()
) -> Profile:
    """Times a plain and a Sequoia engine in turns, at every batch size, context and tree size.

    Args:
        vectors: Sizes that cannot win with any of these are left out; empty: nothing is known.

    Raises:
        PromptError, CalibrationError, ProfileError: Settings, prompts or models cannot be used.
    """
    from sequoia_vllm.engine.common.cluster import current_device_name
    from sequoia_vllm.engine.frontend.drafts import head_shape

    settings, engine = checked(settings), settings.engine
    prompts = load_prompts(settings.prompts)
    encoded = encode_prompts(prompts, load_tokenizer(engine.target), raw=True)
    report = progress or (lambda what, done, total: None)
    with _engines(settings, report) as (plain, sequoia):
        frontiers = [Frontier.of(one, settings.tokens[-1], MAX_DEPTH) for one in vectors]
        rounds = Rounds(settings, encoded, frontiers, (plain, sequoia), report)
        rounds.run()
        dtype = str(plain.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
        draft = head_shape(sequoia.llm_engine.vllm_config)  # None: it is no head
    head = draft.head if draft is not None else None
    draft_parameters = draft.parameters if draft is not None else 0.0
    if draft is None and not drafts_from_text(engine.draft):
        draft_parameters = count_parameters(engine.draft)
    first = 0 if drafts_in_one_pass(head) else 1
    curves = [batch_curves(times, first) for times in rounds.times]
    draft_level, draft_reading = draft_curves([c.draft for c in curves], head)
    return Profile(
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        device=current_device_name(),
        target=engine.target,
        draft=engine.draft,
        target_parameters=count_parameters(engine.target),
        draft_parameters=draft_parameters,
        dtype=dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        target_forward=[c.target for c in curves],
        draft_level=draft_level,
        draft_reading=draft_reading,
        head=head,
        verification=[c.verification for c in curves],
        overhead=[c.overhead for c in curves],
        provenance=of_measurement(
            settings,
            **describe_prompts(settings.prompts, prompts),
            target_forward="the forward pass, the LM head, and all of a step that grows with "
            "the tree but verification (preparing inputs); steps gives the first two alone",
            steps=[
                {
                    "batch_size": c.target.batch_size,
                    "context_length": c.target.context_length,
                    "tokens": list(c.step_seconds),
                    "step_seconds": list(c.step_seconds.values()),
                    "forward_seconds": list(c.forward_seconds.values()),
                }
                for c in curves
            ],
        ),
    )


def checked(settings: ProfileSettings) -> ProfileSettings:
    """The settings in order; refuses those that cannot be used."""
    tokens = sorted(set(settings.tokens) | {1})
    if tokens[0] < 1 or tokens[-1] < _SMALLEST_TREE:
        raise CalibrationError(
            f"tokens {list(settings.tokens)}: give sizes from 1 up, the largest at least "
            f"{_SMALLEST_TREE}"
        )
    half = settings.max_tokens // 2
    if not settings.contexts or min(settings.contexts) <= half:
        raise CalibrationError(
            f"contexts {list(settings.contexts)}: too short for {settings.max_tokens} tokens per "
            f"completion; give at least {half + 1}"
        )
    most = longest_context(settings.engine.target) - (settings.max_tokens - half) - tokens[-1]
    if max(settings.contexts) > most:
        raise CalibrationError(
            f"contexts {list(settings.contexts)}: the target takes {most} at most, with the "
            "completion and the largest tree"
        )
    return replace(
        settings,
        tokens=tuple(tokens),
        batch_sizes=tuple(check_batch_sizes(settings.batch_sizes)),
        contexts=tuple(sorted(set(settings.contexts))),
    )


@contextmanager
def _engines(settings: ProfileSettings, report: Progress) -> Iterator[tuple[Any, Any]]:
    """A plain and a Sequoia engine, alive together to be measured in turns."""
    largest, most_requests = settings.tokens[-1], settings.batch_sizes[-1]
    longest = settings.contexts[-1] + settings.max_tokens - settings.max_tokens // 2 + largest
    options: dict[str, Any] = {
        **room_for(longest, most_requests + len(settings.trees), largest),
        "enable_prefix_caching": True,  # prompts are read in the first round only
        "worker_extension_cls": EXTENSION,
    }
    speculation = {
        "method": "sequoia",
        **draft_option(settings.engine.draft),
        "tree": {"parents": list(measuring_tree(largest).parents)},
        "dynamic_tree": False,
        # vLLM captures CUDA graphs for all sizes here, also of batches that never come.
        "num_speculative_tokens_per_batch_size": [
            (1, most_requests, largest - 1),
            *(
                (most_requests + place, most_requests + place, size - 1)
                for place, size in enumerate(reversed(settings.trees), start=1)
            ),
        ],
    }
    # Sequoia first: vLLM adds the extension to a worker class only if no base class has it.
    report("starting the Sequoia engine", 0, 1)
    with open_engine(settings.engine, speculative_config=speculation, **options) as sequoia:
        report("starting the plain engine", 0, 1)
        with open_engine(settings.engine, **options) as plain:
            yield plain, sequoia


@dataclass
class Rounds:
    """Runs both engines in rounds and collects the times."""

    settings: ProfileSettings
    encoded: list[list[int]]
    frontiers: list[Frontier]  # of each acceptance vector; empty: acceptance is not known
    engines: tuple[Any, Any]  # plain, Sequoia
    report: Progress

    def __post_init__(self) -> None:
        self.times = [
            BatchTimes(batch, context, [], {})
            for batch in self.settings.batch_sizes
            for context in self.settings.contexts
        ]
        self._shuffle = random.Random(0).shuffle
        self._done, self._in_round = 0, len(self.times) * len(self.settings.tokens)
        self._start = 0.0

    def run(self) -> None:
        """Runs all rounds: the first climbs the ladders, the others repeat its runs shuffled."""
        for engine in self.engines:
            engine.collective_rpc("sequoia_record_steps")
        self._start = time.monotonic()
        for number in range(self.settings.rounds):
            if number >= self._rounds():
                break
            self._run_all(self.engines[0], [(times, 1) for times in self.times])
            if number == 0:
                wait_for_quiet()
                for times in self.times:
                    for size in self.settings.trees:
                        self._run(self.engines[1], times, size)
                        if size >= _SMALLEST_TREE and not goes_on(self.frontiers, times, size):
                            break
                self._in_round = sum(1 + len(times.trees) for times in self.times)
            else:
                trees = [(times, size) for times in self.times for size in times.trees]
                self._run_all(self.engines[1], trees)

    def _rounds(self) -> int:
        enough = self.settings.enough_seconds
        if enough is None or time.monotonic() - self._start < enough:
            return self.settings.rounds
        return -(-max(self._done, 1) // self._in_round)

    def _run_all(self, engine: Any, runs: list[tuple[BatchTimes, int]]) -> None:
        wait_for_quiet()
        self._shuffle(runs)
        for times, size in runs:
            self._run(engine, times, size)

    def _run(self, engine: Any, times: BatchTimes, size: int) -> None:
        """Runs one batch of completions, and keeps its steady steps as one round."""
        from vllm import SamplingParams

        settings, batch, context = self.settings, times.batch_size, times.context_length
        total = max(self._done + 1, self._rounds() * self._in_round)
        self.report(f"batch {batch}, context {context}, {size} tokens", self._done, total)
        if size > 1:
            engine.collective_rpc("sequoia_limit_drafts", args=(size - 1,))
        prompts = token_windows(self.encoded, batch, context - settings.max_tokens // 2)
        params = SamplingParams(
            temperature=settings.temperature, max_tokens=settings.max_tokens, ignore_eos=True
        )
        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        engine.generate(requests, params, use_tqdm=False)
        records = engine.collective_rpc("sequoia_take_steps")[0]
        rounds = times.plain if size == 1 else times.trees.setdefault(size, [])
        rounds.append(steady_steps(records, batch, size))
        check_steady(rounds, batch, size)
        self._done += 1


def goes_on(frontiers: Sequence[Frontier], times: BatchTimes, size: int) -> bool:
    """True if a tree larger than ``size``, which was just timed, might be the best.

    False if a step with this tree already takes as long as 12 plain steps: we assume that no
    draft gets so many tokens accepted. With a frontier for each vector, also False if no larger
    tree can be the fastest, even with its most tokens in its shortest step.
    """

    def typical(rounds: list[list[StepRecord]]) -> float:
        return float(np.median([step.seconds for step in middle_round(rounds)]))

    plain = typical(times.plain)
    if typical(times.trees[size]) >= _MOST_PLAIN_STEPS * plain:
        return False
    # We assume that all trees of a measuring tree's size and depth take the same time.
    timed = {(n, measuring_tree(n).depth): typical(rounds) for n, rounds in times.trees.items()}
    return not frontiers or any(
        _highest(frontier, times, size)
        > max(1 / plain, *(frontier.expected_tokens[at] / s for at, s in timed.items()))
        for frontier in frontiers
    )


def _highest(frontier: Frontier, times: BatchTimes, size: int) -> float:
    """Upper bound of tokens per second of one request with any larger tree: its target pass and
    verification take at least this size's time, each level at least the draft's quickest pass."""

    def quickest(value: Callable[[StepRecord], float]) -> float:
        return float(np.percentile([*map(value, middle_round(times.trees[size]))], _QUICK))

    scored = quickest(lambda step: step.target + step.verify)
    level = quickest(lambda step: min(seconds for _, seconds in step.levels()))
    tokens = frontier.expected_tokens[-1, 1:]
    return float((tokens / (scored + level * np.arange(1, len(tokens) + 1))).max())
