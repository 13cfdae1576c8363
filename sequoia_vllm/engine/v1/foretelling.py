"""What the texts and predictions of requests say comes next, on the V1 runner."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.adaptation.told_branches import MOST_TOLD, Survival, ToldBranches, longest
from sequoia_vllm.engine.common.step_messages import Predicted
from sequoia_vllm.engine.core.prediction_option import foretold, is_counted
from sequoia_vllm.step.score import BARE_ROOT, StepState
from sequoia_vllm.verification.prediction import Prediction, PredictionCounts, scored_of
from sequoia_vllm.verification.retrieval import continuations

_MOST_CREDIT = 32  # six other tokens in a row leave none
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Told:
    """What was told of a request when its text had so many tokens."""

    tokens: NDArray[np.int64]
    run: int  # tokens that match before them
    length: int
    credit: int
    """Told tokens of the request that came true lately: each other token leaves half."""
    source: Survival  # of tokens that were told alike

    @property
    def longest(self) -> int:
        """Most tokens of a branch."""
        return longest(len(self.tokens), self.run, self.credit)


class ForetoldTexts:
    """The tokens that are told of each request of the batch: the longest match's, of its prediction
    or else of its own text.

    Attributes:
        told: int64 ``[requests, W]``, by place in the batch; -1: nothing is said.
        branches: Says how many of them a branch has.
        counts: What became of predictions, of the requests that want to know.
        counted: The same since the last `take_counts`.
        makes_branches: Whether it may; false while a tool measures drafted trees.
        has_branches: Whether branches were scored, or chosen, since this was set to false.
        masked: Requests with a grammar that got a branch, since this was emptied.

    Args:
        requests: Most requests of a batch.
        depth: Levels of the engine's tree.
        retrieves: Whether requests' own texts are looked at.
        vocabulary: Tokens that the target can read.
    """

    def __init__(self, requests: int, depth: int, retrieves: bool, vocabulary: int) -> None:
        self.told = torch.full((requests, max(depth, MOST_TOLD)), -1)
        self.branches = ToldBranches()
        self._retrieves, self._vocabulary = retrieves, vocabulary
        self._predictions: dict[str, Prediction] = {}
        self.counts: dict[str, PredictionCounts] = {}
        self.counted: dict[str, Predicted] = {}
        self._told: dict[str, _Told] = {}
        self.makes_branches, self.has_branches = True, False
        self.masked: frozenset[str] = frozenset()

    def start(self, request_id: str, sampling_params: Any) -> None:
        """Notes a request that begins."""
        self.forget(request_id)
        if (tokens := foretold(sampling_params)) is not None:
            self._predictions[request_id] = Prediction(tokens)
            if is_counted(sampling_params):
                self.counts[request_id] = PredictionCounts()

    def forget(self, request_id: str) -> None:
        """Drops a finished request, with its prediction."""
        self._predictions.pop(request_id, None)
        self._told.pop(request_id, None)
        self.counts.pop(request_id, None)

    def count(
        self, rows: Mapping[str, int], written: Mapping[str, NDArray[np.int32]], sampled: Tensor,
        trees: StepState | None,
    ) -> None:  # fmt: skip
        """Counts what became of predictions in a step whose tokens they have not followed yet.

        Args:
            rows: Places in the batch of requests that emit tokens, by name.
            written: int32 ``[n]``: what each of these had emitted before.
            sampled: int ``[requests, W]``: what the step emits; behind it -1.
            trees: What it verified.
        """
        for name in self.counts.keys() & rows.keys():
            prediction, counts = self._predictions[name], self.counts[name]
            if prediction.seen != len(written[name]):  # steps without drafts are not followed
                continue
            tree = BARE_ROOT if trees is None else trees.tree_of(rows[name])
            emitted = [token for token in sampled[rows[name]].tolist() if token >= 0]
            output = np.append(written[name], np.array(emitted, dtype=np.int32))
            counts.add(prediction, output, scored_of(prediction.told(len(tree[0])), tree))
            self.counted[name] = astuple(counts)

    def take_counts(self) -> dict[str, Predicted]:
        """What `count` found since the last call: each request's, from its beginning on."""
        taken, self.counted = self.counted, {}
        return taken

    def look_back(
        self,
        rows: NDArray[np.int64],
        names: Sequence[str],
        texts: NDArray[np.int32],
        prompts: NDArray[np.integer],
        lengths: NDArray[np.int64],
    ) -> None:
        """Notes what comes next of R requests, and what became of what was told of them before.

        Args:
            rows: int64 ``[R]``: their places in the batch.
            names: Their ids.
            texts: int32 ``[R, L]``: their tokens.
            prompts, lengths: ``[R]``: tokens of each prompt, and of each text.
        """
        told = torch.full((len(rows), self.told.shape[1]), -1)
        runs = np.zeros(len(rows), dtype=np.int64)
        if self._retrieves:
            given = torch.from_numpy(texts), torch.arange(len(rows)), torch.from_numpy(lengths)
            told, found = continuations(*given, told.shape[1])
            runs = found.numpy()
        sources = [self.branches.texts] * len(rows)
        may_branch = np.ones(len(rows), dtype=bool)
        for place, name in enumerate(names):
            if (prediction := self._predictions.get(name)) is None:
                continue
            prediction.follow(texts[place, prompts[place] : lengths[place]])
            if prediction.is_lost:
                continue
            if prediction.run >= runs[place]:
                told[place] = torch.from_numpy(prediction.told(told.shape[1]))
                runs[place], sources[place] = prediction.evidence, self.branches.predictions
            else:  # the text matches better, but may not replace a tree while both say something
                may_branch[place] = False
        for place, name in enumerate(names):
            tokens = self._readable(told[place].numpy()) if may_branch[place] else _NOTHING
            if len(tokens) or name in self._told:
                text = texts[place, : lengths[place]]
                credit = self._count(name, text)
                run, source = int(runs[place]), sources[place]
                self._told[name] = _Told(tokens, run, len(text), credit, source)
        self.told[torch.from_numpy(rows)] = told

    def _readable(self, told: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first of these tokens, up to one that the target cannot read."""
        unreadable = np.flatnonzero((told < 0) | (told >= self._vocabulary))
        return told[: unreadable[0]] if len(unreadable) else told

    def _count(self, name: str, text: NDArray[np.int32]) -> int:
        """Counts how many of the tokens told of a request have come true since; its new credit."""
        if (before := self._told.get(name)) is None:
            return 0
        new = text[before.length :][: len(before.tokens)]
        differs = np.flatnonzero(new != before.tokens[: len(new)])
        hits = int(differs[0]) if len(differs) else len(new)
        has_failed = hits < len(new)
        before.source.count(before.run, hits, has_failed)
        credit = min(before.credit + hits, _MOST_CREDIT)
        return credit // 2 if has_failed else credit

    def told_of(self, rows: NDArray[np.int64], depth: int) -> Tensor:
        """int64 ``[R, depth]`` of these places in the batch."""
        return self.told[torch.from_numpy(rows), :depth]

    def may_branch(self, names: Sequence[str], tree_depth: int) -> bool:
        """Whether enough is told of any of these requests, beside trees of such a depth."""
        told, fewest = (self._told.get(name) for name in names), self.branches.fewest(tree_depth)
        return self.makes_branches and any(
            one is not None and one.longest >= fewest for one in told
        )

    def branch_lengths(
        self, names: Sequence[str], most: Sequence[int], tree_depth: int, drafts: int
    ) -> NDArray[np.int64]:
        """Tokens of each request's branch, int64 ``[R]``; 0: it has a drafted tree.

        Args:
            names: The requests that get either.
            most: Most tokens of each.
            tree_depth, drafts: Levels and nodes of the drafted trees.
        """
        lengths = np.zeros(len(names), dtype=np.int64)
        for place, name in enumerate(names):
            if (told := self._told.get(name)) is not None:
                lengths[place] = self.branches.depth(
                    told.source, told.run, min(told.longest, most[place]),
                    tree_depth, drafts, len(names),
                )  # fmt: skip
        self.has_branches |= bool(lengths.any())
        return lengths
