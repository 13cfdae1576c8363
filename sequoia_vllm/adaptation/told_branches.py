"""How deep a branch of told tokens pays, by how often such tokens came true and what rows cost.

A *branch* takes the place of a request's drafted tree: told tokens, each the only child of the one
before. What the tree does not hold of them is lost; what the draft would add is lost, too.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.adaptation.step_times import KNEE_CPU, PassTime, pass_seconds

MOST_TOLD = 63
"""Most tokens of a branch. With its root it has 64 rows."""
DISK = partial(pass_seconds, knee=100.0)
"""A pass with weights on a disk: two cores had knees of 31 to 170, and no step corrects it."""
_LONGEST = 32  # runs are counted up to here
_LENGTHS = _LONGEST.bit_length() + 1  # of runs, by powers of two: 0, 1, 2 to 3, ..., 32
_ASSUMED = 4.0  # tokens that the prior counts as
_REMEMBERED = 256.0  # tokens of a length, at which older ones count half
_DRAFTED_FADES = 0.02  # least weight of one step in what drafted trees bring


class Survival:
    """How often told tokens came true, by the run of matching tokens before each.

    After a run of r, (r + 1) / (r + 2) is expected of a token until others are counted (Laplace).
    """

    def __init__(self) -> None:
        runs = (1 << np.arange(_LENGTHS)) >> 1
        self._told = np.full(_LENGTHS, _ASSUMED)
        self._true = self._told * (runs + 1) / (runs + 2)

    def count(self, run: int, hits: int, has_failed: bool) -> None:
        """Takes tokens that were told after a run: the first ``hits`` came true.

        ``has_failed``: whether another token came in the place of the next one.
        """
        lengths = _lengths(run, hits + has_failed)
        np.add.at(self._told, lengths, 1)
        np.add.at(self._true, lengths[:hits], 1)
        is_old = self._told > _REMEMBERED
        self._told[is_old] /= 2
        self._true[is_old] /= 2

    def chances(self, run: int, most: int) -> NDArray[np.float64]:
        """Float64 ``[most]``: how likely all told tokens up to each one come true."""
        found: NDArray[np.float64] = np.cumprod((self._true / self._told)[_lengths(run, most)])
        return found


def _lengths(run: int, count: int) -> NDArray[np.integer]:
    """The entry of each of so many tokens in a row, the first of which follows the run."""
    lengths: NDArray[np.integer] = np.frexp(np.minimum(run + np.arange(count), _LONGEST))[1]
    return lengths


class ToldBranches:
    """Chooses between drafted trees and branches, for all requests of an engine.

    Attributes:
        predictions: What became of the tokens that users foretold.
        texts: And of those that requests' own texts told.
        pass_time: Of the target's pass, relative to one over a row; assumed where none is timed.
        draft: Time of the draft's pass, relative to that; None: the engine does not decide how much
            to draft, and a branch may not bring less for fewer rows.
    """

    def __init__(self, pass_time: PassTime | None = None, draft: float | None = None) -> None:
        self.predictions, self.texts = Survival(), Survival()
        self.pass_time: PassTime = pass_time or partial(pass_seconds, knee=KNEE_CPU)
        self.draft = draft
        self._drafted = 1.0  # nodes of a drafted tree that are accepted
        self._steps = 0  # with such trees

    def note_drafted(self, accepted: float) -> None:
        """Takes a step's drafted trees, of which so many nodes were accepted in the mean."""
        self._steps += 1
        weight = max(_DRAFTED_FADES, 1 / (1 + self._steps))
        self._drafted += (accepted - self._drafted) * weight

    def fewest(self, tree_depth: int) -> int:
        """Tokens that a branch has at least, where trees have so many levels."""
        return tree_depth + 1 if self.draft is None else 1

    def depth(
        self, source: Survival, run: int, most: int, tree_depth: int, drafts: int, requests: int
    ) -> int:
        """Tokens of the branch that pays most; 0: the drafted tree pays more.

        Args:
            source: `predictions` or `texts`.
            run: Tokens that match before them.
            most: Most tokens of the branch, see `longest`.
            tree_depth, drafts: Levels and nodes of the drafted tree, its root left out. It has told
                tokens as well, down to its last level.
            requests: Requests of the batch, which are taken to be alike.
        """
        if most < self.fewest(tree_depth):
            return 0
        chances = source.chances(run, max(most, tree_depth))
        within, chances = chances[:tree_depth], chances[:most]
        drafted = 1 + within.sum() + (1 - within[-1]) * self._drafted
        tokens = 1 + chances.cumsum()
        rows = requests * np.array([1 + drafts, *range(2, most + 2)], dtype=np.float64)
        seconds = self.pass_time(rows)
        if self.draft is None:
            rates = np.where(tokens > drafted, tokens / seconds[1:], 0)
        else:
            rates = tokens / seconds[1:]
            # The pass that tells the first level reads what was committed, and runs in any case.
            seconds[0] += (tree_depth - 1) * self.draft
        best = int(rates.argmax())
        return best + 1 if rates[best] > drafted / seconds[0] else 0


def longest(told: int, run: int, credit: int) -> int:
    """Most tokens of a branch: twice as many as match before it, or as came true lately.

    So a wrong text costs little.

    Args:
        told: Tokens that are told.
        run: Tokens that match before them.
        credit: Told tokens of the request that came true lately.
    """
    return min(told, 2 * run, 2 * credit)
