"""Engines, requests and models of the tree tests, in the processes that `call_on_v2` starts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.engines import (
    generated,
    metric,
    runner_of,
    running,
    scheduler_of,
    tokens_of,
    whole_trees,
)
from tests.support.models import save_llama

VOCAB = 256
SPEC_DECODE = ("drafts", "draft_tokens", "accepted_tokens")
# Of the engines that run the tiny pairs; 32 is the least block size of CPU_ATTN.
TINY = {"skip_tokenizer_init": True, "block_size": 32}


def save_related_pair(directory: Path, **config: Any) -> tuple[str, str]:
    """A tiny target, and as its draft the same weights with noise: it is often right.

    Small vocabularies keep the interpreter quick: its time goes by the number
    of programs, and kernels have one per thousand tokens or so.
    """
    settings = {"vocab_size": VOCAB, "max_position_embeddings": 512, **config}
    target = save_llama(directory / "target", seed=3, scale=2.0, **settings)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.015)
    model.save_pretrained(directory / "draft")
    return str(target), str(directory / "draft")


def random_prompts(lengths: list[int], vocab: int = VOCAB) -> list[dict[str, list[int]]]:
    """Prompts of random token ids, without the ends of sequences (ids 0 and 1)."""
    generator = torch.Generator().manual_seed(11)
    return [
        {"prompt_token_ids": torch.randint(2, vocab, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def greedy_and_seeded(
    count: int, max_tokens: int | Sequence[int], temperature: float = 0.9, **more: Any
) -> list[Any]:
    """Parameters of greedy and of seeded requests in turn; lengths may be given for each."""
    lengths = [max_tokens] * count if isinstance(max_tokens, int) else max_tokens
    return [
        SamplingParams(
            temperature=temperature * (index % 2), seed=index if index % 2 else None,
            max_tokens=length, ignore_eos=True, detokenize=False, **more,
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


def with_noise(compute_logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Other logits: what a rank would choose by these must not matter."""

    def other_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        return logits + 3 * torch.randn_like(logits)

    return other_logits


def completions(outputs: list[Any]) -> list[list[list[int]]]:
    """Tokens of every completion of every request."""
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def joined(
    llm: Any, requests: list[Any], params: list[Any], aborted: int | None = None, every: int = 2,
    before_step: Callable[[int], None] = lambda step: None, adapters: Sequence[Any] = (),
) -> list[list[list[int]]]:  # fmt: skip
    """`completions` of requests that come one by one, but of one that is aborted while others run.

    `every` so many steps brings another; 0: all come at once. `adapters`: one for each request.
    """
    engine, done = llm.llm_engine, {}
    waiting = list(zip(map(str, range(len(requests))), requests, params, strict=True))
    of_each = dict(zip(map(str, range(len(adapters))), adapters, strict=True))
    for step in itertools.count():
        while waiting and step >= every * int(waiting[0][0]):
            name, *request = waiting.pop(0)
            engine.add_request(name, *request, lora_request=of_each.get(name))
        if aborted is not None and step == every * (aborted + 1) + 1:
            engine.abort_request([str(aborted)])
        before_step(step)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not waiting and not engine.has_unfinished_requests():
            break
    others = [str(index) for index in range(len(requests)) if index != aborted]
    return completions([done[name] for name in others])


def resumed(llm: Any, requests: list[Any], tokens: list[Any], ends: int) -> dict[str, Any]:
    """The last so many tokens of every other request again, greedily, behind all before them.

    With the tokens of their prompts that the prefix cache had.
    """
    halves = [
        {"prompt_token_ids": request["prompt_token_ids"] + first[:-ends]}
        for request, [first] in zip(requests, tokens, strict=True)
    ]
    before, params = metric(llm, "vllm:prefix_cache_hits"), greedy_and_seeded(len(halves), ends)
    outputs = llm.generate(halves[::2], params[::2], use_tqdm=False)
    hits = metric(llm, "vllm:prefix_cache_hits") - before
    return {"tokens": completions(outputs), "hits": hits}


def logprobs_of(positions: Any) -> list[dict[str, list[float]]]:
    """Logprob and rank of each token reported at each position."""
    return [
        {str(token): [value.logprob, value.rank] for token, value in position.items()}
        for position in positions or []
        if position is not None
    ]


