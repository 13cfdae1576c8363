"""What a foretold text says comes next, as a text grows that is edited from it."""

import random
from itertools import takewhile

import torch

from sequoia_vllm.verification.prediction import MOST_EVIDENCE, Prediction
from tests.kernels.conftest import INTERPRETED

DEPTH = 5


class Expected:
    """By trying every place, token by token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.place, self.diagonal, self.trust, self.seen = tokens, 0, 0, 1.0, 0
        self.run = 1

    def common(self, place: int, output: list[int]) -> list[bool]:
        """Which of the last tokens stand before this place, too, the latest first."""
        theirs, ours = ["start", *self.tokens[:place]], ["start", *output]
        pairs = zip(theirs[::-1], ours[::-1], strict=False)
        return [one == other for one, other in pairs][:32]

    def score(self, place: int, output: list[int]) -> float:
        same = enumerate(self.common(place, output))
        return sum(0.6**back for back, is_same in same if is_same)

    def told(self) -> list[int]:
        ahead = [] if self.place is None else self.tokens[self.place :][:DEPTH]
        return ahead + [-1] * (DEPTH - len(ahead))

    def branch(self) -> int:
        if self.place is None or self.run < 8:
            return 0
        return min(2 * self.run, len(self.tokens) - self.place)

    def follow(self, output: list[int]) -> None:
        ahead = [] if self.place is None else self.tokens[self.place :]
        new = output[self.seen :]
        hits = 0
        while hits < min(len(new), len(ahead)) and new[hits] == ahead[hits]:
            hits += 1
        for _ in range(hits):
            self.trust += 0.1 * (1 - self.trust)
        if hits < min(len(new), len(ahead)):
            self.trust *= 0.7
        self.diagonal, self.seen = self.diagonal + len(new), len(output)

        def near(place: int) -> float:
            return self.score(place, output) + 1e-3 / (1 + abs(place - self.diagonal))

        best = max(range(len(self.tokens) + 1), key=near)
        run = list(takewhile(bool, self.common(best, output)))
        is_sure = self.trust >= 0.4 or len(run) * self.trust >= 0.4
        is_sure = is_sure or len(run) >= MOST_EVIDENCE
        self.place = best if is_sure and self.score(best, output) >= 0.25 else None
        self.run = len(run)
        self.diagonal = best if self.place is not None else self.diagonal


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    """Predictions, and outputs that replace, leave out and insert tokens, or have nothing of it."""
    draw, found = random.Random(3), []
    for number in range(count):
        size = 3 + 5 * (number % 4)
        output = [draw.randrange(size) for _ in range(draw.randint(1, 150))]
        text = list(output)
        for _ in range(draw.randrange(6) if number % 5 else 40):
            place = draw.randrange(len(text) + 1)
            text[place : place + draw.randrange(3)] = [draw.randrange(size)] * draw.randrange(3)
        found.append((text or [1], output))
    return found


class OnHost:
    def __init__(self, predictions: list[list[int]]) -> None:
        self.predictions = [Prediction(tokens) for tokens in predictions]

    def told(self, outputs: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        for prediction, output in zip(self.predictions, outputs, strict=True):
            prediction.follow(torch.tensor(output).numpy())
        told = [prediction.told(DEPTH).tolist() for prediction in self.predictions]
        return told, [prediction.branch for prediction in self.predictions]

    def trust(self, shares: list[float]) -> None:
        for prediction, share in zip(self.predictions, shares, strict=True):
            prediction._trust = share


class OnDevice:
    """Behind prompts of some tokens, with padding behind the batch; every fifth has no branches."""

    def __init__(self, predictions: list[list[int]]) -> None:
        from sequoia_vllm.kernels.predictions import new_record

        count = len(predictions)
        self.slots = torch.randperm(count)
        self.records = [
            torch.from_numpy(new_record(tokens, row % 3 + 1, row % 5 < 4))
            for row, tokens in enumerate(predictions)
        ]
        self.addresses = torch.zeros(count, dtype=torch.int64)
        for slot, record in zip(self.slots.tolist(), self.records, strict=True):
            self.addresses[slot] = record.data_ptr()

    def told(self, outputs: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        from sequoia_vllm.kernels.begin_drafting import find_continuations

        texts = torch.full((len(outputs), 160), 2, dtype=torch.int32)
        ends = [row % 3 + len(output) for row, output in enumerate(outputs)]
        for row, (slot, end, output) in enumerate(
            zip(self.slots.tolist(), ends, outputs, strict=True)
        ):
            texts[slot, row % 3 + 1 : end + 1] = torch.tensor(output)
        slots = torch.cat([self.slots, torch.tensor([-1])])
        told = torch.full((len(slots), DEPTH), -9)
        roots = torch.tensor([*ends, 5], dtype=torch.int32)
        branches = torch.full((len(slots),), -9, dtype=torch.int32)
        find_continuations(texts, slots, roots, told, branches, self.addresses, window=0)
        assert not branches[4::5][: len(outputs) // 5].any()
        return told[:-1].tolist(), branches[:-1].tolist()

    def trust(self, shares: list[float]) -> None:
        for record, share in zip(self.records, torch.tensor(shares), strict=True):
            record[5] = share.view(torch.int32)


def test_predictions_are_followed_as_texts_grow():
    """Several tokens at a time, also more than are compared at once."""
    draw = random.Random(5)
    given = pairs(24)  # programs of the interpreter take their time
    predictions, outputs = ([list(one) for one in side] for side in zip(*given, strict=True))
    expected = [Expected(tokens) for tokens in predictions]
    followed = (OnDevice if INTERPRETED else OnHost)(predictions)
    lengths, told, lost, branches = [0] * len(outputs), 0, 0, 0
    for step in range(30):
        lengths = [
            min(length + (draw.randint(1, 6) if step != 1 or row % 6 else 140), len(output))
            for row, (length, output) in enumerate(zip(lengths, outputs, strict=True))
        ]
        written = [output[:length] for length, output in zip(lengths, outputs, strict=True)]
        for one, output in zip(expected, written, strict=True):
            one.follow(output)
        found, lengths_of_branches = followed.told(written)
        assert found == [one.told() for one in expected], step
        for row, (one, length) in enumerate(zip(expected, lengths_of_branches, strict=True)):
            assert length == one.branch() or (INTERPRETED and row % 5 == 4), (step, row)
            branches += length > 0
        told += sum(one.told()[0] >= 0 for one in expected)
        lost += sum(one.place is None for one in expected)
    assert told > 300
    assert lost > 20
    assert branches > 50


def test_the_less_it_is_trusted_the_longer_a_run_it_needs():
    """On both sides of the trust with which each run is just long enough."""
    text, sides = list(range(40)), (1 - 1e-5, 1 + 1e-5)
    given = [(run, 0.4 / max(run, 1) * side) for run in range(MOST_EVIDENCE + 2) for side in sides]
    given += [(MOST_EVIDENCE - 1, 1e-3), (MOST_EVIDENCE, 1e-3)]
    outputs = [[*text[: 19 - run], 99, *text[20 - run : 20]] for run, _ in given]
    followed = (OnDevice if INTERPRETED else OnHost)([text] * len(given))
    followed.told(outputs)
    followed.trust([trust for _, trust in given])
    expected = [trust >= 0.4 or run >= min(0.4 / trust, MOST_EVIDENCE) for run, trust in given]
    assert [told[0] == 20 for told in followed.told(outputs)[0]] == expected
