"""Two ranks, two stages and two replicas of the GPU engine, over gloo.

Reductions of ranks are part of the graphs. Replicas of a mixture of experts meet in every forward
pass of the target. They run as in vLLM's example of offline data parallelism, each with an engine
core of its own.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from vllm import SamplingParams

from tests.quick_start.quick_imports import FORK_ENGINES
from tests.support.cores import needs_two_cores
from tests.support.engines import running, sequoia
from tests.support.generating import (
    VOCAB,
    completions,
    counted,
    random_prompts,
    save_related_pair,
    with_noise,
)
from tests.support.heads import as_the_target, save_eagle3
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_llama
from tests.support.rehearsing import rehearsing
from tests.support.serving import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

PROMPTS = random_prompts([9, 14, 6])
HEADS, TWO_LAYERS = {"num_attention_heads": 2, "num_key_value_heads": 2}, {"num_hidden_layers": 2}


def graphs_of(worker: Any) -> dict[str, Any]:
    from gpu_stand_in import graphs

    return graphs.report()


def perturb_second_rank(worker: Any) -> None:
    """Called in each rank: from now on the second draws other drafts, from other logits."""
    if worker.rank == 0:
        return
    model, proposer = worker.model_runner.model, worker.model_runner.speculator

    def disturbed(replay: Any) -> Any:
        def other_drafts(num_trees: int, drafts: int) -> bool:
            ran = replay(num_trees, drafts)
            proposer.drafted.tokens.add_(1).remainder_(VOCAB)
            if (dynamic := proposer._shapes.dynamic) is not None:
                dynamic.parents.copy_(proposer.tables.static_parents)
            return ran

        return other_drafts

    model.compute_logits = with_noise(model.compute_logits)
    for graphs in proposer._graphs.values():
        graphs.replay = disturbed(graphs.replay)


def generate_on_ranks(target: str, draft: str, kept: list[int] | None = None) -> dict[str, Any]:
    """Greedy, seeded and unseeded requests: of trees on two ranks and on one."""
    common = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, seed=5, **common),
        SamplingParams(temperature=1, **common),
    ]
    config = sequoia(
        size=6, depth=2, draft=draft, draft_vocabulary=kept, dynamic_tree=kept is not None
    )
    answers = {}
    for name, options in (
        ("one rank", {}),
        ("two ranks", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ):
        with rehearsing(config, model=target, **options) as llm:
            answers[name] = completions(llm.generate(PROMPTS, params, use_tqdm=False))
            if options:
                llm.collective_rpc(perturb_second_rank)
                for some in (slice(2), slice(1)):  # static trees, and dynamic ones
                    found = llm.generate(PROMPTS[some], params[some], use_tqdm=False)
                    answers[f"disturbed {some.stop}"] = completions(found)
            answers["counts"] = llm.collective_rpc("sequoia_stats")
            answers["graphs"] = llm.collective_rpc(graphs_of)
    return answers


@needs_two_cores
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_two_ranks_replay_graphs_and_give_the_tokens_of_one(drafter, tmp_path, monkeypatch):
    """Both replay graphs and count the same; what the second draws or scores does not matter.

    The head's weights are random: hardly anything is accepted.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the ranks
    monkeypatch.setenv(FORK_ENGINES, "1")  # like users' engines on GPUs
    layers = TWO_LAYERS if drafter == "head" else {}
    target, draft = save_related_pair(tmp_path, **layers, **HEADS)
    kept = list(range(0, VOCAB, 3)) + list(range(1, 100, 3))  # most of them the first rank's
    if drafter == "head":
        draft, kept = save_eagle3(tmp_path / "head", target, list(range(2, 130))), None
    found = call_on_gpu(generate_on_ranks, tmp_path, target=target, draft=draft, kept=kept)
    assert found["two ranks"] == found["one rank"]
    for count in (1, 2):
        assert found[f"disturbed {count}"] == found["one rank"][:count]
    first, second = [
        (rank["tree_steps"], rank["tokens"], rank["depth_counts"]) for rank in found["counts"]
    ]
    assert first == second
    assert first[0] > 0
    assert drafter == "head" or first[1] > 1.2 * first[0]
    for rank in found["graphs"]:
        assert rank["replayed"]["DraftGraphs"] > 0
        assert rank["replayed"]["TreeGraphManager"] > 0


# -- Stages: trees are refused, and why ------------------------------------------------------


STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
# What a stage but the first says when nobody hands it hidden states.
NO_STAGE_BEFORE = "assert intermediate_tensors is not None"


def generate(config: dict[str, Any] | None, **options: Any) -> list[Any]:
    with rehearsing(config, **options) as llm:
        return completions(llm.generate(PROMPTS, greedy([8] * 3), use_tqdm=False))


def refusal(config: dict[str, Any], target: str) -> str:
    """What an engine of two stages says that does not start."""
    with pytest.raises(Exception) as error:  # noqa: PT011 -- vLLM has many kinds
        generate(config, model=target, **STAGES)
    return str(error.value)


def generate_in_stages(target: str, draft: str) -> dict[str, Any]:
    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    return {
        "one stage": generate(None, model=target),
        "two stages": generate(None, model=target, **STAGES),
        "draft in a stage": refusal(chain, target),
    }


