"""An engine of real shapes whose weights are made up, and requests for it."""

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.check.machine import used_gib
from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.models import HEAD_POSITIONS, pair_of, write_models
from benchmarks.gpu.sizes import TINY, Sizes

EXTENSION = "benchmarks.gpu.worker.MeasuringWorker"
_SEED_OF_PROMPTS = 17
# What vLLM and the plugin log of a start, for the results.
_START_LINES = re.compile(
    r"Graph capturing finished|Model loading took|KV cache memory|KV cache size|init engine|"
    r"torch\.compile took|Sequoia:"
)


class Engine:
    """A `vllm.LLM` with made-up weights."""

    def __init__(self, llm: Any, sizes: Sizes) -> None:
        self.llm = llm
        self.vllm_config = llm.llm_engine.vllm_config
        self.sizes = sizes
        self._random = random.Random(_SEED_OF_PROMPTS)
        self._count = 0

    def limit(self, drafts: int) -> None:
        """Drafts at most so many tokens of each request from now on, and adapts no more; plain
        vLLM drafts none."""
        if self.vllm_config.speculative_config is not None:
            self.llm.collective_rpc("sequoia_limit_drafts", args=(drafts,))

    def take_steps(self) -> list[dict[str, Any]]:
        """Steps since the last call: fields of `hardware.step_curves.StepRecord`."""
        records: list[dict[str, Any]] = self.llm.collective_rpc("sequoia_take_steps")[0]
        return records

    def prompt(self, length: int) -> dict[str, list[int]]:
        """A prompt of random tokens; no two begin alike, so none is found in the prefix cache."""
        vocabulary = min(20000, self.vllm_config.model_config.get_vocab_size())
        tokens = [self._random.randrange(5, vocabulary) for _ in range(length)]
        return {"prompt_token_ids": tokens}

    def generate(self, prompts: Sequence[dict[str, list[int]]], tokens: int) -> None:
        """Greedy completions of exactly ``tokens`` tokens."""
        self.llm.generate(list(prompts), sampling(tokens), use_tqdm=False)

    def add(self, prompt: dict[str, list[int]], params: Any) -> str:
        """Adds one request to those that run; its id."""
        self._count += 1
        request = f"gpu-{self._count}"
        self.llm.llm_engine.add_request(request, prompt, params)
        return request

    def step(self) -> list[Any]:
        """Waits for the next outputs of running requests."""
        if not self.is_busy:
            raise RuntimeError("all requests have ended before as many steps as were to be timed")
        outputs: list[Any] = self.llm.llm_engine.step()
        return outputs

    @property
    def is_busy(self) -> bool:
        """Whether requests run."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def abort(self, requests: Sequence[str]) -> None:
        """Aborts these requests; those that have ended are left alone."""
        self.llm.llm_engine.abort_request(list(requests))

    def drain(self) -> None:
        """Runs what is left to its end."""
        while self.is_busy:
            self.step()


def sampling(tokens: int, **more: Any) -> Any:
    """Parameters of a request of exactly ``tokens`` tokens; greedy unless ``more`` says else."""
    from vllm import SamplingParams

    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=tokens, **{**common, **more})


@contextmanager
def started(
    run: ItemRun,
    pair: str,
    speculative: dict[str, Any] | None,
    *,
    head_positions: int = HEAD_POSITIONS,
    **options: Any,
) -> Iterator[Engine]:
    """An engine with vLLM's defaults and its steps recorded; what its start took is kept.

    Args:
        speculative: Keys of ``speculative_config`` besides method and model; None: plain vLLM.
        head_positions: Longest context of a head.
        options: Arguments of `vllm.LLM` besides the defaults.
    """
    from vllm import LLM

    models = run.folder / "models"
    target, drafter = write_models(pair_of(pair, run.tiny), models, run.tiny, head_positions)
    if speculative is not None:
        draft = {} if "drafter" in speculative else {"model": drafter}
        speculative = {"method": "sequoia", **draft, **speculative}
    if run.tiny:
        options = {"max_num_seqs": 3, **options, "max_model_len": TINY.longest}
    begun = time.perf_counter()
    llm = LLM(
        target, load_format="dummy", skip_tokenizer_init=True, worker_extension_cls=EXTENSION,
        speculative_config=speculative, **options,
    )  # fmt: skip
    run.record("start", {
        "seconds": round(time.perf_counter() - begun, 1),
        "device_gib": used_gib(),
        "max_num_seqs": llm.llm_engine.vllm_config.scheduler_config.max_num_seqs,
        "log": [line[-300:] for line in run.log_lines() if _START_LINES.search(line)],
    })  # fmt: skip
    engine = Engine(llm, run.sizes)
    llm.collective_rpc("sequoia_record_steps")
    try:
        yield engine
    finally:
        llm.llm_engine.engine_core.shutdown()
