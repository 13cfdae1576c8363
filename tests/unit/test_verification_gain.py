"""``python -m benchmarks.verification_gain``: its law of UniVer, its P and Q, and a tiny run."""

from __future__ import annotations

from argparse import Namespace
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks.embedded_pair import DRAFT, TARGET
from benchmarks.verification_gain import __main__ as study
from benchmarks.verification_gain.models import TreeReader, drafted, likeliest_and_one_drawn
from benchmarks.verification_gain.univer import drawn_law, univer
from sequoia_vllm.tree.token_tree import TokenTree
from sequoia_vllm.verification.sampling import draw_without_replacement

VOCABULARY, LENGTH = 3, 3
#      0
#    1   2
#   3 4  5
TREE = TokenTree((-1, 0, 0, 1, 1, 2))


def random_laws(seed: int) -> dict[tuple[int, ...], np.ndarray]:
    """A law after every text of up to three tokens; some tokens are impossible."""
    random = np.random.default_rng(seed)
    laws = {}
    for length in range(LENGTH + 1):
        for text in product(range(VOCABULARY), repeat=length):
            law = random.dirichlet(np.full(VOCABULARY, 0.7))
            if random.random() < 0.2:
                law[random.integers(VOCABULARY)] = 0
            laws[text] = law / law.sum()
    return laws


def trees(q, node: int = 0, tokens=(0,) * TREE.size, texts=((),) * TREE.size):
    """Every tree that may be drafted, with the texts at its nodes and its probability."""
    if node == TREE.size:
        yield np.array(tokens), texts, 1.0
        return
    children = TREE.children[node]
    if not children:
        yield from trees(q, node + 1, tokens, texts)
        return
    law = q[texts[node]]
    fixed = np.argsort(-law, kind="stable")[: len(children) - 1].tolist()
    rest = drawn_law(law, fixed)
    for last in np.flatnonzero(rest).tolist():
        own, words = list(tokens), list(texts)
        for child, token in zip(children, [*fixed, last], strict=True):
            own[child], words[child] = token, (*texts[node], token)
        for found, named, share in trees(q, node + 1, tuple(own), tuple(words)):
            yield found, named, share * float(rest[last])


@pytest.mark.parametrize("seed", range(6))
def test_univer_emits_the_targets_law(seed):
    """Over all trees and all ends, by enumeration."""
    p, q = random_laws(seed), random_laws(seed + 100)
    emitted = dict.fromkeys(product(range(VOCABULARY), repeat=LENGTH), 0.0)
    for tokens, texts, share in trees(q):
        target, draft = (np.array([laws[text] for text in texts]) for laws in (p, q))
        decision = univer(TREE, tokens, target, draft)
        assert decision.accepted.sum() == pytest.approx(1)
        for node, accepted in enumerate(decision.accepted):
            if share * accepted < 1e-15:
                continue
            after = decision.laws[node] / decision.laws[node].sum()
            for text in emitted:
                path = texts[node]
                if text[: len(path)] != path:
                    continue
                chance = share * accepted
                for place in range(len(path), LENGTH):
                    law = after if place == len(path) else p[text[:place]]
                    chance *= law[text[place]]
                emitted[text] += chance
    for text, found in emitted.items():
        expected = np.prod([p[text[:place]][text[place]] for place in range(LENGTH)])
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("draw", [draw_without_replacement, likeliest_and_one_drawn])
def test_laws_at_nodes_are_those_of_their_texts(draw):
    """Texts of different lengths are read together."""
    torch.manual_seed(0)
    draft, texts = TreeReader(DRAFT), [torch.arange(300, 320), torch.arange(500, 507)]
    draft.read(texts)
    for _ in range(2):  # the second tree after the same texts
        tokens, laws = drafted(draft, TREE, torch.tensor([319, 506]), 0.7, draw)
        for text, own, found in zip(texts, tokens, laws, strict=True):
            assert own[1] != own[2]
            for node in (0, 1, 2):
                path = own[1:1] if node == 0 else own[[node]]
                with torch.no_grad():
                    whole = draft.model(torch.cat((text, path))[None]).logits[0, -1]
                expected = (whole / 0.7).softmax(-1)
                torch.testing.assert_close(found[node], expected, rtol=1e-3, atol=1e-6)


def test_a_tiny_run(monkeypatch):
    monkeypatch.setattr(study, "ANSWER", 4)
    options = Namespace(
        model=TARGET, draft_model=DRAFT, data=None, contexts=3, sizes="6", repeats=2,
        acceptance="shipped",
    )  # fmt: skip
    found, texts = study.measure(options, 1.0)
    assert texts == 200
    assert found[6].shape == (3, 4)
    assert found[6].min() >= 1
    shown = list(study.lines(1.0, 6, found[6], texts=2))
    assert shown[0] == "T = 1, 6 nodes, 3 contexts of 2 texts"
    assert shown[2].endswith("+0.0 ± 0.0 %")
