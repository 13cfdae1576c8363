"""vLLM's offloaders with trees: of weights to host memory, and of prefixes by its connector."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from sequoia_vllm.engine.common.patched import patched
from tests.support.calling import called_once
from tests.support.engines import runner_of, sequoia, whole_trees
from tests.support.generating import VOCAB, random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import generate, generate_with_trees, rehearsing
from tests.support.stored_cache import (
    CONNECTOR,
    LENGTHS,
    CopyingWorker,
    answer_crowded,
    check_crowded,
    converse_twice,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LAYERS = 4
# Of four layers the second and the last, which share one buffer on the device.
PREFETCH = {"offload_backend": "prefetch", "offload_group_size": 2, "offload_prefetch_step": 1}
UVA = {"offload_backend": "uva", "cpu_offload_gb": 1}
KEPT = [token for token in range(VOCAB) if token % 4]
"""Tokens that the draft's output layer has rows of."""


def start_and_generate(models: str) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    target, draft = save_related_pair(Path(models), num_hidden_layers=LAYERS)
    # The second prompt is longer than any graph; the first has one, in pieces.
    requests = random_prompts([9, 40])
    engine = {"model": target, "max_num_seqs": 2}
    with rehearsing(None, **engine) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, requests, params)["tokens"]}
    config = sequoia(size=8, depth=3, draft=draft, draft_vocabulary=KEPT)
    for name, options in (("prefetch", PREFETCH), ("uva", UVA)):
        with logged() as kept, rehearsing(config, **engine, **options) as llm:
            answers[name] = {
                "log": kept.output, "together": generate_with_trees(llm, requests, params),
                "alone": generate_with_trees(llm, requests[:1], params), **offloaded(llm),
            }  # fmt: skip
        answers[f"mutant, {name}"] = with_the_draft_offloaded(config, {**engine, **options})
    answers["mutant, no wait"] = without_waiting_before_replays(config, requests, params, engine)
    nowhere = {**PREFETCH, "offload_params": {"no_such_weight"}}
    with logged() as kept, rehearsing(config, enforce_eager=True, **{**engine, **nowhere}):
        answers["nothing matches"] = kept.output
    return answers


def with_the_draft_offloaded(config: dict, options: dict) -> Any:
    """What the draft has offloaded, or how the engine fails to start."""
    from sequoia_vllm.engine.v2.drafting import drafter

    options = {**options, "enforce_eager": True}
    with patched(drafter, "nothing_offloaded", nullcontext):
        try:
            with rehearsing(config, **options) as llm:
                return offloaded(llm)["draft"]
        except AssertionError as error:
            return str(error)


def without_waiting_before_replays(config: dict, requests: list, params: Any, engine: dict) -> Any:
    """Tokens of trees whose graphs do not wait for the copies of offloaded layers."""
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    with (
        rehearsing(config, **engine, **PREFETCH) as llm,
        patched(PrefetchOffloader, "sync_prev_onload", lambda _: None),
    ):
        return generate(llm, requests, params)["tokens"]


logged = partial(TestCase().assertLogs, "vllm.sequoia", logging.INFO)


def offloaded(llm: Any) -> dict[str, Any]:
    """Names of the offloaded parameters of target and draft."""
    from vllm.model_executor.offloader.base import get_offloader

    runner, pool = runner_of(llm), getattr(get_offloader(), "buffer_pool", None)
    buffers = {b.data_ptr() for group in pool._buffers.values() for b in group} if pool else set()
    models = {"target": runner.model, "draft": runner.speculator.model}
    return {
        name: sorted(
            parameter_name
            for parameter_name, parameter in model.named_parameters()
            if getattr(parameter, "_vllm_is_uva_offloaded", False)
            or parameter.data_ptr() in buffers
        )
        for name, model in models.items()
    }


generated = called_once(call_on_gpu, start_and_generate)


