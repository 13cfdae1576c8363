"""Measures a device and model pair's profile on live engines."""

from __future__ import annotations

import datetime
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.ladder import Ladder
from sequoia_vllm.hardware.budget import warm_up_length
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.step_curves import (
    BatchCurves,
    BatchTimes,
    batch_curves,
    check_steady,
    draft_curves,
    measuring_tree,
    steady_steps,
)
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.measuring.engines import (
    EngineSpec,
    Progress,
    count_parameters,
    longest_context,
    open_engine,
    token_windows,
    wait_for_quiet,
)
from sequoia_vllm.measuring.errors import CalibrationError
from sequoia_vllm.measuring.provenance import (
    model_hashes,
    provenance,
    settings_as_data,
)
from sequoia_vllm.measuring.step_recorder import EXTENSION
from sequoia_vllm.measuring.synthetic_target import synthetic_models
from sequoia_vllm.prompts import (
    encode_prompts,
    load_prompts,
    load_tokenizer,
    prompts_sha256,
    source_name,
)
from sequoia_vllm.tree.acceptance import Acceptance

_SMALLEST_TREE = 4  # with a second level: its draft pass can be timed


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure, and how.

    Attributes:
        engine: Models, and how both engines run them.
        prompts: File with prompts (`load_prompts`), cut and joined to length;
            None: the built-in set.
        batch_sizes: Requests at once.
        tokens: Tree sizes, root included; 1 is plain decoding. At each batch
            size and context the ladder ends where `Ladder.goes_on` says so.
        contexts: Tokens of each request in the middle of its completion.
        max_tokens: Tokens per completion.
        rounds: Times everything is measured; the middle one counts.
        temperature: Sampling of every request; 0 is greedy.
        enough_seconds: Once measuring took so long, no other round begins: steps that
            slow vary little. None: all rounds, always.
    """

    engine: EngineSpec
    _: KW_ONLY
    prompts: Path | None = None
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (256, 1024)
    max_tokens: int = 32
    rounds: int = 3
    temperature: float = 0.0
    enough_seconds: float | None = None

    @property
    def trees(self) -> list[int]:
        """Tree sizes."""
        return [size for size in self.tokens if size > 1]


def measure_profile(
    settings: ProfileSettings,
    progress: Progress | None = None,
    vectors: Sequence[Acceptance] = (),
) -> Profile:
    """Times a plain and a Sequoia engine in turns, at every batch size, context and tree size.

    Args:
        settings: What to measure.
        progress: Called with (what is done, runs done, runs in all).
        vectors: Acceptance that trees will be chosen for: sizes that cannot win with
            any of these are not timed. Empty: not known.

    Raises:
        PromptError, CalibrationError, ProfileError: If the settings, prompts or
            models cannot be used.
    """
    from sequoia_vllm.engine.frontend.model_shapes import head_shape

    settings = _checked(settings)
    prompts = load_prompts(settings.prompts)
    encoded = encode_prompts(prompts, load_tokenizer(settings.engine.target), raw=True)
    report = progress or (lambda what, done, total: None)
    with _engines(settings, report) as (plain, sequoia):
        ladder = Ladder.of(vectors, settings.tokens[-1])
        measuring = _Measuring(settings, encoded, ladder, (plain, sequoia), report)
        measuring.run()
        dtype = plain.llm_engine.vllm_config.model_config.dtype
        head = head_shape(sequoia.llm_engine.vllm_config)
    first = 0 if head is not None and head.drafts_in_one_pass else 1
    curves = [batch_curves(times, first) for times in measuring.times]
    dtype = str(dtype).removeprefix("torch.")
    return profile_of(settings, curves, dtype, prompts_sha256(prompts), head)


def profile_of(
    settings: ProfileSettings,
    curves: list[BatchCurves],
    dtype: str,
    prompts_hash: str,
    draft: ModelShape | None = None,
) -> Profile:
    """The profile of what was measured with weights and activations of this dtype.

    ``draft`` is the draft's shape, if it is a head.
    """
    from sequoia_vllm.engine.common.device_name import current_device_name

    engine = settings.engine
    head = draft.head if draft is not None else None
    draft_level, draft_reading = draft_curves([c.draft for c in curves], head)
    return Profile(
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        device=current_device_name(),
        target=engine.target,
        draft=engine.draft,
        target_parameters=count_parameters(engine.target),
        draft_parameters=draft.parameters if draft else count_parameters(engine.draft),
        dtype=dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        target_forward=[c.target for c in curves],
        draft_level=draft_level,
        draft_reading=draft_reading,
        head=head,
        verification=[c.verification for c in curves],
        overhead=[c.overhead for c in curves],
        offloading=None if engine.offload is None else engine.offload.name,
        provenance=provenance(
            settings=settings_as_data(settings, prompts=source_name(settings.prompts)),
            models={
                "target": model_hashes(engine.target),
                "draft": model_hashes(engine.draft),
            },
            grown=synthetic_models(engine.target, engine.draft),
            prompts_sha256=prompts_hash,
            target_forward="the forward pass, the LM head, and all of a step that grows with "
            "the tree but verification (preparing inputs); steps gives the first two alone",
            steps=[_steps(c) for c in curves],
        ),
    )


def _steps(curves: BatchCurves) -> dict[str, Any]:
    """Whole steps and their target passes as measured, in the order of ``tokens``."""
    return {
        "batch_size": curves.target.batch_size,
        "context_length": curves.target.context_length,
        "tokens": list(curves.step_seconds),
        "step_seconds": list(curves.step_seconds.values()),
        "forward_seconds": list(curves.forward_seconds.values()),
    }


def _checked(settings: ProfileSettings) -> ProfileSettings:
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
        batch_sizes=tuple(check_batch_sizes(list(settings.batch_sizes))),
        contexts=tuple(sorted(set(settings.contexts))),
    )


@contextmanager
def _engines(settings: ProfileSettings, report: Progress) -> Iterator[tuple[Any, Any]]:
    """A plain and a Sequoia engine, alive together, so that they are measured in turns."""
    largest = settings.tokens[-1]
    half = settings.max_tokens // 2
    length = settings.contexts[-1] + settings.max_tokens - half + largest
    length = max(length, warm_up_length(largest))
    most_requests = settings.batch_sizes[-1]
    # Larger batches never come; the schedule below needs them.
    most_scheduled = most_requests + len(settings.trees)
    options: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": most_scheduled,
        # Trees take at most half of it, and vLLM keeps a slot of each request free for
        # drafting. Not more: engines start with a forward pass over so many tokens.
        "max_num_batched_tokens": max(512, length, 2 * most_scheduled * (largest + 1)),
        "enable_prefix_caching": True,  # prompts are read in the first round only
        "worker_extension_cls": EXTENSION,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.json"
        measuring_tree(largest).save(path)
        speculation = {
            "method": "sequoia",
            "model": settings.engine.draft,
            "tree": str(path),
            # vLLM captures CUDA graphs for the sizes of the schedule.
            "num_speculative_tokens_per_batch_size": [
                (1, most_requests, largest - 1),
                *(
                    (most_requests + place, most_requests + place, size - 1)
                    for place, size in enumerate(reversed(settings.trees), start=1)
                ),
            ],
        }
        # Sequoia first: vLLM adds the extension to a worker class only if no base has it.
        report("starting the Sequoia engine", 0, 1)
        with open_engine(settings.engine, speculative_config=speculation, **options) as sequoia:
            report("starting the plain engine", 0, 1)
            with open_engine(settings.engine, **options) as plain:
                yield plain, sequoia


class _Measuring:
    """Runs both engines in rounds; collects the times.

    Attributes:
        times: By batch size and context.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        encoded: list[list[int]],
        ladder: Ladder,
        engines: tuple[Any, Any],
        report: Progress,
    ) -> None:
        self._settings = settings
        self._encoded = encoded
        self._ladder = ladder
        self._plain, self._sequoia = engines
        self._report = report
        self._done = 0
        self._shuffle = random.Random(0).shuffle
        self.times = [
            BatchTimes(batch, context, [], {})
            for batch in settings.batch_sizes
            for context in settings.contexts
        ]
        self._in_round = len(self.times) * len(settings.tokens)
        self._start = 0.0

    def run(self) -> None:
        """All rounds: the first climbs the ladders, the others repeat it in other orders."""
        for engine in (self._plain, self._sequoia):
            engine.collective_rpc("sequoia_record_steps")
        self._start = time.monotonic()
        for number in range(self._settings.rounds):
            if number >= self._rounds():
                break
            plain = [(times, 1) for times in self.times]
            self._shuffle(plain)
            self._run_all(self._plain, plain)
            if number == 0:
                self._climb()
                self._in_round = sum(1 + len(times.trees) for times in self.times)
                continue
            trees = [(times, size) for times in self.times for size in times.trees]
            self._shuffle(trees)
            self._run_all(self._sequoia, trees)

    def _run_all(self, engine: Any, runs: list[tuple[BatchTimes, int]]) -> None:
        wait_for_quiet()
        for times, size in runs:
            self._run(engine, times, size)

    def _rounds(self) -> int:
        """Rounds in all, as far as can be told now."""
        enough = self._settings.enough_seconds
        if enough is None or time.monotonic() - self._start < enough:
            return self._settings.rounds
        return -(-max(self._done, 1) // self._in_round)

    def _climb(self) -> None:
        wait_for_quiet()
        for times in self.times:
            for size in self._settings.trees:
                self._run(self._sequoia, times, size)
                if size >= _SMALLEST_TREE and not self._ladder.goes_on(times, size):
                    break

    def _run(self, engine: Any, times: BatchTimes, size: int) -> None:
        """One batch of completions; keeps its steady steps as one round."""
        batch, context = times.batch_size, times.context_length
        total = max(self._done + 1, self._rounds() * self._in_round)
        self._report(f"batch {batch}, context {context}, {size} tokens", self._done, total)
        if size > 1:
            engine.collective_rpc("sequoia_limit_drafts", args=(size - 1,))
        length = context - self._settings.max_tokens // 2
        records = _generate(engine, token_windows(self._encoded, batch, length), self._settings)
        rounds = times.plain if size == 1 else times.trees.setdefault(size, [])
        rounds.append(steady_steps(records, batch, size))
        check_steady(rounds, batch, size)
        self._done += 1


def _generate(
    engine: Any, prompts: list[list[int]], settings: ProfileSettings
) -> list[dict[str, Any]]:
    """The recorded steps of one batch."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, ignore_eos=True
    )
    requests = [{"prompt_token_ids": tokens} for tokens in prompts]
    engine.generate(requests, params, use_tqdm=False)
    steps: list[dict[str, Any]] = engine.collective_rpc("sequoia_take_steps")[0]
    return steps
