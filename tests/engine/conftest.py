"""Engines for the end-to-end tests, in this process: they start in three seconds."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
from vllm import LLM

from tests.engine.models import DRAFT, TARGET, save_random_draft
from tests.quicker import look_past_what_is_imported

DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 128 << 20,
}


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
    return {
        "method": "sequoia",
        "model": str(draft),
        "tree": {"size": size, "depth": depth},
        **keys,
    }


def whole_trees(size: int = 16, **keys) -> dict:
    """`sequoia` with a schedule that drafts the whole tree whatever the token budget is."""
    return sequoia(size, num_speculative_tokens_per_batch_size=[[1, 1, size - 1]], **keys)


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory) -> Path:
    """A draft that knows nothing: untrained weights, the embedded pair's vocabulary."""
    return save_random_draft(tmp_path_factory.mktemp("random-draft"))


@pytest.fixture(scope="session")
def plain_outputs() -> Callable:
    """Plain vLLM's tokens for prompts and parameters, computed once per combination."""
    known: dict = {}

    def generate(prompts, params, **options) -> list[list[int]]:
        key = (repr(prompts), repr(params), repr(sorted(options.items())))
        if key not in known:
            with running(None, **options) as llm:
                known[key] = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        return known[key]

    return generate
