"""The option `PREDICTION` of a request: text that its user foretells.

It is read from ``extra_args`` only, so it is never a part of the prompt. The engine core and the
workers get tokens.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

PREDICTION = "sequoia_prediction"
COUNTED = "sequoia_prediction_counts"  # option: says with the answer what became of it
MOST_PREDICTED = 65_536  # tokens; characters of a text may be eight times as many


def check_prediction(value: Any) -> None:
    """Refuses what is neither a text nor token ids, and what is too long or empty.

    Raises:
        VLLMValidationError: See above. HTTP clients get status 400.
    """
    if isinstance(value, str):
        _check_length(len(value), 8 * MOST_PREDICTED, "characters")
    elif isinstance(value, list) and all(type(one) is int for one in value):
        _check_length(len(value), MOST_PREDICTED, "tokens")
    else:
        raise _refused(
            "is the text that you expect, or a list of its token ids, not "
            + (f"a list with {_first_other(value)}" if isinstance(value, list) else _kind(value))
        )


def _first_other(values: list[Any]) -> str:
    return next(_kind(one) for one in values if type(one) is not int)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _check_length(length: int, most: int, unit: str) -> None:
    if length == 0:
        raise _refused("is empty: leave it out")
    if length > most:
        raise _refused(f"has {length} {unit}, of {most} at most")


def _refused(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"{PREDICTION} {message}", parameter=PREDICTION)


def foretold(sampling_params: Any) -> Any:
    """A request's prediction, text or token ids; None: it has none."""
    options = sampling_params.extra_args if sampling_params is not None else None
    return options.get(PREDICTION) if options else None


def is_counted(sampling_params: Any) -> bool:
    """Whether a request asks what becomes of its prediction."""
    return bool((sampling_params.extra_args or {}).get(COUNTED))


def with_history(sampling_params: Any, tokens: list[int]) -> Any:
    """A copy of parameters without a prediction, which foretell this and ask for no counts."""
    told = copy.copy(sampling_params)
    options = {**(sampling_params.extra_args or {}), PREDICTION: tokens}
    told.extra_args = {name: value for name, value in options.items() if name != COUNTED}
    return told


# Until: vLLM hands a request's own options to the speculative method, with its tokenizer.
def verify(
    original: Callable[..., None],
    self: SamplingParams,
    model_config: Any,
    speculative_config: Any,
    structured_outputs_config: Any,
    tokenizer: Any,
) -> None:
    """Verifies like vLLM, then compares a prediction with the vocabulary, or with the tokenizer."""
    original(self, model_config, speculative_config, structured_outputs_config, tokenizer)
    predicted = foretold(self)
    if isinstance(predicted, str):
        if tokenizer is None:
            raise _refused("must be token ids where the engine has no tokenizer, not a text")
    elif isinstance(predicted, Sequence):
        size = model_config.get_vocab_size()
        for token in predicted:
            if not 0 <= token < size:
                raise _refused(f"has the token id {token}, of a vocabulary of {size}")


def update_from_tokenizer(
    original: Callable[..., None], self: SamplingParams, tokenizer: Any
) -> None:
    """Calls vLLM's, on parameters that are the request's own, and makes tokens of a prediction."""
    original(self, tokenizer)
    predicted = foretold(self)
    if isinstance(predicted, str):
        tokens = tokenizer.encode(predicted, add_special_tokens=False)
        _check_length(len(tokens), MOST_PREDICTED, "tokens")
        self.extra_args = {**(self.extra_args or {}), PREDICTION: list(tokens)}


def describe_params(original: Callable[..., str], self: SamplingParams) -> str:
    """Describes parameters like vLLM, whose log shows them, but leaves out a prediction's text."""
    if (predicted := foretold(self)) is None:
        return original(self)
    shown = copy.copy(self)
    shown.extra_args = {**(self.extra_args or {}), PREDICTION: f"<{len(predicted)} long>"}
    return original(shown)
