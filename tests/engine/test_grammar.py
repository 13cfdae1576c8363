"""Masks of a grammar for each node of a tree, and what is scored in place of forbidden drafts.

Against the grammar asked anew for each path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm import plugin
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core import grammar
from sequoia_vllm.engine.core.grammar import MOST_ALLOWED, StandIns
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

    Attributes:
        path: Taken so far.
        strict: A sum must be 9k + 4 instead.
        filled: How many masks were asked for.
    """

    path: list[int] = field(default_factory=list)
    strict: bool = False
    filled: int = 0

    def allowed(self) -> list[int]:
        last = self.path[-1] if self.path else None
        sums = [(sum(self.path) + t) for t in range(END)]
        fits = [
            t for t in range(END)
            if t != last and (sums[t] % 9 == 4 if self.strict else sums[t] % 7 != 0)
        ]  # fmt: skip
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
        bitmask[index] = torch.from_numpy(mask_of(self.allowed()))
        self.filled += 1


def mask_of(allowed: Sequence[int]) -> np.ndarray:
    bits = np.zeros(VOCABULARY, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_after(
    path: Sequence[int], before: Sequence[int] = (), strict: bool = False
) -> list[int] | None:
    """Asks a grammar of its own that has taken this path; None: it forbids it, or has ended."""
    words = Words(list(before), strict)
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


# -- what replaces forbidden drafts ----------------------------------------------------------

# The longest token first, which here is the highest.
STAND_INS = StandIns(VOCABULARY, lambda token: token)


def test_forbidden_drafts_become_the_longest_tokens_that_no_sibling_has():
    found = STAND_INS(mask_of([3, 9, 40, 41]), [1, 41, 2, 3, 5, 6])
    assert found == [40, 41, 9, 3, 5, 6]
    assert STAND_INS(mask_of([3, 9]), [9, 3]) == [9, 3]


def test_where_much_is_allowed_forbidden_drafts_stay():
    few, many = range(20, 20 + MOST_ALLOWED), range(20, 21 + MOST_ALLOWED)
    assert STAND_INS(mask_of(few), [1, 2]) == [few[-1], few[-2]]
    assert STAND_INS(mask_of(many), [1, 2]) == [1, 2]


def test_no_token_is_taken_that_the_target_does_not_have():
    assert StandIns(40, lambda token: token)(mask_of([7, 41, 60]), [1, 2]) == [7, 2]


# Tokens that are drafted, each with its probability, and those of which some came before.
LENIENT = [-1, 1, 2, 3, 5, 8, END], [0.05, *[0.17] * 5, 0.1], [2, 3]
STRICT = [1, 4, 9, 13, 18, END], [0.2, 0.3, 0.2, 0.1, 0.1, 0.1], [4, 9]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("strict", [False, True])
def test_each_node_has_the_mask_of_its_path_and_what_little_is_allowed_replaces_drafts(
    seed, strict
):
    drawn, shares, begun = STRICT if strict else LENIENT
    rng = np.random.default_rng(seed)
    drafts = int(rng.integers(1, TREE.size))
    tokens = rng.choice(drawn, drafts, p=shares).tolist()
    before = rng.choice(begun, rng.integers(0, 3)).tolist()
    words = Words(list(before), strict)
    masks = np.full((drafts + 1, VOCABULARY // 32), UNTOUCHED, dtype=np.int32)
    words.fill_bitmask(torch.from_numpy(masks), 0)
    stand_ins = STAND_INS if strict else None
    on_all = grammar.Grip.on_all(TREE.size)
    scored = grammar.fill_nodes(words, "a", TREE, tokens, masks, on_all, stand_ins)
    assert words.path == before
    assert scored == (by_brute_force(tokens, before) if strict else tokens)
    for node in range(drafts + 1):
        expected = mask_after(path_to(node, scored), before, strict)
        assert masks[node].tolist() == (expected or [UNTOUCHED] * (VOCABULARY // 32))


def by_brute_force(tokens: list[int], before: list[int]) -> list[int]:
    scored = list(tokens)
    for node in range(len(tokens) + 1):
        mask = mask_after(path_to(node, scored), before, strict=True)
        children = [child for child in TREE.children[node] if child <= len(tokens)]
        if mask is None or not children:
            continue
        drawn = [tokens[child - 1] for child in children]
        allowed = [t for t in range(VOCABULARY) if mask[t // 32] >> (t % 32) & 1]
        left = [t for t in sorted(allowed, reverse=True) if t not in drawn]
        for child, token in zip(children, drawn, strict=True):
            if token not in allowed and len(allowed) <= MOST_ALLOWED and left:
                scored[child - 1] = left.pop(0)
    return scored


# -- within vLLM's manager -------------------------------------------------------------------


def manager(v2: bool = False, ahead: bool = False, of: type = StructuredOutputManager):
    """Ours over vLLM's, as far as masks go."""
    speculative_config = SimpleNamespace()
    SequoiaSettings(TREE, "given", None, {}).store(speculative_config)
    config = SimpleNamespace(
        speculative_config=speculative_config,
        num_speculative_tokens=TREE.num_speculative_tokens,
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=ahead),
        model_config=SimpleNamespace(is_diffusion=False, get_vocab_size=lambda: VOCABULARY),
        use_v2_model_runner=v2,
    )
    found = of.__new__(of)
    found.__dict__ |= {
        "vllm_config": config, "enable_in_reasoning": True, "fill_bitmask_parallel_threshold": 9,
        "_grammar_bitmask": None,
        "_full_mask": torch.tensor(-1, dtype=torch.int32),
        "tokenizer": SimpleNamespace(convert_ids_to_tokens=lambda ids: ["x" * i for i in ids]),
        "backend": SimpleNamespace(
            allocate_token_bitmask=lambda rows: torch.zeros(rows, VOCABULARY // 32).int()
        ),
    }  # fmt: skip
    return grammar.TreeGrammars(found)


def request_of(words: Words):
    structured = SimpleNamespace(grammar=words, reasoning_ended=True)
    return SimpleNamespace(
        use_structured_output=True, structured_output_request=structured, request_id="a"
    )


def laid_out(rows_each: int):
    """vLLM's manager of a version that gives each request so many rows."""

    class Manager(StructuredOutputManager):
        def grammar_bitmask(self, requests, names, scheduled):
            for index, name in enumerate(names):
                words = requests[name].structured_output_request.grammar
                words.fill_bitmask(self._grammar_bitmask, index * rows_each)
            return self._grammar_bitmask[: len(names) * rows_each].numpy()

    return Manager


DRAFTED = {"a": [1, 2, 3], "c": [3, 5, 1, 3, 3, 2, 2], "d": [9]}
LAYOUTS = {"vLLM's": StructuredOutputManager, "0.32": laid_out(1), "0.33": laid_out(TREE.size)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafted", [DRAFTED, {}], ids=["drafts", "none"])
def test_rows_are_in_the_requests_order_however_vllm_lays_out_several(layout, drafted):
    requests = {name: request_of(Words([2] * length)) for length, name in enumerate("abc")}
    own = manager(of=LAYOUTS[layout])
    masks = own.grammar_bitmask(requests, ["b", "a", "c"], drafted)
    expected = [
        (name, drafted.get(name, [])[:count])
        for name in "bac"
        for count in range(len(drafted.get(name, [])) + 1)
    ]
    assert len(masks) == len(expected)
    for row, (name, tokens) in zip(masks, expected, strict=True):
        path = path_to(len(tokens), tokens)
        mask = mask_after(path, [2] * "abc".index(name))
        assert row.tolist() == (mask or [UNTOUCHED] * (VOCABULARY // 32))
    assert len(own._grammar_bitmask) == 1, "vLLM's has room for the largest tree of each request"


def test_drafts_that_a_chain_would_lose_are_kept():
    request = request_of(Words())
    assert manager().validate_tokens(request, [7, 2, 3, -1, -1]) == [7, 2, 3]


def test_the_next_step_has_the_masks_of_what_replaced_drafts_without_asking_again():
    words = Words(strict=True)
    own, request = manager(), request_of(words)
    drafts = [1, 4, 1, 1, 9]
    scored = own.validate_tokens(request, drafts)
    assert scored == by_brute_force(drafts, []) != drafts
    asked = words.filled
    others = {"a": request, "b": request_of(Words())}
    for count in (3, 5):  # trimmed; and again, with nothing kept
        masks = own.grammar_bitmask(others, ["b", "a"], {"a": scored[:count]})
        paths = [path_to(node, scored) for node in range(count + 1)]
        expected = [mask_after(path, strict=True) for path in paths]
        assert masks.tolist() == [mask_after([]), *expected]
        assert (words.filled == asked) == (count == 3)


def test_masks_of_other_tokens_are_not_taken():
    own, request = manager(), request_of(Words(strict=True))
    own.validate_tokens(request, [1, 4])
    masks = own.grammar_bitmask({"a": request}, ["a"], {"a": [4, 13]})
    assert masks.tolist() == [mask_after(path, strict=True) for path in ([], [4], [13])]
    own.validate_tokens(request, [1, 4])
    request.structured_output_request.grammar.accept_tokens("a", [4])
    masks = own.grammar_bitmask({"a": request}, ["a"], {})
    assert masks.tolist() == [mask_after([4], strict=True)]
    masks = own.grammar_bitmask({"a": request}, ["a"], {"a": [9]})
    assert masks.tolist() == [mask_after(path, strict=True) for path in ([4], [4, 9])]


@pytest.mark.parametrize(("v2", "ahead"), [(True, True), (True, False), (False, True)])
def test_nothing_is_replaced_where_the_device_has_the_drafts(v2, ahead):
    request = request_of(Words(strict=True))
    drafts = [1, 4, 1, 1, 9]
    assert manager(v2=v2, ahead=ahead).validate_tokens(request, drafts) == drafts


THOUGHT = 6  # ends reasoning; of the grammar it is no part


def reasoning(own, words: Words, thoughts: list[int]):
    """A request that has thought these tokens, in an engine with a reasoning parser."""
    own.manager.reasoner_cls, own.manager.enable_in_reasoning = object, False
    request = request_of(words)
    request.all_token_ids = thoughts
    ends = SimpleNamespace(is_reasoning_end_streaming=lambda _, new: THOUGHT in new)
    request.structured_output_request = SimpleNamespace(
        grammar=words, reasoning_ended=False, masked_reasoning_end_ids=(), reasoner=ends
    )
    return request


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_grammar_begins_where_a_path_ends_its_reasoning(seed, strict):
    """Before, all is allowed and nothing replaced; behind, each node has the mask of its path."""
    drawn, shares, _ = STRICT if strict else LENIENT
    rng = np.random.default_rng(seed)
    ends = [THOUGHT, *drawn]
    tokens = rng.choice(ends, TREE.size - 1, p=[0.4, *(0.6 * np.array(shares))]).tolist()
    drafts = [7 if token < 0 else token for token in tokens]
    words, own = Words(strict=strict), manager(v2=not strict)
    request = reasoning(own, words, [9, 9, 1])
    scored = own.validate_tokens(request, drafts)
    masks = own.grammar_bitmask({"a": request}, ["a"], {"a": scored})
    assert words.path == []
    everything = [UNTOUCHED] * (VOCABULARY // 32)
    for node in range(TREE.size):
        path = path_to(node, scored)
        expected = everything
        if THOUGHT in path:
            below = path[path.index(THOUGHT) + 1 :]
            expected = mask_after(below, strict=strict) or everything
        assert masks[node].tolist() == expected
    assert scored == (behind_thoughts(drafts, scored) if strict else drafts)


@pytest.mark.parametrize("thoughts", [[], [9, 2, THOUGHT]])
def test_a_branch_has_the_masks_of_a_chain(thoughts):
    """It may be longer than the engine's tree. Nothing is replaced, not even what is forbidden."""
    told = [*thoughts, 1, 2, 3, 4, 5, 3, 2, 6, 1, 1, 2]
    own, words = manager(), Words()
    request = reasoning(own, words, [9, 9, 1]) if thoughts else request_of(words)
    own.branches = frozenset("a")
    assert own.validate_tokens(request, told) == told
    for count in (len(told), TREE.size - 1, 1):  # trimmed
        masks = own.grammar_bitmask({"a": request}, ["a"], {"a": told[:count]})
        assert words.path == []
        everything = [UNTOUCHED] * (VOCABULARY // 32)
        for node, mask in enumerate(masks):
            below = told[len(thoughts) : node]
            is_grammars = node >= len(thoughts)
            expected = mask_after(below) if is_grammars else None
            assert mask.tolist() == (expected or everything)
    assert mask_after(told[len(thoughts) : -2]) is not None
    assert mask_after(told[len(thoughts) : -1]) is None  # the same token again


def behind_thoughts(drafts: list[int], scored: list[int]) -> list[int]:
    """What should be scored, by the masks of what was scored above."""
    expected = list(drafts)
    for node in range(TREE.size):
        path = path_to(node, scored)
        if THOUGHT not in path or not TREE.children[node]:
            continue
        mask = mask_after(path[path.index(THOUGHT) + 1 :], strict=True)
        if mask is not None:
            below = [drafts[child - 1] for child in TREE.children[node]]
            found = STAND_INS(np.array(mask, dtype=np.int32), below)
            for child, token in zip(TREE.children[node], found, strict=True):
                expected[child - 1] = token
    return expected


def test_a_grammar_that_has_ended_replaces_nothing():
    request = request_of(Words([4, END], strict=True))
    assert manager().validate_tokens(request, [1, 2]) == [1, 2]


def test_other_requests_and_vllms_own_manager_are_left_alone():
    plugin.register()
    request = request_of(Words())
    request.structured_output_request.grammar.validate_tokens = lambda tokens: tokens[:1]
    plain = manager().manager
    assert plain.validate_tokens(request, [1, 1, 3]) == [1]
    found = plain.grammar_bitmask({"a": request}, ["a"], {"a": [1, 2]})
    assert [row.tolist() for row in found] == [mask_after([]), mask_after([1]), mask_after([1, 2])]
    request.use_structured_output = False
    assert manager().validate_tokens(request, [1, 1, -1]) == [1, 1, -1]
    assert manager().grammar_bitmask({}, [], {"a": [1]}) is None
