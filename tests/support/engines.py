"""Engines for the end-to-end tests, in this process: they start in three seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM

from tests.support.models import DRAFT, TARGET
from tests.support.quicker import look_past_what_is_imported

DEFAULTS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0,
    "disable_log_stats": False, "kv_cache_memory_bytes": 128 << 20,
}  # fmt: skip


@contextmanager
def running(speculative_config=None, model: str = TARGET, **options) -> Iterator[LLM]:
    from vllm.distributed import cleanup_dist_env_and_memory

    look_past_what_is_imported()
    llm = LLM(model=str(model), speculative_config=speculative_config, **{**DEFAULTS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def sequoia(size: int = 16, depth: int | None = 4, draft: str = DRAFT, **keys) -> dict:
    """The same in every step, whatever it takes here: tests' models are too small to gain by it.

    Without retrieval and with static trees: what is accepted shows what the draft does.
    """
    return {
        "method": "sequoia",
        "model": str(draft),
        "tree": {"size": size, "depth": depth},
        "adapt": False,
        "retrieval": False,
        "dynamic_tree": False,
        **keys,
    }


def whole_trees(size: int = 16, **keys) -> dict:
    """`sequoia` with a schedule that drafts the whole tree whatever the token budget is."""
    return sequoia(size, num_speculative_tokens_per_batch_size=[[1, 1, size - 1]], **keys)


def lookup_trees(**keys) -> dict:
    """`whole_trees` that are drafted without a model."""
    config = whole_trees(drafter="lookup", **{"retrieval": True, **keys})
    del config["model"]
    return config


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def runner_of(llm: LLM):
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def leave_nan(llm: LLM) -> None:
    """What an engine's requests have not written holds NaN from now on, as others may leave it."""
    for cache in runner_of(llm).kv_caches:
        cache.fill_(float("nan"))


def cache_kinds(llm: LLM) -> set[str]:
    """The kinds of the engine's KV cache groups."""
    groups = runner_of(llm).kv_cache_config.kv_cache_groups
    return {type(group.kv_cache_spec).__name__ for group in groups}


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


class PlainOutputs:
    """Plain vLLM's tokens for prompts and parameters, computed once per combination."""

    def __init__(self) -> None:
        self._known: dict = {}

    def __call__(self, prompts, params, **options) -> list[list[int]]:
        listed = params if isinstance(params, list) else [params]
        # Their repr leaves some fields out.
        fields = [msgspec.structs.asdict(one) for one in listed]
        key = (repr(prompts), repr(fields), repr(sorted(options.items())))
        if key not in self._known:
            with running(None, **options) as llm:
                self._known[key] = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        return self._known[key]
