"""Engines that stay alive together and are measured in turns.

An engine starts in a minute for a model of a billion parameters, so we start each only once. A
waiting engine disturbs the others for a second after its last step (`wait_for_quiet`). After that,
three engines on two cores used 1 % of the CPU, and steps were as fast as with one engine.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.bench.methods import AUTO, BenchError, Kind, Method
from sequoia_vllm.engine.common.draft_schedule import scheduled_drafts
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.compat.contract import current_device
from sequoia_vllm.hardware.step_curves import StepRecord
from sequoia_vllm.measuring.engines import (
    EngineSpec,
    Progress,
    compare_models,
    load_config,
    open_engine,
)
from sequoia_vllm.orphans import environment
from sequoia_vllm.tree import TokenTree

# Memory of an engine besides weights and KV cache: measured 0.9 GiB, within this process 0.65.
_PROCESS_GIB, _WITHIN_GIB = 1.0, 0.7
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
PARTS = ("target", "draft", "drawing", "verify")  # parts of a step


@dataclass(frozen=True)
class Arrival:
    """New tokens of one engine step."""

    seconds: float  # time since the requests were sent
    tokens: tuple[int, ...]  # new tokens of each request of the batch, perhaps 0
    finished: bool  # whether some request now has all its tokens


@dataclass(frozen=True)
class Generation:
    """One batch of completions."""

    token_ids: list[list[int]]
    texts: list[str]
    arrivals: list[Arrival]  # new tokens of each step, until every request has all its tokens


class BenchEngine:
    """A running engine of one method."""

    def __init__(self, method: Method, llm: Any) -> None:
        self.method = method
        self._llm = llm
        self._requests = 0
        llm.collective_rpc("sequoia_record_steps")

    @property
    def dtype(self) -> str:
        """Type of weights and activations, as vLLM resolved it."""
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def uses_v2(self) -> bool:
        """Whether vLLM's Model Runner V2 runs it."""
        return bool(self._config.use_v2_model_runner)

    @property
    def has_full_graphs(self) -> bool:
        """Whether vLLM was left with full CUDA graphs for steps of all kinds."""
        return str(self._config.compilation_config.cudagraph_mode) == "FULL"

    @property
    def tree(self) -> TokenTree | None:
        """The engine's tree; None: another method, or "auto" chose not to speculate."""
        if not SequoiaSettings.enabled(self._config):
            return None
        return SequoiaSettings.of(self._config).tree

    def drafts(self, batch_size: int) -> int:
        """Drafts of each request at this batch size."""
        if self.method.kind is Kind.CHAIN:
            return self.method.chain_drafts(batch_size)
        return 0 if self.tree is None else scheduled_drafts(self._config)[batch_size - 1]

    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_tokens: int
    ) -> Generation:
        """Completes a batch with exactly ``max_tokens`` tokens each.
        It asks for more, so that no step is cut short at the last token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tree = 0 if self.tree is None else self.tree.depth
        most = self.method.most_drafts if self.method.kind is Kind.CHAIN else tree
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens + most, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA, detokenize=False,
        )  # fmt: skip
        engine = self._llm.llm_engine
        rows = {f"bench-{self._requests + row}": row for row in range(len(prompts))}
        self._requests += len(prompts)
        start = time.perf_counter()
        for request, row in rows.items():
            engine.add_request(request, {"prompt_token_ids": list(prompts[row])}, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        arrivals: list[Arrival] = []
        while engine.has_unfinished_requests():
            outputs = {rows[output.request_id]: output for output in engine.step()}
            if min(map(len, tokens)) < max_tokens:
                new = [0] * len(tokens)
                for row, output in outputs.items():
                    new[row] = len(output.outputs[0].token_ids)
                    tokens[row].extend(output.outputs[0].token_ids)
                has_all = max(map(len, tokens)) >= max_tokens
                arrivals.append(Arrival(time.perf_counter() - start, tuple(new), has_all))
        wanted = [ids[:max_tokens] for ids in tokens]
        decode = self._llm.get_tokenizer().decode
        texts = [decode(ids, skip_special_tokens=True) for ids in wanted]
        return Generation(wanted, texts, arrivals)

    def take_part_seconds(self, batch_size: int) -> dict[str, float]:
        """Takes the first worker's `part_seconds` since the last call, of steps in which
        ``batch_size`` requests decoded and none read its prompt."""
        steps = self._llm.collective_rpc("sequoia_take_steps", args=(batch_size,))[0]
        return part_seconds([StepRecord(**step) for step in steps])

    def take_counters(self) -> dict[str, Any] | None:
        """Takes Sequoia's counters since the last call; None: the engine has none."""
        if self.tree is None:
            return None
        counters: dict[str, Any] = self._llm.collective_rpc("sequoia_stats", args=(True,))[0]
        return counters

    def gaps_to_best(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Log-probability gaps (nats) between the model's best token and each output token."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        request = {"prompt_token_ids": [*prompt, *output]}
        result = self._llm.generate([request], params, use_tqdm=False)[0]
        scored = result.prompt_logprobs[len(prompt) :]
        return [
            max(entry.logprob for entry in candidates.values()) - candidates[token].logprob
            for token, candidates in zip(output, scored, strict=True)
        ]

    @property
    def _config(self) -> Any:
        return self._llm.llm_engine.vllm_config


def part_seconds(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of each of `PARTS`, and the number of "steps"."""
    return {
        "target": sum(step.target for step in steps),
        "draft": sum(step.drafting - step.drawing for step in steps),
        "drawing": sum(step.drawing for step in steps),
        "verify": sum(step.sampling for step in steps),
        "steps": len(steps),
    }


def in_this_process(methods: Sequence[Method]) -> AbstractContextManager[None]:
    """Makes engines on CPUs start within this process, in two seconds instead of thirty.
    They keep processes of their own where the environment has ``VLLM_ENABLE_V1_MULTIPROCESSING``,
    and beside an n-gram chain: vLLM starts no other engine in a process that has one."""
    ngram = any((one.speculative_config or {}).get("method") == "ngram" for one in methods)
    if current_device() == "gpu" or ngram or _MULTIPROCESSING in os.environ:
        return nullcontext()
    return environment(**{_MULTIPROCESSING: "0"})


@contextmanager
def open_engines(
    methods: Sequence[Method], engine: EngineSpec, options: dict[str, Any], progress: Progress
) -> Iterator[dict[str, BenchEngine]]:
    """Starts an engine for every method, all alive together; yields them by their methods' names.

    Raises:
        BenchError: Memory is too small, or vLLM cannot run a method as it is.
        CalibrationError: vLLM cannot start an engine.
    """
    check_memory(engine, len(methods))
    # Sequoia's first, as vLLM adds an extension in this process to a worker class only if no base
    # class has it yet. Trees that the engine chooses come later: it may be a plain engine.
    order = sorted(
        methods,
        key=lambda one: (
            one.kind is not Kind.SEQUOIA, (one.speculative_config or {}).get("tree", AUTO) == AUTO
        ),
    )  # fmt: skip
    engines = {}
    with ExitStack() as stack:
        for number, method in enumerate(order):
            progress(f"starting engine {number + 1} of {len(order)}, {method.name}", 0, 1)
            config = speculative_config(method, engine)
            own = {**options, **method.engine_options}
            llm = stack.enter_context(open_engine(engine, speculative_config=config, **own))
            engines[method.name] = BenchEngine(method, llm)
            check_runner(engines[method.name])
        yield engines


def speculative_config(method: Method, engine: EngineSpec) -> dict[str, Any] | None:
    """Configures vLLM's chain for a draft with another vocabulary; others stay as they are."""
    config = method.speculative_config
    if method.kind is not Kind.CHAIN or config is None or config["method"] != "draft_model":
        return config
    if compare_models(engine.target, config["model"]).matching is None:
        return config
    return {**config, "use_heterogeneous_vocab": True}


def check_runner(engine: BenchEngine) -> None:
    """Refuses a chain whose sampling, or full CUDA graphs, vLLM would ignore."""
    if engine.method.full_graphs and not engine.has_full_graphs:
        raise BenchError(
            f"{engine.method.name}: vLLM runs it without full CUDA graphs: leave :full out of "
            "--chain, or --eager"
        )
    if "block" in engine.method.sampling and not engine.uses_v2:
        raise BenchError(
            f"{engine.method.name}: vLLM's Model Runner V1 runs here, which has no block "
            "verification and falls back without a word: leave :block out of --chain"
        )


def most_engines(engine: EngineSpec) -> int:
    """How many engines the machine has memory for."""
    return int(_available_gib() / _needed_gib(engine))


def check_memory(engine: EngineSpec, count: int) -> None:
    """Refuses so many engines if the machine has no memory for them."""
    available, needed = _available_gib(), count * _needed_gib(engine)
    if needed > available:
        raise BenchError(
            f"{count} engines need about {needed:.0f} GiB together, and {available:.0f} GiB are "
            "free: compare fewer (--chain, --trees), or give them less (--kv-cache-gib)"
        )


def _needed_gib(engine: EngineSpec) -> float:
    from vllm import envs

    own = _PROCESS_GIB if envs.VLLM_ENABLE_V1_MULTIPROCESSING else _WITHIN_GIB
    target = _weights_gib(engine.target)
    if engine.offload is not None:
        layers = load_config(engine.target).get_text_config().num_hidden_layers
        # Weights outside the layers, such as embeddings, count as one more layer.
        in_memory = engine.offload.memory_gib + (engine.offload.buffers + 1) * target / layers
        target = min(target, in_memory)
    return target + _weights_gib(engine.draft) + engine.kv_cache_gib + own


def _available_gib() -> float:
    import psutil  # vLLM depends on it

    return float(psutil.virtual_memory().available / (1 << 30))


def _weights_gib(model: str) -> float:
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) / (1 << 30)
