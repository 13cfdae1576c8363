"""Counts and times the steps of an agent: it thinks, calls a tool by its schema, reads, answers.

    python -m benchmarks.agent MODEL DRAFT OUTPUT [PATTERN]

PATTERN is a regular expression for names of engines; plain vLLM always runs. Each request is alone
and greedy. A turn has two. In the first the model thinks between brackets, as a small one knows no
other marker, for a budget of tokens, and then calls a tool by a schema. The second answers in free
text. A round has a turn for each tool. Engines stay open together, and take each round in turn, so
that each sees the machine's same hours. No turn comes twice: engines that remember earlier answers
know other values' alone.
"""

import json
import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.foretold import TREE
from sequoia_vllm.measuring.engines import open_llm
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from tests.support import brackets

ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "seed": 0,
    "kv_cache_memory_bytes": 128 << 20, "enforce_eager": True,
    "structured_outputs_config": {
        "backend": "xgrammar", "disable_any_whitespace": True,
        "reasoning_parser": "brackets", "reasoning_parser_plugin": brackets.__file__,
    },
    "reasoning_config": {"reasoning_parser": "brackets", "reasoning_end_str": ")"},
}  # fmt: skip
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["weather", "population", "price", "translate"]},
        "arguments": {
            "type": "object",
            "properties": {"value": {"type": "string", "maxLength": 24}},
            "required": ["value"],
        },
    },
    "required": ["name", "arguments"],
}
THOUGHTS, TOKENS = 48, 112  # most tokens of thoughts, and of a request
SYSTEM = (
    "You have tools: weather, population, price and translate. Each takes a value. Think between "
    "brackets, then call one of them. Then tell the user what you found, in a sentence."
)
# A small model follows an example, and little else.
EXAMPLE = (
    ("user", "What does a good umbrella cost?"),
    (
        "assistant",
        "(The user wants to know the price of an umbrella. The tool for that is price, and the "
        'value is umbrella.\n){"name":"price","arguments":{"value":"umbrella"}}',
    ),
    ("user", "Found: a good umbrella costs 20 to 45 euros. Answer my question."),
    ("assistant", "A good umbrella costs between 20 and 45 euros, as the tool says."),
)
# What a user asks, and what the tool then finds, for each of these values.
TURNS = {
    "How warm is it in {} today?": (
        "in {} it has 19 degrees, light wind from the west, and no rain until Friday",
        ("Lisbon", "Oslo", "Cairo", "Lima"),
    ),
    "How many people live in {}?": (
        "{} had 4,397,073 people at the census of 2019, in 17 districts",
        ("Nairobi", "Turin", "Cusco", "Osaka"),
    ),
    "What does a good {} cost?": (
        "a good {} costs 450 to 900 euros, and one for a child 120 euros",
        ("bicycle", "tent", "guitar", "coat"),
    ),
    "What is the Portuguese word for {}?": (
        "the dictionary has four words for {}; the first is the usual one",
        ("river", "bridge", "winter", "bread"),
    ),
}
ROUNDS = 4
PARTS = ("call", "answer")