@pytest.mark.parametrize("backend", ["prefetch", "uva"])
@pytest.mark.parametrize(("batch", "requests"), [("together", 2), ("alone", 1)])
def test_tokens_are_those_of_plain_vllm_from_graphs(batch, requests, backend, generated):
    found = generated[backend][batch]
    assert found["tokens"] == generated["plain"][:requests]
    assert found["counts"]["tokens_per_tree"] > 1.3  # 1.5 measured
    assert min(found["graphs"][kind] for kind in ("DraftGraphs", "TreeGraphManager")) >= 3
    assert found["eager growth"] == []


def test_what_is_offloaded_is_the_targets(generated):
    layers = {
        name: {parameter.split(".")[2] for parameter in generated[name]["target"]}
        for name in ("prefetch", "uva")
    }
    assert layers == {"prefetch": {"1", "3"}, "uva": {str(layer) for layer in range(LAYERS)}}
    assert generated["prefetch"]["draft"] == generated["uva"]["draft"] == []


def test_the_log_says_how_much_and_warns_where_nothing_is(generated):
    names = ("prefetch", "uva")
    logs = [*(generated[name]["log"] for name in names), generated["nothing matches"]]
    [prefetch], [uva], [nothing] = ([line for line in log if "weights" in line] for log in logs)
    assert prefetch.startswith("INFO")
    assert "of the target's weights are offloaded (prefetch, through buffers of " in prefetch
    assert uva.startswith("INFO")
    assert "of the target's weights are offloaded (uva); the draft's are not" in uva
    assert nothing.startswith("WARNING")
    assert "none of the target's weights" in nothing
    assert "--offload-params" in nothing


def test_mistakes_are_found(generated):
    """A draft under the engine's offloader; and a graph that does not wait for copies.

    A prompt's step, without a graph, has begun to copy what the next one's begins with.
    """
    assert "wrap_modules should only be called once" in generated["mutant, prefetch"]
    assert generated["mutant, uva"] != []
    assert generated["mutant, no wait"] != generated["plain"]


def converse(models: str) -> dict[str, Any]:
    """Two turns, by plain vLLM and by trees whose second turns are loaded.

    vLLM's GPU engine stores prefixes a step late, while the next trees are written.
    """
    target, draft = save_related_pair(Path(models))
    with rehearsing(None, model=target) as llm:
        answers = {"plain": converse_twice(llm, trees=False)}
    transfer = KVTransferConfig(**CONNECTOR)
    config = sequoia(size=8, depth=3, draft=draft)
    with rehearsing(config, model=target, kv_transfer_config=transfer) as llm:
        return answers | {"trees": converse_twice(llm, trees=True)}


def test_turns_on_loaded_keys_are_those_of_plain_vllm(tmp_path):
    answers = call_on_gpu(converse, tmp_path, models=str(tmp_path))
    found, plain = answers["trees"], answers["plain"]
    assert found["loaded"] == sum((length + 49) // 16 * 16 for length in LENGTHS)
    assert found["tokens"] == plain["tokens"]
    assert min(found["tokens per tree"]) > 1.5


CROWDED = {"max_num_seqs": 4, "num_gpu_blocks_override": 20, "max_model_len": 192}
"""One block is nobody's. At their ends two of the requests take 20, of which four are shared."""


def crowd(models: str) -> dict[str, Any]:
    """Eight requests in a cache for two, whose copies end a step later, as on a GPU."""
    target, draft = save_related_pair(Path(models))
    with rehearsing(None, model=target, max_num_seqs=4) as llm:
        answers = {"plain": answer_crowded(llm, trees=False, max_tokens=40)}
    transfer = KVTransferConfig(**CONNECTOR)
    config = whole_trees(size=8, depth=3, draft=draft)
    with (
        patched(CopyingWorker, "is_late", True),
        rehearsing(config, model=target, kv_transfer_config=transfer, **CROWDED) as llm,
    ):
        return answers | {"trees": answer_crowded(llm, trees=True, max_tokens=40)}


def test_preempted_requests_whose_keys_are_loaded_answer_as_plain_vllm(tmp_path):
    answers = call_on_gpu(crowd, tmp_path, models=str(tmp_path))
    check_crowded(answers["trees"], answers["plain"])
