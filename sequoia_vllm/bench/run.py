"""A whole comparison: measured, summed up, with its provenance."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Any

from sequoia_vllm.bench.measure import BenchSettings, MethodRuns, measure
from sequoia_vllm.bench.methods import Kind
from sequoia_vllm.bench.predict import Basis, middle_context
from sequoia_vllm.bench.report import BenchModel, BenchReport, Prediction
from sequoia_vllm.bench.rounds import Case
from sequoia_vllm.bench.summary import results, searched
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.measuring.engines import Progress
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.measuring.synthetic_target import synthetic_origin

# What changes speed on CPUs, of the environment.
_ENVIRONMENT = (
    "LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_SGL_KERNEL", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def run_bench(
    settings: BenchSettings,
    basis: Basis | None,
    described: dict[str, Any],
    progress: Progress | None = None,
) -> BenchReport:
    """Measures, and compares with the cost model.

    Args:
        settings: What to compare.
        basis: What predictions are made from; None: what was tuned for this
            pair, if it was.
        described: Settings as the report shall show them.
        progress: Called with (what is done, turns done, turns of this case).

    Raises:
        BenchError, CalibrationError, ProfileError, AcceptanceError: If something
            cannot be measured or read.
    """
    found = measure(settings, progress)
    stated = provenance(
        git=git_revision(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    if basis is None:
        engine = settings.engine
        pair = PairKey(
            stated["device"], engine.target, engine.draft, found.dtype,
            engine.tensor_parallel_size, None if engine.offload is None else engine.offload.name,
        )  # fmt: skip
        basis = Basis.tuned(pair, middle_context(settings.prompts, settings.max_tokens))

    def predict(runs: MethodRuns, case: Case) -> Prediction | None:
        if basis is None or runs.method.kind is not Kind.SEQUOIA:
            return None
        return basis.predict(runs.tree, runs.drafts, case.batch_size, case.temperature)

    models = [BenchModel(name=name, hashes=model_hashes(name), grown_from=synthetic_origin(name))
              for name in (settings.engine.target, settings.engine.draft)]  # fmt: skip
    return BenchReport(
        date=datetime.datetime.now(datetime.UTC).date(),
        device=stated["device"],
        target=models[0],
        draft=models[1],
        dtype=found.dtype,
        settings=described,
        results=results(found, predict, chain_is_wrong=_chain_samples_wrongly()),
        searched=None if found.search is None else searched(found.search, settings.engine.draft),
        greedy=found.greedy,
        notes=[note for model in models if (note := synthetic_note(model)) is not None],
        provenance=stated,
    )


def synthetic_note(model: BenchModel) -> str | None:
    """Remark on figures of a synthetic target; None: the model is an ordinary one."""
    if (origin := model.grown_from) is None:
        return None
    return (
        f"{model.name} is a synthetic target made from {origin.get('from')}: "
        f"{origin.get('layers')} layers, MLP width {origin.get('intermediate_size')}. It computes "
        "what the small model does: speeds are those of a larger model whose draft is accepted as "
        "often as the small pair's."
    )


def git_revision() -> str | None:
    """The commit of this checkout, "+" behind it if files differ; None: not a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _chain_samples_wrongly() -> bool:
    """vllm-project/vllm#55005: CPU builds without Triton."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return bool(current_platform.is_cpu() and not HAS_TRITON)
