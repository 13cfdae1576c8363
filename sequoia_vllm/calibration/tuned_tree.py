"""Chooses a pair's tree from its measured acceptance and times, and saves it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.calibration.acceptance_task import FEWEST_TRIALS, tokens_margin
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.hardware.choose import choose_schedule
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile, TreeEntry
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import make_entry, model_class_of, profile_reference
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.measuring.engines import EngineSpec, count_parameters
from sequoia_vllm.tree.token_tree import TokenTree

_LARGE_ON_CPU = 2e8  # parameters


def pair_here(engine: EngineSpec) -> PairKey:
    """The key with which such an engine looks up its tree on this machine.

    Raises:
        CalibrationError: If vLLM cannot read the target's configuration.
    """
    from vllm.engine.arg_utils import EngineArgs

    from sequoia_vllm.engine.common.device_name import current_device_name

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
    """Turns compilation off where it hardly changes step times: on CPUs with a large target.

    Such steps spend their time on reading weights, and compiling takes minutes.

    Raises:
        CalibrationError: If transformers does not know the target.
    """
    from vllm.platforms import current_platform

    is_large = current_platform.is_cpu() and count_parameters(engine.target) >= _LARGE_ON_CPU
    return replace(engine, enforce_eager=engine.enforce_eager or is_large)


def tuned_entry(
    vector: AcceptanceFile,
    profile: Profile,
    context_length: int,
    max_size: int,
    tree: TokenTree | None = None,
) -> TreeEntry:
    """The fastest tree and schedule by these measurements.

    Args:
        tree: The tree to schedule; None: search for the best one.

    Returns:
        An entry for `TreeLibrary.save_user_tree`. A tree of size 1 means: do not speculate.
    """
    largest_batch = max(curve.batch_size for curve in profile.target_forward)
    schedule = choose_schedule(
        vector.vector,
        profile,
        batch_sizes=range(1, largest_batch + 1),
        max_size=max_size,
        context_length=context_length,
        tree=tree,
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


# -- verification methods ----------------------------------------------------------------
#
# With Algorithm 2, a node's acceptance depends only on its position. With traversal it also
# depends on the nodes below and beside it, so we count it on the tree itself. These counts decide
# how much of the tree to draft at each batch size, but not another tree. Leaves are accepted less
# often than with children, so trees chosen from these counts are too shallow. On the pair in this
# repository such a tree of 16 nodes gave 2 to 3 % fewer tokens.


def tokens_per_step(measured: AcceptanceFile) -> float:
    """Tokens per tree and step of a measurement."""
    state = measured.calibration
    assert state is not None
    return state.tokens / max(1, state.trees)


def better_method(measured: dict[str, AcceptanceFile]) -> str:
    """The method with the most tokens per step from the same tree; the first of equal ones."""
    return max(measured, key=lambda method: tokens_per_step(measured[method]))


def refined(vector: AcceptanceFile, on_tree: AcceptanceFile) -> AcceptanceFile:
    """Replaces the vector's entries by those counted on a tree, where trials suffice.

    Args:
        vector: Acceptance of every position up to the probing tree's width.
        on_tree: Acceptance counted on a tree, whose deeper nodes have fewer children.

    Returns:
        A file with ``p[d][k]``. Children with fewer than 100 trials get the vector's value, given
        that no counted child is accepted.
    """
    base, counted = vector.vector.table, on_tree.vector.table
    trials = np.atleast_2d(np.asarray(on_tree.trials))
    shape = max(len(base), len(counted)), max(base.shape[1], counted.shape[1])
    # The vector's last row holds for all deeper levels; below the tree nothing was counted.
    base = np.pad(base, ((0, shape[0] - len(base)), (0, 0)), mode="edge")

    def padded(table: NDArray[np.float64]) -> NDArray[np.float64]:
        more = [(0, size - own) for size, own in zip(shape, table.shape, strict=True)]
        return np.pad(table.astype(np.float64), more)

    base, counted, trials = map(padded, (base, counted, trials))
    known = trials >= FEWEST_TRIALS
    left, base_left = (
        1 - np.where(known, table, 0).sum(axis=1, keepdims=True) for table in (counted, base)
    )
    share = np.divide(left.clip(0), base_left, out=np.zeros_like(left), where=base_left > 0)
    rows = np.where(known, counted, base * share).round(6).tolist()
    return on_tree.model_copy(
        update={"acceptance": rows, "trials": None, "low": None, "high": None}
    )
