"""Simulates what other requests' earlier answers add to trees, and to branches of told tokens.

    python -m benchmarks.history MODEL DRAFT OUTPUT [ANSWERS.json]

Plain vLLM answers wishes for tools and questions of few templates. The draft ranks tokens along
each answer. Then steps are counted along the answers, in random orders, without an engine: with a
static tree, with branches of the request's own text, and with all answers that came earlier in the
order. Suffixes are vLLM's own, if arctic-inference can be imported. ANSWERS.json keeps answers.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.foretold import ENGINE, TREE
from benchmarks.history_prompts import prompts
from sequoia_vllm.adaptation.told_branches import MOST_TOLD, ToldBranches
from sequoia_vllm.measuring.engines import compare_models, open_llm
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.tree import TokenTree, optimize_tree
from sequoia_vllm.verification.retrieval import LONGEST_RUN, SHORTEST, continuations
from sequoia_vllm.vocabulary.mapped import MappedVocabulary

TOKENS, ORDERS, RANKS, BEFORE = 96, 4, 16, 8  # BEFORE: tokens of a prompt kept with its answer
CREDIT = 32
NONE = np.empty(0, dtype=np.int64)
Told = tuple[NDArray[np.int64], int]
"""Tokens that are told, and how many match before them."""
RULES = {
    "longest": "the longer match, the request's own where both are as long",
    "likelier": "whose tokens came true more often after such a match",
}
BETTER = 0.5  # chance that the better draft has the right token first where the draft has not


def answered(model: str) -> list[dict[str, Any]]:
    """Each prompt with plain vLLM's greedy answer."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    engine = {**ENGINE, "max_num_seqs": 8, "enable_prefix_caching": True}
    with open_llm(model=model, **engine) as llm:
        tokenizer = llm.get_tokenizer()
        found = []
        for group, kind, talk, said in prompts():
            text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            one = {"group": group, "kind": kind, "prompt": tokenizer.encode(text)}
            if said is not None:
                one["answer"] = [*tokenizer.encode(said), tokenizer.eos_token_id]
            found.append(one)
        open_ones = [one for one in found if "answer" not in one]
        given = [{"prompt_token_ids": one["prompt"]} for one in open_ones]
        for one, output in zip(open_ones, llm.generate(given, params), strict=True):
            one["answer"] = list(output.outputs[0].token_ids)
    return found


def rank_drafts(model: str, draft: str, requests: list[dict[str, Any]]) -> None:
    """Adds the draft's most likely tokens at each place, and what its own text tells."""
    from transformers import AutoModelForCausalLM

    drafter = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    matching = compare_models(model, draft).matching
    vocabulary = MappedVocabulary(matching, torch.device("cpu"))
    for one in requests:
        text, first = torch.tensor(one["prompt"] + one["answer"]), len(one["prompt"])
        with torch.inference_mode():
            logits = drafter(vocabulary.read(text)[None]).logits[0, first - 1 : -1]
            one["drafts"] = vocabulary.target_logits(logits).topk(RANKS).indices.tolist()
        lengths = torch.arange(first, len(text))
        row = torch.zeros_like(lengths)
        told, runs = continuations(text[None].int(), row, lengths, MOST_TOLD)
        one["own"] = [
            (tokens.tolist() if run else [], run)
            for tokens, run in zip(told.numpy(), runs.tolist(), strict=True)
        ]


class History:
    """Answers so far, each behind the end of its prompt."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._ends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Takes an answer that has ended."""
        text = prompt[-BEFORE:] + answer
        for place in range(1, len(text) - 1):
            self._ends[text[place - 1], text[place]].append((len(self._texts), place))
        self._texts.append(text)

    def tell(self, text: list[int]) -> Told:
        """What followed the latest of the longest matches."""
        ends, run = self._ends.get((text[-2], text[-1]), []), SHORTEST
        if not ends:
            return NONE, 0
        while run < min(LONGEST_RUN, len(text)):
            longer = [
                (number, place) for number, place in ends
                if place >= run and self._texts[number][place - run] == text[-1 - run]
            ]  # fmt: skip
            if not longer:
                break
            ends, run = longer, run + 1
        number, place = ends[-1]
        return np.array(self._texts[number][place + 1 :][:MOST_TOLD], dtype=np.int64), run


def accepted(
    tree: TokenTree, told: NDArray[np.int64], drafts: Sequence[Sequence[int]], rest: list[int]
) -> int:
    """Nodes of the tree on the answer's path: children are the told token, then the draft's."""
    node, follows = 0, True
    for depth, token in enumerate(rest):
        follows = follows and depth < len(told)
        ranked = list(drafts[depth]) if drafts else []
        if follows:
            first = int(told[depth])
            ranked = [first, *(one for one in ranked if one != first)]
        children = tree.children[node]
        if token not in ranked[: len(children)]:
            return depth
        follows = follows and token == told[depth]
        node = children[ranked.index(token)]
    return len(rest)


