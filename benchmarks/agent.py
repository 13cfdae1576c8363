"""Measures an agent's conversation: thoughts, a tool call by its schema, the result, an answer.

    python -m benchmarks.agent --before CHECKOUT --output benchmarks/agent.json

Plain vLLM, its chain of three drafts, and Sequoia answer the same questions in alternating rounds,
each in a process of its own, one request at a time. ``--before`` names a checkout of an older
commit, whose Sequoia is measured beside this one's. Greedy, in float32, not compiled. SmolLM2 was
not trained to think: a budget ends its thoughts. Prompts are cached, as an agent's are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

ROOT = Path(__file__).parents[1]
THINK, ANSWER = "<issue_start>", "<issue_closed>"  # special tokens that SmolLM2 never writes
TOOLS = {"weather": "city", "population": "city", "price": "product", "translate": "word"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": list(TOOLS)},
        "arguments": {
            "type": "object",
            "properties": {"value": {"type": "string", "maxLength": 24}},
            "required": ["value"],
        },
    },
    "required": ["name", "arguments"],
}
SYSTEM = (
    "You are an assistant with tools. First think about the question in a few sentences. Then call "
    'one tool as JSON, {"name": TOOL, "arguments": {"value": VALUE}}. The tools are: '
    + ", ".join(f"{name} (of a {of})" for name, of in TOOLS.items())
)
QUESTIONS = [
    ("What is the weather in Lisbon today?", "Lisbon: 23 degrees, sunny, wind from the north."),
    ("How many people live in Nairobi?", "Nairobi: 4,397,073 people in 2019."),
    ("How much does a bicycle cost?", "bicycle: 240 to 900 euros, 410 on average."),
    ("How do I say river in Spanish?", "river: río (masculine). Plural: ríos."),
]
DRAFT = ROOT / "examples" / "models" / "smollm2-draft"
ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {
        "method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3,
        "use_heterogeneous_vocab": True,
    },
    "sequoia": {
        "method": "sequoia", "model": str(DRAFT), "tree": {"size": 12, "depth": 5}, "adapt": False
    },
}  # fmt: skip


class Parser(BaseThinkingReasoningParser):
    """Thoughts stand between two special tokens."""

    start_token, end_token = THINK, ANSWER


ReasoningParserManager.register_module("agent", module=Parser)


class Agent:
    """One engine, and what it is asked."""

    def __init__(self, model: str, config: dict[str, Any] | None) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model, speculative_config=config, dtype="float32", max_model_len=1024,
            max_num_seqs=2, enforce_eager=True, max_num_batched_tokens=1024, seed=0,
            disable_log_stats=True, kv_cache_memory_bytes=192 << 20, enable_prefix_caching=True,
            structured_outputs_config={
                "backend": "xgrammar", "disable_any_whitespace": True, "reasoning_parser": "agent",
                "reasoning_parser_plugin": __file__,
            },
            reasoning_config={"reasoning_parser": "agent"},
        )  # fmt: skip
        self._encode = self._llm.get_tokenizer().encode

    def converse(self, question: str, told: str) -> dict[str, dict[str, Any]]:
        """Asks, tells the tool's result, and gets the answer: what each of both took."""
        prompt = self._encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            f"<|im_start|>assistant\n{THINK}"
        )
        call = self._ask(prompt, schema=SCHEMA, thinks=48, longest=128)
        result = self._encode(
            f"<|im_end|>\n<|im_start|>user\nThe tool says: {told} Answer my question in two "
            f"sentences.<|im_end|>\n<|im_start|>assistant\n{THINK}"
        )
        answer = self._ask([*prompt, *call["tokens"], *result], schema=None, thinks=24, longest=96)
        return {"call": call, "answer": answer}

    def _ask(self, prompt: list[int], *, schema: Any, thinks: int, longest: int) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        engine = self._llm.llm_engine
        params = SamplingParams(
            temperature=0, max_tokens=longest, thinking_token_budget=thinks,
            structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
        )  # fmt: skip
        engine.add_request("one", {"prompt_token_ids": prompt}, params)
        begin, arrived, steps = time.perf_counter(), 0.0, 0
        found: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = output.outputs[0]
            if found is not None:
                steps += 1
                arrived = arrived or time.perf_counter() - begin
        return {
            "tokens": list(found.token_ids), "steps": steps - 1,
            "seconds": time.perf_counter() - begin - arrived,
        }  # fmt: skip


