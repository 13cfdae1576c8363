"""Measures a device and model pair's profile on live engines."""

from __future__ import annotations

import datetime
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.acceptance import Progress
from sequoia_vllm.calibration.engines import encode, load_prompts, open_engine, token_windows
from sequoia_vllm.calibration.errors import CalibrationError
from sequoia_vllm.calibration.provenance import file_hash, provenance
from sequoia_vllm.calibration.recorder import EXTENSION
from sequoia_vllm.calibration.step_times import (
    BatchCurves,
    BatchTimes,
    batch_curves,
    check_steady,
    measuring_tree,
    steady_steps,
)
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.hardware.profile import Profile


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure, and how.

    Attributes:
        target, draft: Model names or paths.
        prompts: ``.jsonl`` file with a "prompt" per line; cut and joined to length.
        batch_sizes: Requests at once.
        tokens: Tree sizes, root included; 1 is plain decoding.
        context: Tokens of each request in the middle of its completion.
        max_tokens: Tokens per completion.
        rounds: Times everything is measured; the quietest counts.
        temperature: Sampling of every request; 0 is greedy.
        dtype: Of weights and activations.
        enforce_eager: Without compilation.
        kv_cache_gib: Memory for the KV cache of each of the two engines, GiB.
    """

    target: str
    draft: str
    prompts: Path
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context: int = 256
    max_tokens: int = 48
    rounds: int = 5
    temperature: float = 0.0
    dtype: str = "auto"
    enforce_eager: bool = False
    kv_cache_gib: float = 1.0


def measure_profile(settings: ProfileSettings, progress: Progress | None = None) -> Profile:
    """Times a plain and a Sequoia engine in turns, at every batch and tree size.

    Args:
        settings: What to measure.
        progress: Called with (what is done, runs done, runs in all).

    Raises:
        CalibrationError: If the settings, prompts or models cannot be used.
    """
    settings = _checked(settings)
    encoded = encode(settings.target, load_prompts(settings.prompts))
    length = settings.context - settings.max_tokens // 2
    prompts = token_windows(encoded, max(settings.batch_sizes), length)
    with _engines(settings, progress) as engines:
        times = _measure(settings, prompts, engines, progress)
        dtype = engines.plain.llm_engine.vllm_config.model_config.dtype
    curves = [batch_curves(batch, settings.context) for batch in times]
    return profile_of(settings, curves, str(dtype).removeprefix("torch."))


def profile_of(settings: ProfileSettings, curves: list[BatchCurves], dtype: str) -> Profile:
    """The profile of what was measured with weights and activations of this dtype."""
    from sequoia_vllm.engine.device_name import current_device_name

    steps = {str(c.overhead.batch_size): _by_size(c.step_seconds) for c in curves}
    forwards = {str(c.overhead.batch_size): _by_size(c.forward_seconds) for c in curves}
    return Profile(
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        device=current_device_name(),
        target=settings.target,
        draft=settings.draft,
        target_parameters=count_parameters(settings.target),
        draft_parameters=count_parameters(settings.draft),
        dtype=dtype,
        target_forward=[c.target for c in curves],
        draft_level=[c.draft for c in curves],
        overhead=[c.overhead for c in curves],
        provenance=provenance(
            settings.target,
            settings.draft,
            settings={**asdict(settings), "prompts": settings.prompts.name},
            prompts_sha256=file_hash(settings.prompts),
            target_forward="the forward pass, the LM head, and all of a step that grows with "
            "the tree (verification, preparing inputs); see forward_seconds for the first two",
            step_seconds=steps,
            forward_seconds=forwards,
        ),
    )


def count_parameters(model: str) -> float:
    """Parameters of a model by its configuration; no weights are read.

    Raises:
        CalibrationError: If transformers does not know the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except (ValueError, OSError) as error:
        raise CalibrationError(f"cannot count the parameters of {model!r}: {error}") from error
    return float(sum(parameter.numel() for parameter in built.parameters()))


