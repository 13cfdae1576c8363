"""What the texts and predictions of requests say comes next, on the V1 runner."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.engine.common.step_messages import Predicted
from sequoia_vllm.engine.core.prediction_option import foretold, is_counted
from sequoia_vllm.step.score import BARE_ROOT, StepState
from sequoia_vllm.verification.prediction import Prediction, PredictionCounts
from sequoia_vllm.verification.retrieval import continuations


class ForetoldTexts:
    """The tokens that are told of each request of the batch: the longest match's, of its prediction
    or else of its own text.

    Attributes:
        told: int64 ``[requests, depth]``, by place in the batch; -1: nothing is said.

    Args:
        requests: Most requests of a batch.
        depth: Tokens told of each.
        retrieves: Whether requests' own texts are looked at.
    """

    def __init__(self, requests: int, depth: int, retrieves: bool) -> None:
        self.told = torch.full((requests, depth), -1)
        self._retrieves = retrieves
        self._predictions: dict[str, Prediction] = {}
        self._counts: dict[str, PredictionCounts] = {}  # of requests that want them
        self._counted: dict[str, Predicted] = {}  # since the last `take_counts`

    def start(self, request_id: str, sampling_params: Any) -> None:
        """Notes a request that begins."""
        self.forget(request_id)
        if (tokens := foretold(sampling_params)) is not None:
            self._predictions[request_id] = Prediction(tokens)
            if is_counted(sampling_params):
                self._counts[request_id] = PredictionCounts()

    def forget(self, request_id: str) -> None:
        """Drops a finished request, with its prediction."""
        self._predictions.pop(request_id, None)
        self._counts.pop(request_id, None)

    def count(
        self, rows: Mapping[str, int], written: Mapping[str, int], sampled: Tensor,
        trees: StepState | None,
    ) -> None:  # fmt: skip
        """Counts what became of predictions in a step whose tokens they have not followed yet.

        Args:
            rows: Places in the batch of requests that emit tokens, by name.
            written: How many tokens each of these had emitted before.
            sampled: int ``[requests, W]``: what the step emits; behind it -1.
            trees: What it verified.
        """
        for name in self._counts.keys() & rows.keys():
            prediction, counts = self._predictions[name], self._counts[name]
            if prediction.seen != written[name]:  # steps without drafts are not followed
                continue
            tree = BARE_ROOT if trees is None else trees.tree_of(rows[name])
            emitted = [token for token in sampled[rows[name]].tolist() if token >= 0]
            counts.add(prediction.told(len(tree[0])), emitted, written[name], tree)
            self._counted[name] = astuple(counts)

    def take_counts(self) -> dict[str, Predicted]:
        """What `count` found since the last call: each request's, from its beginning on."""
        taken, self._counted = self._counted, {}
        return taken

    @property
    def counts(self) -> bool:
        """Whether `count` has anything to do."""
        return bool(self._counts)

    def look_back(
        self,
        rows: NDArray[np.int64],
        names: Sequence[str],
        texts: NDArray[np.int32],
        prompts: NDArray[np.integer],
        lengths: NDArray[np.int64],
    ) -> None:
        """Notes what comes next of R requests.

        Args:
            rows: int64 ``[R]``: their places in the batch.
            names: Their ids.
            texts: int32 ``[R, L]``: their tokens.
            prompts, lengths: ``[R]``: tokens of each prompt, and of each text.
        """
        told = torch.full((len(rows), self.told.shape[1]), -1)
        runs = torch.zeros(len(rows), dtype=torch.int64)
        if self._retrieves:
            given = torch.from_numpy(texts), torch.arange(len(rows)), torch.from_numpy(lengths)
            told, runs = continuations(*given, told.shape[1])
        for place, name in enumerate(names):
            if (prediction := self._predictions.get(name)) is not None:
                prediction.follow(texts[place, prompts[place] : lengths[place]])
                if not prediction.is_lost and prediction.run >= runs[place]:
                    told[place] = torch.from_numpy(prediction.told(told.shape[1]))
        self.told[torch.from_numpy(rows)] = told

    def told_of(self, rows: NDArray[np.int64]) -> Tensor:
        """int64 ``[R, depth]`` of these places in the batch."""
        return self.told[torch.from_numpy(rows)]
