"""Chooses a pair's tree from its measured acceptance and times, and saves it."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from sequoia_vllm.calibration.measure_acceptance import tokens_margin
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.hardware.choose import choose_schedule
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile, TreeEntry
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import make_entry, model_class_of, profile_reference
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.measuring.engines import EngineSpec, count_parameters

_LARGE_ON_CPU = 2e8  # parameters


def pair_here(engine: EngineSpec) -> PairKey:
    """The key with which such an engine looks up its tree on this machine. Raises CalibrationError
    if vLLM cannot read the target's configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from sequoia_vllm.engine.common.cluster import current_device_name

    try:
        config = EngineArgs(model=engine.target, dtype=engine.dtype).create_model_config()
    except (ValueError, OSError) as error:
        raise CalibrationError(f"vLLM cannot use the target {engine.target!r}: {error}") from error
    dtype = str(config.dtype).removeprefix("torch.")
    return PairKey(
        current_device_name(), engine.target, engine.draft, dtype, engine.tensor_parallel_size,
        engine.offloading,
    )  # fmt: skip


def quick_engine(engine: EngineSpec) -> EngineSpec:
    """Turns compilation off on CPUs with a large target: it hardly changes such steps, which read
    weights, and takes minutes. Raises CalibrationError if transformers does not know the target."""
    from vllm.platforms import current_platform

    is_large = current_platform.is_cpu() and count_parameters(engine.target) >= _LARGE_ON_CPU
    return replace(engine, enforce_eager=engine.enforce_eager or is_large)


def tuned_entry(
    vector: AcceptanceFile, profile: Profile, context_length: int, max_size: int
) -> TreeEntry:
    """The fastest tree and schedule by these measurements, for `TreeLibrary.save_user_tree`; a tree
    of size 1 means: do not speculate."""
    largest_batch = max(curve.batch_size for curve in profile.target_forward)
    schedule = choose_schedule(
        vector.vector,
        profile,
        batch_sizes=range(1, largest_batch + 1),
        max_size=max_size,
        context_length=context_length,
    )
    reference = profile_reference(profile).model_copy(update={"context_length": context_length})
    return make_entry("user", model_class_of(profile), profile, reference, vector, schedule)


def margins(entry: TreeEntry, vector: AcceptanceFile) -> list[float | None]:
    """`tokens_margin` of each estimate's tokens per step; None: not known."""
    if vector.trials is None:
        return [None] * len(entry.estimates)
    trials = np.atleast_2d(np.asarray(vector.trials)).tolist()
    trees = (entry.tree.trim(one.num_speculative_tokens + 1) for one in entry.estimates)
    return [tokens_margin(tree, vector.vector, trials) for tree in trees]


def save_tuned(library: TreeLibrary, pair: PairKey, entry: TreeEntry) -> Path:
    """Stores the tree under the key that an engine with this pair looks up."""
    file = library.measurements(pair).profile.relative_to(library.user)
    reference = entry.profile.model_copy(update={"file": str(file)})
    return library.save_user_tree(pair, entry.model_copy(update={"profile": reference}))
