"""Engines for the end-to-end tests, in this process: they start in three seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from sequoia_vllm import plugin
from sequoia_vllm.engine.common.patched import patched
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


def configured(speculative_config=None, **options):
    """The configuration of an engine of the embedded target, which is not started."""
    plugin.register()
    given = {"model": TARGET, "max_model_len": 256, **options}
    args = EngineArgs(speculative_config=speculative_config, **given)
    return args.create_engine_config()


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


def chain_of(draft: str, depth: int, **keys) -> dict:
    """`whole_trees` of so many drafts, each the only child of the one before."""
    return whole_trees(depth + 1, draft=draft, **keys, tree={"parents": list(range(-1, depth))})


def lookup_trees(**keys) -> dict:
    """`whole_trees` that are drafted without a model."""
    config = whole_trees(drafter="lookup", **{"retrieval": True, "dynamic_tree": None, **keys})
    del config["model"]
    return config


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generated(llm: LLM, prompts, params, **adapters) -> list[list[int]]:
    """Tokens of the first completion of each request."""
    return tokens_of(llm.generate(prompts, params, use_tqdm=False, **adapters))


@contextmanager
def noting(owner, name: str, note, of_result: bool = False) -> Iterator[list]:
    """What ``note`` says of each call within the block, unless it is None.

    Of the call's positional arguments, or of its result.
    """
    original, found = getattr(owner, name), []

    def keep(said) -> None:
        if said is not None:
            found.append(said)

    def noted(*args, **kwargs):
        if not of_result:
            keep(note(*args))
        result = original(*args, **kwargs)
        if of_result:
            keep(note(result))
        return result

    with patched(owner, name, noted):
        yield found


def scheduler_of(llm: LLM):
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


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


def undrafted(llm: LLM) -> dict[str, float]:
    """Requests without drafts by reason, since the engine's start."""
    name = "sequoia:undrafted_requests"
    return {m.labels["reason"]: m.value for m in llm.get_metrics() if m.name == name and m.value}


def tree_metrics(llm: LLM) -> dict[str, float]:
    """Value of each of our metrics, by its name and what tells its series apart."""
    return {
        "/".join([
            m.name.removeprefix("sequoia:"),
            *(m.labels[label] for label in ("depth", "child", "reason") if label in m.labels),
        ]): m.value
        for m in llm.get_metrics()
        if m.name.startswith("sequoia:")
    }  # fmt: skip


_plain: dict[str, list[list[int]]] = {}


def plain_outputs(prompts, params, **options) -> list[list[int]]:
    """Plain vLLM's tokens for prompts and parameters, computed once per combination."""
    # The repr of parameters leaves some fields out.
    fields = map(msgspec.structs.asdict, params if isinstance(params, list) else [params])
    key = repr((prompts, list(fields), sorted(options.items())))
    if key not in _plain:
        with running(None, **options) as llm:
            _plain[key] = generated(llm, prompts, params)
    return _plain[key]
