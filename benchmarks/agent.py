"""Counts steps of an agent's turns: it thinks, calls a tool by its schema, reads, and answers.

    python -m benchmarks.agent MODEL DRAFT OUTPUT

Each request is alone and greedy, so steps do not depend on the machine. A turn has three requests.
The model thinks between brackets, as a small one knows no other marker, for some tokens at most.
The call that follows has a grammar, and the answer is free text.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.forced_tokens import CALL
from benchmarks.foretold import ENGINE, TREE
from sequoia_vllm.measuring.engines import open_llm
from sequoia_vllm.measuring.provenance import model_hashes, provenance

GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}
PARTS = {"thoughts": 48, "call": 64, "answer": 64}  # most tokens of each
CHAIN = 4
SYSTEM = (
    "You have tools: weather, population, price and translate. Each takes a value. Think between "
    "brackets, then call one of them."
)
TURNS = {
    "How warm is it in Lisbon today?": "19 degrees, light wind from the west, no rain until Friday",
    "How many people live in Nairobi?": "4,397,073 people at the census of 2019, in 17 districts",
    "What does a good bicycle cost?": "from 450 to 900 euros, a child's from 120 euros",
    "What is the Portuguese word for river?": "rio; the plural is rios; a small one is a ribeiro",
}


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

    def turn(self, question: str, found: str) -> list[tuple[list[int], str, int]]:
        """Tokens, text and steps of the thoughts, of the call, and of the answer."""
        talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        thoughts = self._complete("thoughts", talk, "(", stop=[")"])
        schema = StructuredOutputsParams(json=CALL)
        call = self._complete("call", talk, f"({thoughts[1]})", structured_outputs=schema)
        talk += [{"role": "assistant", "content": call[1]}]
        talk += [{"role": "user", "content": f"Found: {found}. Answer my question."}]
        return [thoughts, call, self._complete("answer", talk, "", ignore_eos=True)]

    def _complete(
        self, part: str, talk: list[dict[str, str]], begin: str, **keys: Any
    ) -> tuple[list[int], str, int]:
        render, before = self._llm.get_tokenizer().apply_chat_template, self.steps
        prompt = render(talk, tokenize=False, add_generation_prompt=True) + begin
        params = SamplingParams(temperature=0, max_tokens=PARTS[part], **keys)
        [output] = self._llm.generate([prompt], params, use_tqdm=False)
        [answer] = output.outputs
        return list(answer.token_ids), answer.text, self.steps - before


def main() -> None:
    """Counts, and writes the file."""
    model, draft, output = sys.argv[1:]
    trees = {"method": "sequoia", "model": draft, "tree": TREE, "adapt": False}
    chain = {
        "method": "draft_model", "model": draft, "num_speculative_tokens": CHAIN,
        "use_heterogeneous_vocab": True,
    }  # fmt: skip
    engines = {"plain": None, "Sequoia": trees, f"chain of {CHAIN}": chain}
    rows: list[dict[str, Any]] = []
    plain: list[list[int]] = []
    for name, config in engines.items():
        engine = {**ENGINE, "structured_outputs_config": GRAMMARS}
        with open_llm(model=model, speculative_config=config, **engine) as llm:
            turns = list(map(Agent(llm).turn, TURNS, TURNS.values()))
        tokens = [found for turn in turns for found, *_ in turn]
        plain = plain or tokens
        row: dict[str, Any] = {"engine": name, "plain's tokens": tokens == plain}
        for part, own in zip(PARTS, zip(*turns, strict=True), strict=True):
            count, steps = sum(len(found) for found, *_ in own), sum(taken for *_, taken in own)
            per_step = round(count / steps, 2)
            row[part] = {"tokens": count, "steps": steps, "tokens per step": per_step}
        rows.append(row)
        print(row, [text for turn in turns for _, text, _ in turn], flush=True)
    made = provenance(
        command="python -m benchmarks.agent",
        settings={"turns": len(TURNS), "most tokens": PARTS, "requests at once": 1, "tree": TREE},
        models={Path(one).name: model_hashes(one) for one in (model, draft)},
        rows=rows,
    )
    Path(output).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
