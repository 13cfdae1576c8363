"""Counts steps of answers that the user foretells: right, edited, and wrong predictions.

    python -m benchmarks.foretold MODEL DRAFT OUTPUT [KINDS [PROMPTS.jsonl COUNT]]

KINDS is a regular expression for names of `predictions`; left out: all. With the first COUNT
prompts of a file, answers end where the model ends them.
Each request is alone and greedy, so steps do not depend on the machine. Engines without branches of
told tokens, and with short and long ones, are compared. vLLM's n-gram drafts are asked for the same
answers, with the prediction before the prompt: a step has the drafts that come true, and one token
more. Times are those of this process's and thread's CPU, without other programs'.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from vllm import SamplingParams

from sequoia_vllm.adaptation.told_branches import MOST_TOLD, Survival, ToldBranches
from sequoia_vllm.engine.core.prediction_option import PREDICTION
from sequoia_vllm.engine.v1.foretelling import ForetoldTexts
from sequoia_vllm.measuring.engines import open_llm
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

PROMPTS, TOKENS, LONGEST = 2, 160, 1024  # prompts where no file is given
ENGINE = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": 4,
    "seed": 0, "disable_log_stats": False, "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
}  # fmt: skip
TREE = {"size": 16, "depth": 6}
BRANCHES = (0, TREE["size"] - 1, MOST_TOLD)  # most tokens of one; 0: trees alone
CHAINS = (4, 8, 16, 32)  # drafts of n-grams, of 2 to 5 tokens


def edited(tokens: list[int], changes: int, other: int) -> list[int]:
    """``changes`` places, evenly apart: a token is replaced, left out, or two are inserted."""
    found = list(tokens)
    places = np.linspace(0, len(tokens), changes + 2)[1:-1].astype(int).tolist()
    for number, place in reversed(list(enumerate(places))):
        found[place : place + (number % 3 < 2)] = [[other], [], [other] * 2][number % 3]
    return found


def predictions(answers: list[list[int]], place: int, other: int) -> dict[str, list[int] | None]:
    """What is foretold of one answer, by the name of the kind."""
    own, neighbour = answers[place], answers[(place + 1) % len(answers)]
    edits = {f"{changes} changed": edited(own, changes, other) for changes in (1, 3, 10)}
    draw = np.random.default_rng(place)
    parts = [own[first : first + 8] for first in range(0, len(own), 8)]
    wrong = {
        "another answer": neighbour,
        "every second changed": [other if back % 2 else token for back, token in enumerate(own)],
        "parts of 8 in another order": [
            token for part in draw.permutation(len(parts)) for token in parts[part]
        ],
        "65,536 tokens of others": draw.choice(neighbour, 65_536).tolist(),
    }  # fmt: skip
    return {"none": None, "right": own, **edits, **wrong}


def ngram_steps(text: list[int], answer: list[int], drafts: int) -> int:
    """Steps of vLLM's n-gram drafts, from a text that ends where the answer begins."""
    # Not before engines start: they look at all that is imported, and numba's modules break that.
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    done = steps = 0
    while done < len(answer):
        known = np.array(text + answer[:done], dtype=np.int32)
        told = _find_longest_matched_ngram_and_propose_tokens(known, 2, 5, 1 << 20, drafts)
        rest = np.array(answer[done:])[: len(told)]
        differs = np.flatnonzero(rest != told[: len(rest)])
        done += (int(differs[0]) if len(differs) else len(rest)) + 1
        steps += 1
    return steps


