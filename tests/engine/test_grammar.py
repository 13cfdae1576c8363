"""Masks of a grammar for each node of a tree, against the grammar asked anew for each path."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm.engine import grammar, hooks
from sequoia_vllm.engine.settings import SequoiaSettings
from sequoia_vllm.tree import TokenTree

VOCABULARY = 64
END = 63
#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4 ─── 7
#      └─ 2 ─── 5
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 4))
UNTOUCHED = -1


@dataclass
class Words:
    """A grammar whose sentences never have the same token twice running, nor a sum of 7k.

    It ends with `END`, is strict about how far it is taken back, and refuses what it forbids.
    """

    path: list[int] = field(default_factory=list)

    def allowed(self) -> list[int]:
        last = self.path[-1] if self.path else None
        fits = [t for t in range(END) if t != last and (sum(self.path) + t) % 7 != 0]
        return [*fits, END] if len(self.path) >= 2 else fits

    def is_terminated(self) -> bool:
        return bool(self.path) and self.path[-1] == END

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        assert not self.is_terminated()
        [token] = tokens
        assert token in self.allowed(), "vLLM's backends log an error for that"
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.path)
        del self.path[-count:]

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        bits = np.zeros(VOCABULARY, dtype=np.uint8)
        bits[self.allowed()] = 1
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        bitmask[index] = torch.from_numpy(packed)


def mask_after(path: Sequence[int], before: Sequence[int] = ()) -> list[int] | None:
    """That of a grammar of its own that has taken this path; None: it forbids it, or has ended."""
    words = Words(list(before))
    for token in path:
        if words.is_terminated() or token not in words.allowed():
            return None
        words.accept_tokens("", [token])
    if words.is_terminated():
        return None
    found = torch.zeros(1, VOCABULARY // 32, dtype=torch.int32)
    words.fill_bitmask(found, 0)
    return found[0].tolist()


def path_to(node: int, tokens: list[int]) -> list[int]:
    path = []
    while node > 0:
        path.append(tokens[node - 1])
        node = TREE.parents[node]
    return path[::-1]


@pytest.mark.parametrize("seed", range(30))
def test_each_node_has_the_mask_of_its_own_path(seed):
    rng = np.random.default_rng(seed)
    drafts = int(rng.integers(1, TREE.size))
    tokens = rng.choice([-1, 1, 2, 3, 5, 8, END], drafts, p=[0.05, *[0.17] * 5, 0.1]).tolist()
    before = rng.choice([2, 3], rng.integers(0, 3)).tolist()
    words = Words(list(before))
    masks = np.full((drafts + 1, VOCABULARY // 32), UNTOUCHED, dtype=np.int32)
    words.fill_bitmask(torch.from_numpy(masks), 0)
    grammar.fill_nodes(words, "a", TREE, tokens, masks)
    assert words.path == before
    for node in range(drafts + 1):
        expected = mask_after(path_to(node, tokens), before)
        assert masks[node].tolist() == (expected or [UNTOUCHED] * (VOCABULARY // 32))


def manager(enabled: bool):
    """vLLM's, as far as masks go."""
    settings = SequoiaSettings(TREE, "given", None, {})
    config = SimpleNamespace(
        additional_config=settings.store({}) if enabled else {},
        num_speculative_tokens=TREE.num_speculative_tokens,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(is_diffusion=False),
    )
    found = StructuredOutputManager.__new__(StructuredOutputManager)
    found.__dict__ |= {
        "vllm_config": config, "enable_in_reasoning": True, "fill_bitmask_parallel_threshold": 9,
        "_grammar_bitmask": torch.zeros(40, VOCABULARY // 32, dtype=torch.int32),
        "_full_mask": torch.tensor(-1, dtype=torch.int32),
    }  # fmt: skip
    return found


def request_of(words: Words):
    structured = SimpleNamespace(grammar=words, reasoning_ended=True)
    return SimpleNamespace(use_structured_output=True, structured_output_request=structured)


def test_rows_are_in_the_requests_order_whether_they_have_drafts_or_not():
    hooks.install()
    requests = {name: request_of(Words([2] * length)) for length, name in enumerate("abc")}
    drafted = {"a": [1, 2, 3], "c": [3, 5, 1, 3, 3, 2, 2], "d": [9]}
    masks = manager(enabled=True).grammar_bitmask(requests, ["b", "a", "c"], drafted)
    assert len(masks) == 1 + 4 + 8
    assert masks[0].tolist() == mask_after([], [2])
    assert masks[1].tolist() == mask_after([])
    assert masks[2].tolist() == mask_after([1])
    assert masks[3].tolist() == mask_after([2])
    assert masks[4].tolist() == mask_after([1, 3])


def test_drafts_that_a_chain_would_lose_are_kept():
    hooks.install()
    request = request_of(Words())
    assert manager(enabled=True).validate_tokens(request, [7, 2, 3, -1, -1]) == [7, 2, 3]


def test_other_engines_are_served_by_vllm_alone(monkeypatch):
    hooks.install()
    plain = manager(enabled=False)
    request = request_of(Words())
    request.structured_output_request.grammar.validate_tokens = lambda tokens: tokens[:1]
    assert plain.validate_tokens(request, [1, 1, 3]) == [1]
    found = plain.grammar_bitmask({"a": request}, ["a"], {"a": [1, 2]})
    assert [row.tolist() for row in found] == [mask_after([]), mask_after([1]), mask_after([1, 2])]