def test_trees_are_refused_with_the_fix(tmp_path):
    target, draft = save_related_pair(tmp_path, **TWO_LAYERS)
    message = call_on_gpu(refusal, tmp_path, config=sequoia(draft=draft), target=target)
    assert "builds a draft model as a stage of the target's pipeline" in message
    assert "use tensor parallelism" in message


@pytest.mark.upstream
@needs_two_cores
def test_vllm_builds_a_draft_as_the_last_stage_of_a_pipeline(tmp_path):
    """Plain decoding works; with vLLM's `draft_model` the engine does not start.

    Models ask for the process's pipeline stage when they are built and run, and so does the
    draft, of which the last stage has the only copy. When this fails, vLLM builds drafts whole,
    and the refusal in `sequoia_vllm/engine/frontend/refusals.py` has lost its reason.
    """
    target, draft = save_related_pair(tmp_path, **TWO_LAYERS)
    found = call_on_gpu(generate_in_stages, tmp_path, target=target, draft=draft)
    assert found["two stages"] == found["one stage"]
    assert NO_STAGE_BEFORE in found["draft in a stage"]


# -- Replicas --------------------------------------------------------------------------------


def save_mixture_pair(directory: Path, noise: float = 0.05) -> tuple[str, str]:
    """A tiny Mixtral, and a Llama as its draft, which is often right.

    Each of the target's experts is the draft's feed-forward layer with noise of its own.
    """
    draft = save_llama(
        directory / "draft", seed=3, scale=2.0, vocab_size=VOCAB, max_position_embeddings=512
    )
    dense = LlamaForCausalLM.from_pretrained(draft, dtype=torch.float32)
    shared = as_the_target(str(draft))
    torch.manual_seed(7)
    target = MixtralForCausalLM(MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2))
    target.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, of_draft in zip(target.model.layers, dense.model.layers, strict=True):
            become_experts(layer.mlp, of_draft.mlp, noise)
    target.save_pretrained(directory / "target")
    return str(directory / "target"), str(draft)


def become_experts(mixture: Any, dense: Any, noise: float) -> None:
    mixture.gate.weight.normal_(0, 0.15)
    experts = mixture.experts
    experts.gate_up_proj.copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
    experts.down_proj.copy_(dense.down_proj.weight)
    for weights in (experts.gate_up_proj, experts.down_proj):
        weights.add_(torch.randn_like(weights), alpha=noise)


# Tokens of the requests of each replica, at a time: first one of them has done before the other.
WAVES = [([12, 10], [5]), ([4], [9, 11])]
# So that replicas have unequal numbers of drafts, too.
SCHEDULE = [[1, 1, 5], [2, 2, 3]]


def greedy(tokens: list[int]) -> list[Any]:
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(max_tokens=number, **common) for number in tokens]


def count_idle_steps(worker: Any) -> None:
    run, worker.idle_steps = worker.model_runner._dummy_run, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        worker.idle_steps += 1
        return run(*args, **kwargs)

    worker.model_runner._dummy_run = counting


def report(worker: Any) -> dict[str, Any]:
    return {"idle steps": worker.idle_steps, **graphs_of(worker)["replayed"]}


def generate_on_replica(rank: int, port: int, target: str, draft: str) -> dict[str, Any]:
    os.environ |= {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # an engine core that knows of lock step
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions to it
        FORK_ENGINES: "1",
    }  # fmt: skip
    config = sequoia(6, 2, draft, num_speculative_tokens_per_batch_size=SCHEDULE)
    options = {"max_num_seqs": 2, "distributed_executor_backend": "uni"}  # no more processes
    with rehearsing(config, model=target, **options) as llm:
        llm.collective_rpc(count_idle_steps)
        tokens = []
        for wave in WAVES:
            requests = PROMPTS[: len(wave[rank])]
            outputs = llm.generate(requests, greedy(wave[rank]), use_tqdm=False)
            tokens.append(completions(outputs))
        [reported] = llm.collective_rpc(report)
        return {"tokens": tokens, "counts": counted(llm), **reported}


def generate_on_both(target: str, draft: str) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        common = [free_port()] * 2, [target] * 2, [draft] * 2
        return list(pool.map(generate_on_replica, range(2), *common))


@needs_two_cores
def test_replicas_in_lock_step_give_the_tokens_of_one_plain_engine(tmp_path):
    target, draft = save_mixture_pair(tmp_path)
    found = call_on_gpu(generate_on_both, tmp_path, target=target, draft=draft)
    with running(None, model=target, skip_tokenizer_init=True) as llm:
        longest = completions(llm.generate(PROMPTS[:2], greedy([12, 12]), use_tqdm=False))
    for rank, replica in enumerate(found):
        assert replica["tokens"] == [
            [[tokens[:number]] for number, [tokens] in zip(wave[rank], longest, strict=False)]
            for wave in WAVES
        ]
        assert replica["counts"]["accepted_tokens"] > 0
        assert replica["idle steps"] > 0  # beside one that drafts
        assert replica["TreeGraphManager"] > 0
        assert replica["DraftGraphs"] > 0
    assert found[0]["counts"]["drafts"] != found[1]["counts"]["drafts"]
