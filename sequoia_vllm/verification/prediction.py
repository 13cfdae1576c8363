"""Text that a user foretells: where a request's output has arrived in it, and what it says next.

A *diagonal* pairs each token of the output with the prediction's token at a fixed distance. Each of
the output's last tokens that the diagonal has counts, the latest most. The best diagonal says where
the output has arrived. So a replaced token changes nothing, and after inserted or left-out tokens
one token in common is enough.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REACH = 32
"""Last tokens of the output that are compared, and the longest run."""
# Integers, so that host and device sum them alike.
_UNIT = 1 << 28
WEIGHTS = np.rint(_UNIT * 0.6 ** np.arange(REACH - 1, -1, -1)).astype(np.int64)
"""Weight of each of the last tokens, the latest last."""
LEAST = _UNIT // 4  # least sum of a diagonal that is followed: four tokens replaced in a row
_LATEST = int((WEIGHTS.cumsum()[::-1] < LEAST).argmax())  # one of so many last tokens it must have
NEAR = _UNIT // 1000  # what breaks ties: nearness to where the former diagonal goes on
# Trust rises by a share of what lacks with each token that came true, and falls likewise. Below
# the least, a place needs tokens in a row: more the lower trust is, and eight at most.
RISE, FALL, LEAST_TRUST, MOST_EVIDENCE = 0.1, 0.3, 0.4, 8
# On devices: tokens in a row before a branch, and its tokens for each of these.
BRANCH_RUN, BRANCH_GROWTH = 8, 2
# Before the prediction's first token and before the output's first. No token is one of these.
START, _BEFORE, BEFORE_OUTPUT = -3, -2, -4


@dataclass
class PredictionCounts:
    """What became of one request's prediction.

    A token is *told* if the prediction says that it follows the text before it, whoever drafts it.
    """

    accepted: int = 0  # tokens of the output that were told
    rejected: int = 0  # tokens told before a step that the target scored, and it did not emit
    end: int = 0  # tokens of the output up to the last accepted one

    def add(self, prediction: "Prediction", output: NDArray[np.integer], scored: int) -> None:
        """Adds a step, which the prediction has not followed yet.

        A step may emit more than was told before it, as others draft as well. So the prediction is
        found again after each other token within the step.

        Args:
            prediction: It stays as it is.
            output: int ``[n]``: the request's tokens, the step's last.
            scored: How many tokens told before the step the target scored, see `scored_of`.
        """
        hits = prediction.hits(output)
        self.rejected += max(scored - hits, 0)
        self._accept(prediction.seen, hits)
        while (place := prediction.seen + hits + 1) < len(output):
            prediction = copy(prediction)
            prediction.follow(output[:place])
            hits = prediction.hits(output)
            self._accept(place, hits)

    def _accept(self, written: int, hits: int) -> None:
        if hits:
            self.accepted += hits
            self.end = written + hits

    def accepted_within(self, length: int) -> int:
        """Accepted tokens of an output that was cut to so many after its last step."""
        return self.accepted - max(self.end - length, 0)


def scored_of(told: NDArray[np.int64], tree: tuple[Sequence[int], Sequence[int]]) -> int:
    """How many told tokens, int64 ``[depth]``, a tree has in a row below its root.

    ``tree``: tokens and parents of the N scored nodes, the root first.
    """
    nodes = {place: node for node, place in enumerate(zip(*tree, strict=True))}
    scored, node = 0, nodes.get((told[0], 0))
    while node is not None:
        scored += 1
        node = nodes.get((told[scored], node)) if scored < len(told) else None
    return scored


class Prediction:
    """One request's foretold text; `follow` is told the output as it grows.

    Attributes:
        tokens: int32: its tokens, behind `REACH` that stand for what is before them.
        seen: Tokens of the output that it was told.
        run: Last tokens of the output that stand before the prediction's next one, too, at most
            `REACH`. The beginning counts as a token that both have.
        evidence: `run`, with what came before it: each other token in between halves that.

    Args:
        tokens: The text as the target's tokens, at least one.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array([*[_BEFORE] * (REACH - 1), START, *tokens], dtype=np.int32)
        self._ends = np.lib.stride_tricks.sliding_window_view(self.tokens, REACH)
        self._next: int | None = 0  # place of the token that it foretells; None: it is lost
        self._diagonal = 0  # the next token's place on the diagonal that was followed last
        self.seen, self._trust = 0, 1.0
        self.run = self.evidence = 1

    def follow(self, output: NDArray[np.integer]) -> int:
        """Takes the whole output so far, int ``[n]``; finds the place of its next token.

        Returns:
            How many of the tokens since the last call it foretold, up to the first other one.
        """
        new, hits = len(output) - self.seen, self.hits(output)
        self._trust = 1 - (1 - self._trust) * (1 - RISE) ** hits
        if hits < new and self.told(hits + 1)[-1] >= 0:
            self._trust *= 1 - FALL
        self._diagonal += new
        self.seen = len(output)
        self._find(output)
        return hits

    def hits(self, output: NDArray[np.integer]) -> int:
        """How many of the whole output's new tokens it foretells, up to the first other one."""
        new = output[self.seen :]
        differs = np.flatnonzero(self.told(len(new)) != new)
        return int(differs[0]) if len(differs) else len(new)

    def _find(self, output: NDArray[np.integer]) -> None:
        last = np.full(REACH, BEFORE_OUTPUT, dtype=np.int32)
        if len(output) < REACH:
            last[REACH - 1 - len(output)] = START
        if len(output):
            last[-min(len(output), REACH) :] = output[-REACH:]
        self._next, self.run, self.evidence = None, 0, 0
        needed = self._needed()
        if needed and not self._has_run(last[-needed:]):
            return
        place = self._best_place(last)
        if place is None:
            return
        same = self._ends[place] == last
        differs = np.flatnonzero(~same[::-1])
        self.run = int(differs[0]) if len(differs) else REACH
        for is_same in same.tolist():
            self.evidence = self.evidence + 1 if is_same else self.evidence // 2
        if self.run >= needed and same @ WEIGHTS >= LEAST:
            self._next = self._diagonal = place

    def _needed(self) -> int:
        """Tokens in a row that a place needs, as `kernels.predictions` has it."""
        if self._trust >= LEAST_TRUST:
            return 0
        enough = (run for run in range(MOST_EVIDENCE) if run * self._trust >= LEAST_TRUST)
        return next(enough, MOST_EVIDENCE)

    def _has_run(self, last: NDArray[np.int32]) -> bool:
        """Whether these tokens come anywhere in a row."""
        places = np.flatnonzero(self.tokens[REACH - 1 :] == last[-1])
        for back in range(1, len(last)):
            places = places[self.tokens[places + (REACH - 1 - back)] == last[-1 - back]]
        return len(places) > 0

    def _best_place(self, last: NDArray[np.int32]) -> int | None:
        """The place whose diagonal has most of these tokens, int32 ``[REACH]``; None: none has."""
        if self._diagonal < len(self._ends) and (self._ends[self._diagonal] == last).all():
            return self._diagonal  # no other place has as many as near
        # Few places of a long text can be it: comparing all tokens before each takes milliseconds.
        is_near = np.zeros(len(self._ends), dtype=bool)
        for back in range(REACH - _LATEST, REACH):
            is_near |= self.tokens[back : back + len(is_near)] == last[back]
        places = np.flatnonzero(is_near)
        if len(places) == 0:
            return None
        same = self._ends[places] == last
        distance = np.abs(places - self._diagonal)
        return int(places[(same @ WEIGHTS + NEAR // (1 + distance)).argmax()])

    @property
    def is_lost(self) -> bool:
        """Whether it says nothing, as the output is not in it, or at its end."""
        return self._next is None or self._next == len(self._ends) - 1

    @property
    def branch(self) -> int:
        """Tokens of the branch that devices may make of it: twice as many as match in a row before
        it, if these are eight; else 0. After r, a told token is expected by (r + 1) / (r + 2)."""
        if self._next is None or self.run < BRANCH_RUN:
            return 0
        return min(BRANCH_GROWTH * self.run, len(self._ends) - 1 - self._next)

    def told(self, depth: int) -> NDArray[np.int64]:
        """int64 ``[depth]``: what it says comes next; -1 behind its end, or where it is lost."""
        found = np.full(depth, -1, dtype=np.int64)
        if self._next is not None:
            ahead = self.tokens[REACH + self._next :][:depth]
            found[: len(ahead)] = ahead
        return found