def answered(outputs: list[Any]) -> dict[str, Any]:
    """Tokens of each request's first completion, logprobs of these, and of prompts."""
    return {
        "tokens": tokens_of(outputs),
        "logprobs": [logprobs_of(output.outputs[0].logprobs) for output in outputs],
        "prompt_logprobs": [logprobs_of(output.prompt_logprobs) for output in outputs],
    }


def check_logprobs(ours: list[Any], plain: list[Any]) -> int:
    """How many logprobs were compared."""
    compared = 0
    for found, expected in zip(ours, plain, strict=True):
        assert len(found) == len(expected)
        for position, expected_position in zip(found, expected, strict=True):
            assert position.keys() == expected_position.keys()
            for token, (logprob, rank) in expected_position.items():
                assert position[token][0] == pytest.approx(logprob, abs=1e-4)
                assert position[token][1] == rank
                compared += 1
    return compared


def describe(llm: Any) -> dict[str, str]:
    """Which of vLLM's and our classes run."""
    runner = runner_of(llm)
    layer = next(iter(runner.compilation_config.static_forward_context.values()))
    attention = getattr(layer, "impl", layer)
    return {
        "runner": type(runner).__name__,
        "scheduler": type(scheduler_of(llm)).__name__,
        "attention": type(attention).__name__,
    }


def counted(llm: Any) -> dict[str, Any]:
    """The worker's counters since the last call, and vLLM's since its start."""
    [stats] = llm.collective_rpc("sequoia_stats", args=(True,))
    metrics = speculated(llm)
    return {
        **stats,
        **metrics,
        "preemptions": metric(llm, "vllm:num_preemptions"),
        "tokens_per_tree": stats["tokens"] / max(stats["tree_steps"], 1),
    }


@contextmanager
def processed_chunks() -> Iterator[list[bool]]:
    """Whether vLLM's sampler processed its logits, of each chunk verified within the block.

    To be entered once an engine runs, whose start checks what is replaced here.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from sequoia_vllm.engine.v2.verification.verifier import TreeVerifierV2

    apply, verify = Sampler.apply_sampling_params, TreeVerifierV2._verify_requests
    calls, chunks = [], []

    def applying(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self)
        return apply(self, logits, *args, **kwargs)

    def verifying(self: Any, *args: Any) -> None:
        calls.clear()  # of batches without drafts, which are vLLM's own
        verify(self, *args)
        chunks.append(bool(calls))

    with (
        patched(Sampler, "apply_sampling_params", applying),
        patched(TreeVerifierV2, "_verify_requests", verifying),
    ):
        yield chunks


def generate(
    config: dict | None, prompts: list[Any], params: Any, **options: Any
) -> dict[str, Any]:
    """Tokens of every completion on an engine of its own, and with trees what it counted."""
    with running(config, **options) as llm:
        if config:
            return generate_on(llm, prompts, params)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": completions(outputs), **describe(llm)}


def generate_speculating(
    config: dict[str, Any] | None, prompts: list[Any], params: Any, **options: Any
) -> dict[str, Any]:
    """Tokens, and vLLM's counters of drafts: of its own speculation, ours, or none."""
    with running(config, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": completions(outputs), "counts": speculated(llm)}


def speculated(llm: Any) -> dict[str, int]:
    """vLLM's counters of drafts."""
    return {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in SPEC_DECODE}


def generate_on(llm: Any, prompts: list[Any], params: Any) -> dict[str, Any]:
    """Tokens of every completion on this engine with trees, and what it counted."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {"tokens": completions(outputs), **describe(llm), "counts": counted(llm)}


def served(
    config: dict, prompts: list[Any], params: Any, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Tokens of each request's first completion on an engine of its own, and `counted`."""
    with running(config, **options) as llm:
        return generated(llm, prompts, params), counted(llm)


def generate_with_trees(
    draft: str, prompts: list[Any], params: Any, size: int = 8, depth: int = 3, **options: Any
) -> dict[str, Any]:
    """`generate` with a tree of this size and depth, whole whatever the token budget is."""
    return generate(whole_trees(size=size, depth=depth, draft=draft), prompts, params, **options)