def same(told: NDArray[np.int64], rest: NDArray[np.int64]) -> int:
    """How many told tokens come true."""
    shorter = min(len(told), len(rest))
    differs = np.flatnonzero(told[:shorter] != rest[:shorter])
    return int(differs[0]) if len(differs) else shorter


class Method:
    """Counts steps of answers, one after the other."""

    def __init__(
        self, tree: TokenTree, *, drafts: str, own: bool, branches: bool,
        rule: str | None,
    ) -> None:  # fmt: skip
        self._tree, self._drafts, self._own = tree, drafts, own
        self._branches, self._rule = branches, rule
        self._told = ToldBranches(), ToldBranches()  # of own texts, of the history
        self._history = History()

    def _choose(self, own: Told, text: list[int]) -> tuple[Told, int]:
        if self._rule is None:
            return own, 0
        other = self._history.tell(text)
        if self._rule == "likelier" and own[1] and other[1]:
            first, second = (
                self._told[place].predictions.chances(one[1], 1)[0]
                for place, one in enumerate((own, other))
            )
            return (other, 1) if second > first else (own, 0)
        return (other, 1) if other[1] > own[1] else (own, 0)

    def steps(self, one: dict[str, Any]) -> int:
        """Steps after the first token, which the prompt's step emits."""
        prompt, answer = one["prompt"], np.array(one["answer"])
        text, first = np.concatenate([prompt, answer]), len(prompt)
        done, steps, credit = 1, 0, 0
        while done < len(answer):
            (told, run), source = self._choose(
                one["own"][done] if self._own else (NONE, 0),
                text[max(0, first + done - LONGEST_RUN) : first + done].tolist(),
            )
            hits, rest = same(told, answer[done:]), answer[done:]
            length = 0
            if self._branches and run:
                most = min(len(told), 2 * run, 2 * credit)
                length = self._told[source].depth(
                    run, credit, most, self._tree.depth, self._tree.size - 1, 1
                )
            if length:
                kept = min(hits, length)
            else:
                drafts = one[self._drafts][done:] if self._drafts else []
                kept = accepted(self._tree, told, drafts, rest.tolist())
                for branches in self._told:
                    branches.note_drafted(kept)
            new = min(kept + 1, len(rest))
            came, failed = min(hits, new), hits < min(new, len(told))
            self._told[source].predictions.count(run, came, failed)
            if run:
                credit = min(credit + came, CREDIT)
                credit = credit // 2 if failed else credit
            done, steps = done + new, steps + 1
        self._history.add(prompt, one["answer"])
        return steps


class Suffixes:
    """Counts steps of vLLM's suffix decoding, with its defaults: it keeps all answers."""

    def __init__(self, *, cached: int = 10_000) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache, self._number = SuffixDecodingCache(24, cached), 0

    def steps(self, one: dict[str, Any]) -> int:
        """As `Method.steps`."""
        self._number += 1
        prompt, answer = np.array(one["prompt"]), np.array(one["answer"])
        text = np.concatenate([prompt, answer]).astype(np.int32)
        self._cache.start_request(self._number, text[: len(prompt)])
        self._cache.add_active_response(self._number, answer[:1].tolist())
        done, steps = 1, 0
        while done < len(answer):
            length = len(prompt) + done
            pattern = text[max(0, length - 24) : length]
            draft = self._cache.speculate(
                self._number, pattern, max_spec_tokens=24, max_spec_factor=1.0, min_token_prob=0.1
            )
            told = np.array(draft.token_ids, dtype=np.int64)
            new = min(same(told, answer[done:]) + 1, len(answer) - done)
            self._cache.add_active_response(self._number, answer[done : done + new].tolist())
            done, steps = done + new, steps + 1
        self._cache.stop_request(self._number)
        return steps


def methods(trees: dict[str, TokenTree]) -> dict[str, Any]:
    """What makes each method anew, by its name."""
    found: dict[str, Any] = {}

    def add(name: str, drafts: str = "drafts", rule: str | None = None, **keys: bool) -> None:
        keys = {"own": True, "branches": True} | keys
        found[name] = lambda: Method(trees[drafts], drafts=drafts, rule=rule, **keys)

    add("draft alone", own=False, branches=False)
    add("draft, own text", branches=False)
    add("draft, own text, history: longest", rule="longest", branches=False)
    add("draft, own text, branches")
    for rule in RULES:
        add(f"draft, own text, branches, history: {rule}", rule=rule)
    for name, drafts in (("better draft", "better"), ("no draft", "")):
        add(f"{name}, own text, branches", drafts)
        add(f"{name}, own text, branches, history: likelier", drafts, "likelier")
    if find_spec("arctic_inference"):
        found["vLLM's suffixes"] = Suffixes
        found["vLLM's suffixes, own text alone"] = lambda: Suffixes(cached=0)
    return found


