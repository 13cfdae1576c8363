"""What the tests do with engines, in the processes that `Cluster.call` starts."""

import os
from pathlib import Path
from typing import Any

import psutil
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.ray.cluster import footprint
from tests.support.models import DRAFT, TARGET

OPTIONS = {
    "model": TARGET, "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
    "max_num_seqs": 8, "seed": 0, "kv_cache_memory_bytes": 128 << 20,
}  # fmt: skip


def where_it_runs(worker: Any) -> tuple[int, str]:
    return os.getpid(), str(Path.cwd())


def start(tree: str) -> tuple[LLMEngine, list[psutil.Process]]:
    """An engine of two ranks on Ray, as `LLM` makes it, and its workers by rank.

    The tree's file is removed as soon as the configuration is made, before any
    other process is started.
    """
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send workers a function
    sequoia = {"method": "sequoia", "model": DRAFT, "tree": tree, "adapt": False}
    arguments = EngineArgs(
        speculative_config=sequoia, tensor_parallel_size=2, distributed_executor_backend="ray",
        **OPTIONS,
    )  # fmt: skip
    config = arguments.create_engine_config()
    Path(tree).unlink()
    engine = LLMEngine.from_vllm_config(config)
    workers = [psutil.Process(number) for number, _ in engine.collective_rpc(where_it_runs)]
    return engine, workers


def generate_then_kill_a_worker(
    prompts: list[str], params: list[dict[str, Any]], tree: str
) -> dict[str, Any]:
    """What each of the functions below gives, of one engine: it is long in starting."""
    engine, workers = start(tree)
    return {
        "generated": generate(engine, prompts, params),
        "killed": kill_a_worker(engine, workers),
    }


def generate(engine: LLMEngine, prompts: list[str], params: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens of every prompt on the Ray executor, and what every rank counted."""
    for number, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, SamplingParams(**settings))
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return {
        "tokens": [tokens[str(number)] for number in range(len(prompts))],
        "ranks": engine.collective_rpc("sequoia_stats"),
        "directories": [directory for _, directory in engine.collective_rpc(where_it_runs)],
    }


def kill_a_worker(engine: LLMEngine, workers: list[psutil.Process]) -> dict[str, Any]:
    """Kills the second of two ranks amid a generation; the error that the caller then gets."""
    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
    engine.add_request("killed", "def fibonacci(n):", params)
    produced = 0
    while produced < 16:
        for output in engine.step():
            produced = len(output.outputs[0].token_ids)
    found = footprint([psutil.Process(), *workers])
    workers[1].kill()
    error = None
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except Exception as raised:
        error = f"{type(raised).__module__}.{type(raised).__qualname__}: {raised}"
    return {**found, "produced": produced, "error": error}