def configs(draft: str) -> dict[str, dict[str, Any] | None]:
    """Speculative configs by the engine's name."""
    chain = {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True}
    trees = {"method": "sequoia", "model": draft}
    fixed = {**trees, "tree": TREE, "adapt": False}
    return {
        "plain": None,
        "chain of 2": {**chain, "num_speculative_tokens": 2},
        "suffixes, 24": {"method": "suffix", "num_speculative_tokens": 24},
        "Sequoia, one tree": fixed,
        "Sequoia, one tree, history": {**fixed, "history": True},
        "Sequoia": trees,
        "Sequoia, history": {**trees, "history": True},
        "lookup, history": {"method": "sequoia", "drafter": "lookup", "history": True},
        # The last to open: each looks at all that is imported, and numba's modules break that.
        "n-grams, 8": {
            "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        },
    }  # fmt: skip


class Agent:
    """An engine's turns; `steps` counts its engine's steps."""

    def __init__(self, llm: Any) -> None:
        self._llm, self.steps, core = llm, 0, llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def counted() -> Any:
            outputs, has_run = step()
            self.steps += has_run  # not while a grammar is compiled
            return outputs, has_run

        core.step_fn = counted

    def turn(self, question: str, found: str) -> list[tuple[list[int], str, int, float]]:
        """Tokens, text, steps and seconds of the thoughts with their call, and of the answer."""
        said = [("system", SYSTEM), *EXAMPLE, ("user", question)]
        talk = [{"role": role, "content": text} for role, text in said]
        schema = StructuredOutputsParams(json=CALL)
        call = self._complete(talk, "(", structured_outputs=schema, thinking_token_budget=THOUGHTS)
        talk += [{"role": "assistant", "content": f"({call[1]}"}]
        talk += [{"role": "user", "content": f"Found: {found}. Answer my question."}]
        return [call, self._complete(talk, "")]

    def _complete(
        self, talk: list[dict[str, str]], begin: str, **keys: Any
    ) -> tuple[list[int], str, int, float]:
        render, before = self._llm.get_tokenizer().apply_chat_template, self.steps
        prompt = render(talk, tokenize=False, add_generation_prompt=True) + begin
        params = SamplingParams(temperature=0, max_tokens=TOKENS, **keys)
        start = time.perf_counter()
        [output] = self._llm.generate([prompt], params, use_tqdm=False)
        took, [answer] = time.perf_counter() - start, output.outputs
        return list(answer.token_ids), answer.text, self.steps - before, took


def row_of(name: str, rounds: list[Any], plain: list[Any]) -> dict[str, Any]:
    """What an engine's rounds say: each a list of turns, each with what `Agent.turn` gives."""
    row: dict[str, Any] = {
        "engine": name,
        "plain's tokens": [[part[0] for turn in one for part in turn] for one in rounds]
        == [[part[0] for turn in one for part in turn] for one in plain],
    }
    for place, part in enumerate(PARTS):
        for when, some in (("first", rounds[:1]), ("later", rounds[1:])):
            own = [turn[place] for one in some for turn in one]
            tokens, steps = sum(len(found) for found, *_ in own), sum(one[2] for one in own)
            per_step = round(tokens / steps, 2)
            row[f"{when} {part}s"] = {"tokens": tokens, "steps": steps, "tokens per step": per_step}

    def seconds(some: list[Any]) -> np.ndarray:
        return np.array([sum(part[3] for turn in one for part in turn) for one in some])

    faster = seconds(plain) / seconds(rounds)
    row["seconds by round"] = seconds(rounds).round(2).tolist()
    row["times plain's speed"] = {
        "all": round(float(seconds(plain).sum() / seconds(rounds).sum()), 2),
        "least": round(float(faster.min()), 2),
        "most": round(float(faster.max()), 2),
    }
    return row


def main() -> None:
    """Measures, and writes the file."""
    model, draft, output, *pattern = sys.argv[1:]
    chosen = {
        name: config
        for name, config in configs(draft).items()
        if config is None or re.search("".join(pattern), name)
    }
    with ExitStack() as stack:
        agents = {}
        for name, config in chosen.items():
            llm = stack.enter_context(open_llm(model=model, speculative_config=config, **ENGINE))
            agents[name] = Agent(llm)
            agents[name].turn("Who are you?", "a small language model")  # compiles its grammar
        rounds: dict[str, list[Any]] = {name: [] for name in agents}
        for place in range(ROUNDS):
            turns = [
                (question.format(values[place]), found.format(values[place]))
                for question, (found, values) in TURNS.items()
            ]
            for name, agent in agents.items():
                rounds[name].append([agent.turn(*turn) for turn in turns])
            print([part[1] for turn in rounds["plain"][-1] for part in turn], flush=True)
    rows = [row_of(name, own, rounds["plain"]) for name, own in rounds.items()]
    for row in rows:
        print(row, flush=True)
    made = provenance(
        command=" ".join(["python -m benchmarks.agent", *pattern]),
        settings={
            "rounds": ROUNDS, "turns of a round": len(TURNS), "most tokens": TOKENS,
            "of them thoughts": THOUGHTS, "requests at once": 1, "one tree": TREE,
        },
        models={Path(one).name: model_hashes(one) for one in (model, draft)},
        rows=rows,
    )  # fmt: skip
    Path(output).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