def drafts_of(llm: Any) -> tuple[int, int]:
    """Steps with drafts so far, and their drafts."""
    names = [f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens")]
    values = {one.name: one.value for one in llm.get_metrics() if one.name in names}
    return values.get(names[0], 0), values.get(names[1], 0)


@contextmanager
def timed_following() -> Iterator[list[float]]:
    """Seconds of the CPU that each step within the block takes to follow predictions."""
    look_back, seconds = ForetoldTexts.look_back, []

    def timed(*args: Any) -> None:
        start = time.thread_time()
        look_back(*args)
        seconds.append(time.thread_time() - start)

    with patch.object(ForetoldTexts, "look_back", timed):
        yield seconds


def at_most(longest: int) -> Callable[..., int]:
    """`ToldBranches.depth` with branches of so many tokens at most."""
    choose = ToldBranches.depth

    def depth(self: ToldBranches, source: Survival, run: int, most: int, *tree: int) -> int:
        return choose(self, source, run, min(most, longest), *tree)

    return depth


def answers_of(
    llm: Any, prompts: list[list[int]], foretold: list[Any], ends: bool
) -> tuple[list[list[int]], int]:
    """Tokens of each answer, one request after the other, and the engine's steps.

    ``ends``: whether the model may end an answer.
    """
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    before, found = getattr(runner, "stats", None) and runner.stats.steps, []
    for prompt, text in zip(prompts, foretold, strict=True):
        extra = None if text is None else {PREDICTION: text}
        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=not ends, extra_args=extra,
            detokenize=False,
        )  # fmt: skip
        given = {"prompt_token_ids": prompt}
        [output] = llm.generate(given, params, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found, 0 if before is None else runner.stats.steps - before


def main() -> None:
    """Measures, and writes the file."""
    model, draft, output, *chosen = sys.argv[1:]
    file, count = (Path(chosen[1]), int(chosen[2])) if chosen[1:] else (None, PROMPTS)
    prompts = encode_prompts(load_prompts(file, count), load_tokenizer(model), raw=False)
    with open_llm(model=model, **ENGINE) as llm:
        answers, _ = answers_of(llm, prompts, [None] * count, file is not None)
    tokens = sum(map(len, answers))
    other = 5  # a token that comes nowhere else
    every = [predictions(answers, place, other) for place in range(count)]
    pattern = re.compile(chosen[0] if chosen else "")
    kinds = [{kind: of[kind] for kind in of if pattern.search(kind)} for of in every]
    rows = []
    config = {"method": "sequoia", "model": draft, "tree": TREE, "adapt": False}
    for longest in BRANCHES:
        with (
            patch.object(ToldBranches, "depth", at_most(longest)),
            open_llm(model=model, speculative_config=config, **ENGINE) as llm,
        ):
            for kind in kinds[0]:
                before, start = drafts_of(llm), time.process_time()
                with timed_following() as seconds:
                    foretold = [of[kind] for of in kinds]
                    found, steps = answers_of(llm, prompts, foretold, file is not None)
                took = time.process_time() - start
                trees, drafts = np.subtract(drafts_of(llm), before).tolist()
                rows.append({
                    "drafts": "Sequoia", "branches": longest, "prediction": kind, "steps": steps,
                    "tokens per step": round(tokens / steps, 2),
                    "rows per step": round(1 + drafts / trees, 2),
                    "CPU milliseconds per token": round(1e3 * took / tokens, 1),
                    "milliseconds of following": round(1e3 * float(np.median(seconds)), 3),
                    "plain's tokens": found == answers,
                })  # fmt: skip
                print(rows[-1], flush=True)
    for kind in kinds[0]:
        for drafts in CHAINS:
            steps = sum(
                1 + ngram_steps((of[kind] or []) + prompt + answer[:1], answer[1:], drafts)
                for of, prompt, answer in zip(kinds, prompts, answers, strict=True)
            )
            rows.append({
                "drafts": f"vLLM's n-grams, {drafts}", "prediction": kind,
                "steps": steps, "tokens per step": round(tokens / steps, 2),
            })  # fmt: skip
    made = provenance(
        command=" ".join(["python -m benchmarks.foretold", *chosen]),
        settings={
            "prompts": count,
            "tokens": TOKENS,
            "requests at once": 1,
            "tree": TREE,
        },
        models={Path(one).name: model_hashes(one) for one in (model, draft)},
        rows=rows,
    )
    lines = json.dumps(made, indent=1)
    Path(output).write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
