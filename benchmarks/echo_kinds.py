"""Tokens per step by kind of question and by drafter; they do not depend on the machine's load.

    python -m benchmarks.echo_kinds "$(python -m examples.smollm2)" echo-kinds.json

Trees are whole: nothing adapts, so no measured time decides how much is drafted. An answer counts
up to its end. Where vLLM's chains sample wrongly (CPUs), those without a draft model are replayed
along plain vLLM's sampled answers, and the others run greedily alone. What remembers answers of
other requests gets a new engine for each row and round: it would know the questions.
"""

import json
import math
from collections.abc import Iterable, Sequence
from operator import eq
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import markdown_table
from benchmarks.replayed_chains import proposer, replayed
from sequoia_vllm.bench.engines import BenchEngine, open_engines
from sequoia_vllm.bench.measure import BenchSettings, EngineCase, batches
from sequoia_vllm.bench.methods import PLAIN, Kind, Method, chain_of_words
from sequoia_vllm.bench.report import chain_samples_wrongly
from sequoia_vllm.installed import file_hash
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

FILES = [Path("examples/smollm2", name) for name in ("echoes.jsonl", "questions.jsonl")]
NODES = 16
TREE = {"method": "sequoia", "adapt": False, "tree": {"size": NODES, "depth": 8}}
SUFFIX_DRAFTS = 15
PLAIN_AT_ONCE = 8  # requests of plain vLLM
Answer = tuple[list[int], list[int]]
"""Token ids, and how many tokens each step of the request gave."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def echo_kinds(
    target: str,
    out: Path,
    draft: str = "examples/models/smollm2-draft",
    kinds: str = "quote,edit,JSON,multi-turn,chat,arithmetic",
    per_kind: Annotated[int, typer.Option(help="The first so many of each kind.")] = 4,
    max_tokens: int = 32,
    cases: Annotated[str, typer.Option(help="Requests at once, and temperature.")] = (
        "8:0,8:0.6,8:1"
    ),
    rounds: Annotated[int, typer.Option(help="Answers to each question above temperature 0.")] = 1,
    methods: Annotated[str, typer.Option(help="Trees, and vLLM's chains.")] = (
        "lookup,draft,drawn,5:ngram,suffix,4,3:ngram,2,4:ngram,2:ngram"
    ),
) -> None:
    """Measures every drafter on every kind of question, and writes JSON after each engine."""
    of_kind, ids = _questions(target, kinds.split(","), per_kind)
    run = [EngineCase(int(n), float(t)) for n, t in (case.split(":") for case in cases.split(","))]
    settings = BenchSettings(
        EngineSpec(target, draft, dtype="float32", enforce_eager=True, kv_cache_gib=0.25),
        methods=tuple(_method(draft, word) for word in methods.split(",")),
        prompts=tuple(ids),
        batch_sizes=tuple({PLAIN_AT_ONCE, *(case.batch_size for case in run)}),
        max_tokens=max_tokens + NODES,
        sampled_chains=not chain_samples_wrongly(),
    )
    end = load_tokenizer(target).eos_token_id
    rows: list[dict[str, Any]] = []
    found = {
        **provenance(command="python -m benchmarks.echo_kinds"),
        "models": {Path(model).name: model_hashes(model) for model in (target, draft)},
        "prompts": {file.name: file_hash(file) for file in FILES},
        "settings": {"per_kind": per_kind, "max_tokens": max_tokens, "trees": TREE},
        "rows": rows,
    }
    texts = _plain_texts(settings, run, rounds)
    for method in settings.methods:
        answers: dict[EngineCase, list[list[Answer]]] = {
            case: [_replayed(method, ids, round_, max_tokens, end) for round_ in texts[case]]
            for case in run
            if _is_replayed(settings, method, case)
        }
        for some in _of_one_engine(settings, method, run, rounds):
            with open_engines([method], settings.engine, settings.engine_options(), print) as one:
                for case in some:
                    made = _generate(one[method.name], ids, case, max_tokens)
                    cut = [(_cut(answer, max_tokens, end), steps) for answer, steps in made]
                    answers.setdefault(case, []).append(cut)
        for case, got in answers.items():
            for kind in dict.fromkeys(of_kind):
                its = [row for row, other in enumerate(of_kind) if other == kind]
                line = {"method": method.name, "kind": kind, **vars(case), "rounds": len(got)}
                line |= _summed([[round_[row] for round_ in got] for row in its])
                if _is_replayed(settings, method, case):
                    line["replayed"] = True
                elif case.temperature == 0:
                    expected = [_cut(texts[case][0][row][0], max_tokens, end) for row in its]
                    found_ones = [got[0][row][0] for row in its]
                    line["plain_answers"] = sum(map(eq, found_ones, expected))
                rows.append(line)
                print(json.dumps(line), flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    for case in run:
        print(f"{case}\n{_table([row for row in rows if vars(case).items() <= row.items()])}")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per step, a line for each kind of question, with standard errors."""
    methods, kinds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "kind"))
    said = {
        (row["kind"], row["method"]): f"{row['tokens_per_step']:.2f} ± {row['error']:.2f}"
        for row in rows
    }
    lines = ([kind, *(said[kind, method] for method in methods)] for kind in kinds)
    return markdown_table(["tokens per step", *methods], lines)