def work(model: str, config: dict[str, Any] | None) -> None:
    """Serves rounds: a line in, a line of JSON out."""
    answers, sys.stdout = sys.stdout, sys.stderr
    agent = Agent(model, config)
    for word in ["ready", *sys.stdin]:
        rounds = [agent.converse(*each) for each in QUESTIONS]
        print(json.dumps(None if word == "ready" else rounds), file=answers, flush=True)


def start(model: str, config: dict[str, Any] | None, checkout: Path) -> "subprocess.Popen[str]":
    """Starts an engine with the package of a checkout."""
    words = [sys.executable, __file__, "--work", json.dumps(config), "--model", model]
    variables = {"PYTHONPATH": str(checkout), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.Popen(
        words, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def asked(worker: "subprocess.Popen[str]", word: str = "") -> Any:
    """Sends a line if there is one, and waits for what comes back."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    if word:
        worker.stdin.write(word + "\n")
        worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def row(rounds: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]], part: str) -> Any:
    """What one engine's requests of one kind took, by its rounds."""
    last = [each[part] for each in rounds[-1]]
    pairs = zip(last, plain[-1], strict=True)
    same = [one["tokens"] == other[part]["tokens"] for one, other in pairs]
    tokens = sum(len(one["tokens"]) - 1 for one in last)
    seconds = [sum(each[part]["seconds"] for each in one) for one in rounds]
    return {
        "tokens": tokens,
        "steps": sum(one["steps"] for one in last),
        "tokens per step": round(tokens / sum(one["steps"] for one in last), 2),
        "ms per token": [round(1e3 * one / tokens, 2) for one in seconds],
        "median, ms": round(1e3 * statistics.median(seconds) / tokens, 2),
        "as plain's": f"{sum(same)} of {len(same)}",
    }


def measure(model: str, before: Path | None, count: int) -> dict[str, Any]:
    """Rows of all engines, for the tool's call and for the answer."""
    where = {name: (config, ROOT) for name, config in ENGINES.items()}
    if before is not None:
        where["sequoia, before"] = ENGINES["sequoia"], before
    workers = {name: start(model, config, folder) for name, (config, folder) in where.items()}
    try:
        for worker in workers.values():
            asked(worker)
        found: dict[str, list[Any]] = {name: [] for name in workers}
        for _ in range(count):
            for name, worker in workers.items():
                found[name].append(asked(worker, "round"))
    finally:
        for worker in workers.values():
            worker.kill()
    return {
        part: {name: row(rounds, found["plain"], part) for name, rounds in found.items()}
        for part in ("call", "answer")
    }


def main() -> None:
    """Measures, prints and writes."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default=str(_chat_model()))
    arguments.add_argument("--before", type=Path)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    arguments.add_argument("--work", type=json.loads)
    given = arguments.parse_args()
    if "--work" in sys.argv:
        return work(given.model, given.work)
    from sequoia_vllm.measuring.provenance import provenance

    rows = measure(given.model, given.before, given.rounds)
    commit = subprocess.check_output(["git", "-C", given.before, "rev-parse", "HEAD"], text=True)
    text = json.dumps({**rows, **provenance(before=commit.strip())}, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")
    return None


def _chat_model() -> Path:
    return Path.home() / ".cache" / "sequoia-vllm" / "smollm2-135m-instruct"


if __name__ == "__main__":
    main()
