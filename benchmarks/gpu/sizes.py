"""How much is measured: on a GPU, and in a rehearsal without one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements on engines."""

    batches: tuple[int, ...] = (1, 8, 32, 64)
    drafts: tuple[int, ...] = (0, 3, 15, 59)
    beside: int = 8  # decoders beside which prompts are read
    # Drafts in mixed steps, while kernels are recorded, and while requests arrive.
    some_drafts: tuple[int, ...] = (0, 15)
    # Prompts' lengths where contexts are compared, ascending, and most tokens of a batch there.
    contexts: tuple[int, ...] = (128, 2048, 8192, 32768)
    most_context_tokens: int = 8 * 8192
    context: int = 512  # prompts' length otherwise, where whole steps are timed
    prompt: int = 128  # prompts' length where others decode meanwhile
    tokens: int = 64  # of each completion, where whole steps are timed
    rounds: int = 2  # times that is done; the last one counts
    outputs: int = 80  # steps of each other measurement
    rates: tuple[float, ...] = (8.0, 40.0)
    arriving: float = 6.0  # seconds in which requests arrive
    arriving_tokens: int = 64  # tokens of each of them
    watched: tuple[int, ...] = (1, 3, 8, 20)  # batches of all kinds, for vLLM's monitors
    longest: int = 2048  # tokens of a request there, at most

    def tokens_for(self, steps: int) -> int:
        """Tokens of requests that do not end within so many steps, whatever is accepted."""
        return steps * (1 + max(self.some_drafts))


ON_A_GPU = Sizes()
TINY = Sizes(
    batches=(1, 2), drafts=(0, 3), beside=2, some_drafts=(0, 3), contexts=(16, 40),
    context=16, prompt=8, tokens=14, rounds=1, outputs=12, rates=(20.0,), arriving=0.15,
    arriving_tokens=4, watched=(2,), longest=96,
)  # fmt: skip