def _checked(settings: ProfileSettings) -> ProfileSettings:
    tokens = sorted(set(settings.tokens) | {1})
    if tokens[0] < 1 or tokens[-1] < 4:
        raise CalibrationError(
            f"tokens {list(settings.tokens)}: give sizes from 1 up, the largest at least 4"
        )
    if settings.context <= settings.max_tokens // 2:
        raise CalibrationError(
            f"context {settings.context} is too short for {settings.max_tokens} tokens per "
            f"completion: at least {settings.max_tokens // 2 + 1}"
        )
    batch_sizes = check_batch_sizes(list(settings.batch_sizes))
    changes = {"tokens": tuple(tokens), "batch_sizes": tuple(batch_sizes)}
    return ProfileSettings(**{**asdict(settings), **changes})


@dataclass(frozen=True)
class _Engines:
    """Both engines, alive together, so that they are measured in turns."""

    plain: Any
    sequoia: Any


@contextmanager
def _engines(settings: ProfileSettings, progress: Progress | None) -> Iterator[_Engines]:
    largest = max(settings.tokens)
    length = settings.context + settings.max_tokens + largest
    options = {
        "dtype": settings.dtype,
        "enforce_eager": settings.enforce_eager,
        "max_model_len": length,
        "max_num_seqs": max(settings.batch_sizes),
        # vLLM keeps one slot of each request free for drafting.
        "max_num_batched_tokens": max(2048, length, max(settings.batch_sizes) * (largest + 1)),
        "enable_prefix_caching": True,  # prompts are read in the first round only
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * (1 << 30)),
        "worker_extension_cls": EXTENSION,
    }
    report = progress or (lambda what, done, total: None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.json"
        measuring_tree(largest).save(path)
        speculation = {"method": "sequoia", "model": settings.draft, "tree": str(path)}
        # Sequoia first: vLLM adds the extension to a worker class only if no base has it.
        report("starting the Sequoia engine", 0, 1)
        with open_engine(settings.target, speculative_config=speculation, **options) as sequoia:
            report("starting the plain engine", 0, 1)
            with open_engine(settings.target, **options) as plain:
                yield _Engines(plain, sequoia)


def _measure(
    settings: ProfileSettings,
    prompts: list[list[int]],
    engines: _Engines,
    progress: Progress | None,
) -> list[BatchTimes]:
    trees = [size for size in settings.tokens if size > 1]
    times = {
        batch: BatchTimes(batch, [], {size: [] for size in trees}) for batch in settings.batch_sizes
    }
    for engine in (engines.plain, engines.sequoia):
        engine.collective_rpc("sequoia_record_steps")
    runs = _runs(settings, trees)
    for done, (batch, size) in enumerate(runs):
        if progress is not None:
            progress(f"batch {batch}, {size} tokens", done, len(runs))
        engine = engines.plain if size == 1 else engines.sequoia
        if size > 1:
            engine.collective_rpc("sequoia_limit_drafts", args=(size - 1,))
        records = _generate(engine, prompts[:batch], settings)
        found = times[batch].plain if size == 1 else times[batch].trees[size]
        found.append(steady_steps(records, batch, size))
        check_steady(found, batch, size)
    return list(times.values())


def _runs(settings: ProfileSettings, trees: list[int]) -> list[tuple[int, int]]:
    """(batch size, tree size) of every run: all in each round, each time in another order."""
    shuffle: Callable[[list[tuple[int, int]]], None] = random.Random(0).shuffle
    runs = []
    for _ in range(settings.rounds):
        one_round = [(batch, size) for batch in settings.batch_sizes for size in (1, *trees)]
        shuffle(one_round)
        runs += one_round
    return runs


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


def _by_size(values: dict[int, float]) -> dict[str, float]:
    return {str(size): value for size, value in values.items()}