def _method(draft: str, word: str) -> Method:
    """A tree of one size, all of it drafted: with a draft or without; or vLLM's chain."""
    trees: dict[str, tuple[str, dict[str, Any]]] = {
        "lookup": ("Sequoia, lookup", {"drafter": "lookup"}),
        "draft": ("Sequoia", {"model": draft}),
        "drawn": ("Sequoia, no retrieval", {"model": draft, "retrieval": False}),
    }
    if word in trees:
        name, keys = trees[word]
        return Method(name, Kind.SEQUOIA, TREE | keys, NODES - 1)
    if word == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": SUFFIX_DRAFTS}
        return Method("suffix chain", Kind.CHAIN, config, SUFFIX_DRAFTS)
    return chain_of_words(draft, word)


def _is_replayed(settings: BenchSettings, method: Method, case: EngineCase) -> bool:
    """Whether a chain cannot run in this case, and needs no model to be replayed."""
    config = method.speculative_config or {}
    return method not in settings.methods_in(case) and "model" not in config


def _plain_texts(
    settings: BenchSettings, run: list[EngineCase], rounds: int
) -> dict[EngineCase, list[list[Answer]]]:
    """Plain vLLM's answers of each round, to compare with and to replay chains along.

    They go on behind their end, and behind ``max_tokens``.
    """
    needed = [
        case
        for case in run
        if case.temperature == 0
        or any(_is_replayed(settings, one, case) for one in settings.methods)
    ]
    texts = {}
    with open_engines([PLAIN], settings.engine, settings.engine_options(), print) as one:
        for case in needed:
            at_once = EngineCase(PLAIN_AT_ONCE, case.temperature)
            texts[case] = [
                _generate(one[PLAIN.name], settings.prompts, at_once, settings.max_tokens)
                for _ in range(_rounds(case, rounds))
            ]
    return texts


def _rounds(case: EngineCase, rounds: int) -> int:
    return 1 if case.temperature == 0 else rounds


def _replayed(
    method: Method, prompts: Sequence[list[int]], texts: list[Answer], max_tokens: int, end: int
) -> list[Answer]:
    """What the chain accepts along plain vLLM's answers."""
    answers = [answer for answer, _ in texts]
    cut = [_cut(answer, max_tokens, end) for answer in answers]
    propose = proposer(method.speculative_config or {})
    return list(zip(cut, replayed(propose, prompts, answers, [*map(len, cut)]), strict=True))


def _of_one_engine(
    settings: BenchSettings, method: Method, run: list[EngineCase], rounds: int
) -> list[list[EngineCase]]:
    """Groups the cases that the method runs in, once for each round, by engine."""
    cases = [
        case
        for case in run
        if method in settings.methods_in(case)
        for _ in range(_rounds(case, rounds))
    ]
    remembers = "suffix" in method.name or "lookup" in method.name
    return [[case] for case in cases] if remembers or not cases else [cases]


def _questions(target: str, kinds: list[str], count: int) -> tuple[list[str], list[list[int]]]:
    """The kinds of the first questions of each kind, and their token ids."""
    lines = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
    prompts = [prompt for file in FILES for prompt in load_prompts(file)]
    of_kind = {kind: [n for n, line in enumerate(lines) if line["kind"] == kind] for kind in kinds}
    chosen = [(kind, prompts[n]) for kind, its in of_kind.items() for n in its[:count]]
    tokenizer = load_tokenizer(target)
    return [kind for kind, _ in chosen], encode_prompts([one for _, one in chosen], tokenizer)


def _generate(
    engine: BenchEngine, prompts: Sequence[list[int]], case: EngineCase, max_tokens: int
) -> list[Answer]:
    made = [
        engine.generate(batch, case.temperature, max_tokens)
        for batch in batches(prompts, case.batch_size)
    ]
    answers = [
        (ids, [step.tokens[row] for step in one.arrivals if step.tokens[row]])
        for one in made
        for row, ids in enumerate(one.token_ids)
    ]
    return answers[: len(prompts)]


def _cut(answer: list[int], max_tokens: int, end: int) -> list[int]:
    """The answer up to its end."""
    answer = answer[:max_tokens]
    return answer[: answer.index(end) + 1] if end in answer else answer


def _summed(questions: Iterable[list[Answer]]) -> dict[str, Any]:
    """Tokens per step of all answers, its standard error by question (of a ratio), and counts."""
    counts = [
        [sum(part) for part in zip(*(_counted(steps, len(ids)) for ids, steps in one), strict=True)]
        for one in questions
    ]
    tokens, steps = map(sum, zip(*counts, strict=True))
    mean, n = tokens / steps, len(counts)
    spread = sum((a - mean * b) ** 2 for a, b in counts) * n / max(1, n - 1)
    error = math.sqrt(spread) / steps
    summed = {"tokens_per_step": round(mean, 4), "error": round(error, 4), "steps": steps}
    return {**summed, "tokens_and_steps": counts}


def _counted(steps: list[int], length: int) -> tuple[int, int]:
    """Tokens behind the first one, which came with the prompt, and the steps that gave them. The
    last counts whole, as a longer answer would take all of it."""
    received, used = steps[0], 0
    while received < length:
        used += 1
        received += steps[used]
    return received - steps[0], used


if __name__ == "__main__":
    app()
