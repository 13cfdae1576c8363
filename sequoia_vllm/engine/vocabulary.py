"""Do target and draft mean the same by a token's number?"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sequoia_vllm.config import ConfigError

logger = logging.getLogger("vllm.sequoia")

# Above this share a draft is refused: it would be accepted as seldom as a wrong one. Below it
# are fine-tuned models that renamed a few tokens.
_TOLERATED = 0.01
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_vocabularies(
    target: str,
    draft: str,
    *,
    target_revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Compares the tokenizers' vocabularies, all of them, where both models bring one.

    Special and added tokens do not count: models of a family name them differently.

    Args:
        target, draft: Names or paths of tokenizers.
        target_revision, draft_revision: Their revisions on the Hub.
        trust_remote_code: Whether tokenizers may bring code of their own.

    Raises:
        ConfigError: The draft's tokens are others; says which, and what to do.
    """
    if _same_files(target, draft):
        return
    ours = read_vocabulary(target, target_revision, trust_remote_code)
    theirs = read_vocabulary(draft, draft_revision, trust_remote_code) if ours else None
    if ours is None or theirs is None:
        return
    problem, share = difference(ours, theirs)
    if share > _TOLERATED:
        raise ConfigError(
            f"the draft model {draft!r} has another vocabulary than the target {target!r} "
            f'({problem}), and would hardly ever be accepted: give "model" a draft of the '
            "target's family, with its tokenizer"
        )
    if problem:
        logger.warning("Sequoia: vocabularies of target and draft differ a little: %s", problem)


def difference(target: Mapping[int, str], draft: Mapping[int, str]) -> tuple[str, float]:
    """What differs between two vocabularies, tokens by number.

    Returns:
        In words, and as a share of the larger one; "" and 0 where nothing does.
    """
    numbers = target.keys() | draft.keys()
    wrong = [number for number in numbers if target.get(number) != draft.get(number)]
    if not wrong:
        return "", 0.0
    first = min(wrong)
    words = (
        f"{len(wrong):,} of {len(numbers):,} tokens differ, the first is number {first}: "
        f"{target.get(first)!r} of the target, {draft.get(first)!r} of the draft"
    )
    return words, len(wrong) / len(numbers)


def read_vocabulary(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> dict[int, str] | None:
    """Ordinary tokens by number; None: the model brings no tokenizer that could be read."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).is_file() for name in _OF_TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
        added = tokenizer.get_added_vocab()
        found = {
            number: token for token, number in tokenizer.get_vocab().items() if token not in added
        }
    except Exception as error:  # of any tokenizer's own code; vLLM says what it needs of it
        logger.debug("Sequoia: the tokenizer of %s cannot be compared: %s", model, error)
        return None
    return found or None


def _same_files(target: str, draft: str) -> bool:
    """Whether both are folders whose tokenizers are the same, byte for byte."""
    files = [Path(model) / "tokenizer.json" for model in (target, draft)]
    if not all(file.is_file() for file in files):
        return False
    return files[0].read_bytes() == files[1].read_bytes()
