"""A running engine as `verify` uses it: answers, requests that come and go, samples, scores."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from sequoia_vllm.bench.engines import BenchEngine
from sequoia_vllm.bench.methods import Method
from sequoia_vllm.measuring.engines import open_llm
from sequoia_vllm.measuring.step_recorder import EXTENSION
from sequoia_vllm.verifying.answers import Scored, Two

TOGETHER = 8  # requests in a batch
LIKELIEST = 128  # tokens that plain vLLM reports at a place; fewer hide more of a wrong law
_EVERY = 2  # steps between arrivals
_LONGEST_PREFACE = 640  # tokens; blocks of hybrid models have more, and are not filled


@dataclass
class Traffic:
    """Answers to requests that came and went, and what became of them."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    aborted: int = 0
    preemptions: int = 0
    prefix_hits: int = 0  # tokens of prompts that the prefix cache had


class VerifyEngine(BenchEngine):
    """A running engine of one method."""

    def answer(self, prompts: Sequence[list[int]], length: int, batch: int) -> list[Scored]:
        """Greedy answers of ``length`` tokens, ``batch`` at once, with the two likeliest tokens at
        each place if this is plain vLLM."""
        from vllm import SamplingParams

        is_plain = self.method.speculative_config is None
        params = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False,
            logprobs=2 if is_plain else None,
        )  # fmt: skip
        found = []
        for first in range(0, len(prompts), batch):
            requests = [{"prompt_token_ids": list(p)} for p in prompts[first : first + batch]]
            for output in self._llm.generate(requests, params, use_tqdm=False):
                one = output.outputs[0]
                places = [_likeliest(entry, 2) for entry in one.logprobs or ()]
                found.append(Scored(list(one.token_ids), places))
        return found

    def sample(self, prompts: Sequence[list[int]], samples: int, length: int) -> list[list[int]]:
        """Answers of ``length`` tokens at temperature 1, ``samples`` to each prompt in a row."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(samples)]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def score(self, prompt: Sequence[int], answer: Sequence[int], likeliest: int) -> Scored:
        """What this model says at each token of an answer: its ``likeliest`` tokens, and gaps."""
        from vllm import SamplingParams

        likeliest = min(likeliest, self._config.model_config.get_vocab_size())
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=likeliest, detokenize=False
        )
        request = {"prompt_token_ids": [*prompt, *answer]}
        [result] = self._llm.generate([request], params, use_tqdm=False)
        scored = result.prompt_logprobs[len(prompt) :]
        places = [_likeliest(entry, likeliest) for entry in scored]
        gaps = [
            max(place.values()) - entry[token].logprob
            for token, place, entry in zip(answer, places, scored, strict=True)
        ]
        return Scored(list(answer), places, gaps)

    def come_and_go(self, prompts: Sequence[list[int]], length: int) -> Traffic:
        """Greedy answers to requests that arrive one by one and read one preface; one is aborted,
        all that run are preempted once, and each answer is continued in a second request."""
        found = Traffic()
        before = [self._metric(name) for name in _COUNTED]
        preface = self._preface(prompts, length)
        first = [[*preface, *prompt] for prompt in prompts]
        answers = self._joined(first, length, found, disturbed=True)
        second = [
            [*prompt, *answer[: length // 2]] for prompt, answer in zip(first, answers, strict=True)
        ]
        answers += self._joined(second, length, found)
        for prompt, answer in zip([*first, *second], answers, strict=True):
            if answer:
                found.prompts.append(prompt)
                found.answers.append(answer)
        now = [self._metric(name) for name in _COUNTED]
        found.preemptions, found.prefix_hits = (
            int(b - a) for a, b in zip(before, now, strict=True)
        )
        return found

    def _joined(
        self, prompts: Sequence[list[int]], length: int, found: Traffic, disturbed: bool = False
    ) -> list[list[int]]:
        """Answers to requests that arrive one by one; to the aborted one none."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        answers: list[list[int]] = [[] for _ in prompts]
        rows = {f"verify-{self._requests + row}": row for row in range(len(prompts))}
        self._requests += len(prompts)
        waiting = list(rows)
        unwanted = waiting[1] if disturbed and len(waiting) > 2 else None
        for step in count():
            if waiting and step % _EVERY == 0:
                request = waiting.pop(0)
                prompt = {"prompt_token_ids": list(prompts[rows[request]])}
                engine.add_request(request, prompt, params)
            if disturbed and step == _EVERY * 3 + 1:
                if unwanted is not None:
                    engine.abort_request([unwanted])
                    found.aborted += 1
                # A preemption as by a full cache, wherever there is room.
                engine.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                if output.finished and output.request_id != unwanted:
                    answers[rows[output.request_id]] = list(output.outputs[0].token_ids)
            if not waiting and not engine.has_unfinished_requests():
                return answers
        raise AssertionError

    def _preface(self, prompts: Sequence[list[int]], length: int) -> list[int]:
        """A text that fills a block of the cache, cut from the prompts; shorter if requests are."""
        longest = max(map(len, prompts)) + 2 * length + 2 * self.most_nodes
        room = self._config.model_config.max_model_len - longest - 1
        wanted = min(self._config.cache_config.block_size + 8, _LONGEST_PREFACE, max(room, 0))
        joined = [token for prompt in prompts for token in prompt]
        return (joined * (wanted // max(len(joined), 1) + 1))[:wanted]

    @property
    def most_nodes(self) -> int:
        """Nodes of the engine's tree."""
        return 1 if self.tree is None else self.tree.size

    def memory(self) -> dict[str, int]:
        """Bytes in use, by what they are of, summed over workers (`StepRecorder`)."""
        total: dict[str, int] = {}
        for worker in self._llm.collective_rpc("sequoia_memory"):
            for name, used in worker.items():
                total[name] = total.get(name, 0) + used
        return total

    def limits(self) -> Mapping[str, Any]:
        """What the engine resolved of its options, for the report."""
        config = self._config
        return {
            "dtype": self.dtype,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "block_size": config.cache_config.block_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "quantization": config.model_config.quantization,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "enforce_eager": bool(config.model_config.enforce_eager),
            "runner": "V2" if self.uses_v2 else "V1",
        }

    def _metric(self, name: str) -> float:
        return sum(one.value for one in self._llm.get_metrics() if one.name == name)


_COUNTED = ("vllm:num_preemptions", "vllm:prefix_cache_hits")


def _likeliest(entry: Mapping[int, Any], most: int) -> Two:
    """The log-probabilities of the likeliest tokens among those that vLLM reports at a place. It
    reports the chosen token, too, of any rank."""
    ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))[:most]
    return {token: value.logprob for token, value in ranked}


@contextmanager
def open_verified(method: Method, options: Mapping[str, Any]) -> Iterator[VerifyEngine]:
    """Starts an engine of a method with these arguments of ``vllm.LLM``.

    Raises:
        CalibrationError: vLLM cannot start it.
    """
    config = method.speculative_config
    own = {"worker_extension_cls": EXTENSION, "disable_log_stats": False}
    with open_llm(**{**options, **own}, speculative_config=config) as llm:
        yield VerifyEngine(method, llm)