def gain(before: NDArray[np.int64], after: NDArray[np.int64], of: NDArray[np.bool_]) -> list[float]:
    """Percent more tokens per step, with standard errors over requests (jackknife) and over orders.

    ``before``, ``after``, ``of``: int64 and bool ``[orders, requests]``: steps, and which count.
    """
    first, second = (np.where(of, steps, 0) for steps in (before, after))
    each = first.sum(axis=1) / second.sum(axis=1) - 1
    first, second = (one.sum(axis=0)[of.any(axis=0)] for one in (first, second))
    left = (first.sum() - first) / (second.sum() - second)
    figures = each.mean(), np.std(left) * np.sqrt(len(left) - 1), each.std(ddof=1)
    return [round(100 * float(one), 1) for one in figures]


def counted(
    requests: list[dict[str, Any]], trees: dict[str, TokenTree]
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Each method's steps ``[orders, requests]``, and places in each order."""
    count = len(requests)
    orders = np.array([np.random.default_rng(seed).permutation(count) for seed in range(ORDERS)])
    steps: dict[str, NDArray[np.int64]] = {}
    for name, make in methods(trees).items():
        steps[name] = np.zeros_like(orders)
        for found, order in zip(steps[name], orders, strict=True):
            method = make()
            for place in order:
                found[place] = method.steps(requests[place])
    return steps, orders.argsort(axis=1)


def row_of(
    name: str, steps: dict[str, NDArray[np.int64]], places: NDArray[np.int64],
    tokens: NDArray[np.int64], of: NDArray[np.bool_],
) -> dict[str, Any]:  # fmt: skip
    """Tokens per step of some requests, and what histories add."""
    masks, gains = np.broadcast_to(of, places.shape), {}
    for method, found in steps.items():
        base = method.partition(", history")[0]
        if base != method:
            parts = {"all": masks}
            if of.all():
                parts["the first quarter"] = places < len(of) // 4
                parts["the last half"] = places >= len(of) // 2
            gains[method] = {part: gain(steps[base], found, which) for part, which in parts.items()}
    per_step = {
        method: round(float(ORDERS * tokens[of].sum() / found[:, of].sum()), 2)
        for method, found in steps.items()
    }
    return {
        "requests": name, "count": int(of.sum()), "tokens": int(tokens[of].sum()),
        "tokens per step": per_step, "gains": gains,
    }  # fmt: skip


def main() -> None:
    """Counts, and writes the file."""
    model, draft, output, *file = sys.argv[1:]
    if file and Path(file[0]).exists():
        requests = json.loads(Path(file[0]).read_text(encoding="utf-8"))
    else:
        requests = answered(model)
        rank_drafts(model, draft, requests)
        if file:
            Path(file[0]).write_text(json.dumps(requests), encoding="utf-8")
    for one in requests:
        one["own"] = [(np.array(told, dtype=np.int64), run) for told, run in one["own"]]
    trees = {"": TokenTree.chain(TREE["depth"])}
    draw = np.random.default_rng(0)
    for one in requests:
        one["better"] = [
            [token, *(one for one in ranked if one != token)] if draw.random() < BETTER else ranked
            for token, ranked in zip(one["answer"], one["drafts"], strict=True)
        ]
    for drafts in ("drafts", "better"):
        ranks = np.zeros(RANKS + 1)
        for one in requests:
            for token, ranked in zip(one["answer"], one[drafts], strict=True):
                ranks[ranked.index(token) if token in ranked else RANKS] += 1
        acceptance = (ranks / ranks.sum())[:RANKS]
        trees[drafts] = optimize_tree(acceptance, TREE["size"], TREE["depth"])
    rows = []
    for group in dict.fromkeys(one["group"] for one in requests):
        chosen = [one for one in requests if one["group"] == group]
        steps, places = counted(chosen, trees)
        kinds, tokens = (
            np.array([one["kind"] for one in chosen]),
            np.array([len(one["answer"]) - 1 for one in chosen]),
        )
        for kind in dict.fromkeys(["", *kinds]) if len(set(kinds)) > 1 else [""]:
            of = (kinds == kind) | (kind == "")
            rows.append(row_of(f"{group}, {kind}" if kind else group, steps, places, tokens, of))
            print(json.dumps(rows[-1], indent=1), flush=True)
    made = provenance(
        command="python -m benchmarks.history",
        settings={"most tokens": TOKENS, "orders": ORDERS, "tree": trees["drafts"].to_dict(),
                  "rules": RULES, "better draft": BETTER,
                  "gains": "percent, standard errors over requests and over orders"},
        models={Path(one).name: model_hashes(one) for one in (model, draft)},
        rows=rows,
    )  # fmt: skip
    Path(output).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
