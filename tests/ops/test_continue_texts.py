"""What a text says comes next: what followed the latest of the longest matches of its end."""

import random

import pytest
import torch

from sequoia_vllm.verification import retrieval
from tests.kernels.conftest import INTERPRETED


def expected(text: list[int], depth: int) -> list[int]:
    """By trying every place, the latest first."""
    for length in range(retrieval.LONGEST, retrieval.SHORTEST - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                ahead = text[end:]
                return [ahead[place % len(ahead)] for place in range(depth)]
    return [-1] * depth


def longest_run(text: list[int]) -> int:
    """Tokens of the latest of the longest matches, counted beyond what makes one longer."""
    for length in range(retrieval.LONGEST, retrieval.SHORTEST - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                most = range(length, min(end, retrieval.LONGEST_RUN) + 1)
                return max(n for n in most if text[end - n : end] == text[-n:])
    return 0


def on_device(texts, rows, lengths, depth, window):
    """With padding behind the batch."""
    from sequoia_vllm.kernels.begin_drafting import find_continuations

    slots, roots = torch.cat([rows, torch.tensor([-1])]), torch.cat([lengths - 1, lengths[:1]])
    told = torch.full((len(slots), depth), -9)
    none = torch.zeros(len(texts), dtype=torch.int64)
    branches = torch.full((len(slots),), -9, dtype=torch.int32)
    find_continuations(texts, slots, roots, told, branches, none, window)
    assert not branches.any()  # predictions alone make them
    return told[:-1]


@pytest.mark.parametrize(("window", "block"), [(8192, 1024), (16, 4), (8192, 8)])
def test_continuations_are_those_of_the_latest_longest_match(window, block, monkeypatch):
    if INTERPRETED:
        from sequoia_vllm.kernels import begin_drafting

        monkeypatch.setattr(begin_drafting, "_BLOCK", block)
    monkeypatch.setattr(retrieval, "WINDOW", window)
    draw = random.Random(1)
    # Programs of the interpreter take their time.
    count = 40 if INTERPRETED else 300
    texts = [
        [draw.randrange(3 + row % 2) for _ in range(draw.randint(1, 41))] for row in range(count)
    ]
    texts += [[2, 3] * 10, [1] * 9, [7], [7, 7], [1, 2, 3, 1, 2]]
    held = torch.full((len(texts), 41), 3, dtype=torch.int32)  # what is behind a text is no text
    for row, text in enumerate(texts):
        held[row, : len(text)] = torch.tensor(text)
    rows = torch.randperm(len(texts))
    lengths = torch.tensor([len(texts[row]) for row in rows.tolist()], dtype=torch.int32)
    if INTERPRETED:
        found = on_device(held, rows, lengths, 5, window)
    else:
        found, runs = retrieval.continuations(held, rows, lengths, 5)
        assert runs.tolist() == [longest_run(texts[row][-window:]) for row in rows.tolist()]
    assert found.tolist() == [expected(texts[row][-window:], 5) for row in rows.tolist()]
    assert len(texts) // 3 < (found[:, 0] >= 0).sum() < len(texts)
