"""What prompts add to steps, and the gain over plain decoding that clients see."""

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.adaptation.step import Step
from sequoia_vllm.adaptation.step_times import Floats, StepTimes

Places = NDArray[np.int64]

_REMEMBERED = 50  # steps that read prompts, of the mean
_SHARE_FADES = 0.02  # weight of one step in shares of steps
_OUTLYING = 3.0  # times the usual: longer ones count as so long
_GAIN_HALF_LIFE = 5.0  # seconds: vLLM's log has a line every ten


class PromptSteps:
    """How much longer steps take that read prompts, and how often there is one.

    On GPUs the host bounds such a step: it takes a constant time, whatever it drafts, or that of a
    step without prompts if that is longer. Elsewhere prompts add to a step.

    Attributes:
        host_bound: Whether the host bounds them.
    """

    def __init__(self, octaves: int, host_bound: bool) -> None:
        self.host_bound = host_bound
        self._seconds = self._drafting = 0.0  # of the target, and more where drafts are grown
        self._counts = [0, 0]
        self._share, self._tokens = np.zeros(octaves), np.ones(octaves)
        self._steps = np.zeros(octaves)

    def add(self, step: Step, seconds: float, without: float, drafting_share: float) -> None:
        """Notes a step, prompts or none; ``without`` them it would take so many seconds."""
        octave = step.batch_size.bit_length() - 1
        self._steps[octave] += 1
        moves = max(_SHARE_FADES, 1 / (4 + self._steps[octave]))
        self._share[octave] += ((step.prompts > 0) - self._share[octave]) * moves
        tokens = 1 + step.gained / step.batch_size
        self._tokens[octave] += (tokens - self._tokens[octave]) * moves
        if step.prompts == 0:
            return
        target, drafting = seconds - step.drafting, step.drafting
        if not self.host_bound:
            target -= without * (1 - drafting_share)
            drafting -= without * drafting_share
        self._seconds = self._mean(0, self._seconds, max(target, 0.0))
        if step.drafts > 0:
            self._drafting = self._mean(1, self._drafting, max(drafting, 0.0))

    def _mean(self, which: int, mean: float, value: float) -> float:
        self._counts[which] = min(self._counts[which] + 1, _REMEMBERED)
        if self._counts[which] > 1:
            value = min(value, _OUTLYING * mean)
        return mean + (value - mean) / self._counts[which]

    def per_token(
        self, seconds: Floats, tokens: Floats, drafted: Floats, octaves: Places
    ) -> Floats:
        """Seconds that they add for each token of a request, ``[size, batch]``.

        Args:
            seconds: ``[size, batch]``, of steps without prompts.
            tokens: ``[size]``, of a request in a step.
            drafted: ``[size]``, 0 without drafts.
            octaves: ``[batch]``, logarithms to base 2, rounded down.
        """
        more = self._seconds + self._drafting * (drafted > 0)[:, None]
        added = np.maximum(more - seconds, 0.0) if self.host_bound else more
        # Each prompt is read once, however many steps there are. Where most steps read prompts,
        # more of them come together, and the share of steps stays.
        share = np.clip(self._share[octaves], 1e-6, 1 - 1e-6)
        apart = -(1 - share) * np.log1p(-share) / share
        result: Floats = added * share * self._tokens[octaves] ** -apart
        result *= tokens[:, None] ** (apart - 1)
        return result


class Gain:
    """Speed over plain decoding in the last seconds, for the same tokens and prompts.

    An answer's last steps may gain most, as a text repeats itself more and more. Its client waited
    for all of them. So steps that follow one another weigh alike, for up to a half-life: else an
    idle engine, whose last step was an answer's, would say too much.

    Attributes:
        value: The gain; None: not known.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        # Recent seconds, and plain decoding's for the same: faded, and of the latest steps.
        self._took = self._plain = self._latest = self._latest_plain = 0.0

    def add(
        self, step: Step, seconds: float, trees: int, times: StepTimes, drafting: float
    ) -> None:
        """Takes a step of so many verified trees, whose usual share of ``drafting`` is known."""
        plain = seconds  # a step without drafts is one
        if step.drafts > 0 or trees > 0:
            if times.seen[0] == 0:
                return
            alone = times.pace * times.seconds(0, step.batch_size, step.context)
            plain = alone * (1 + step.gained / step.batch_size)
            plain += self._reading(step, seconds, alone, trees, times, drafting)
        if not step.follows or self._latest + seconds > _GAIN_HALF_LIFE:
            self._took, self._plain = self._took + self._latest, self._plain + self._latest_plain
            self._latest = self._latest_plain = 0.0
        kept = 0.5 ** (seconds / _GAIN_HALF_LIFE)
        self._took, self._plain = kept * self._took, kept * self._plain
        self._latest, self._latest_plain = self._latest + seconds, self._latest_plain + plain
        if (took := self._took + self._latest) > 0:
            self.value = (self._plain + self._latest_plain) / took

    @staticmethod
    def _reading(
        step: Step, seconds: float, alone: float, trees: int, times: StepTimes, drafting: float
    ) -> float:
        """Seconds that plain decoding would take for a step's prompts, beside decoding.

        The step's own time tells them, less its drafting and what its trees cost the target.
        Requests that read prompts have no trees yet, but grow the first.
        """
        if step.prompts == 0:
            return 0.0
        level = times.pace * times.seconds(step.scored, step.batch_size, step.context)
        scoring = max(level * (1 - drafting) - alone, 0.0) * trees / step.batch_size
        return max(seconds - step.drafting - alone - scoring, 0.0)
