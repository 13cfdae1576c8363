"""What drafters learn from: the target's answers, and how likely each token was.

The target answers prompts through vLLM, half of which it wrote. Beside each token of an answer
we keep the likeliest tokens of its distribution, so that a draft model learns without running it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chat_prompts import prompts, read_prompts
from numpy.typing import NDArray

from sequoia_vllm.cli.common import Report
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.measuring.engines import EngineSpec, open_engine
from sequoia_vllm.measuring.interrupts import engines_end_here
from sequoia_vllm.prompts import (
    Prompt,
    PromptError,
    encode_prompts,
    load_tokenizer,
    numbered_prompts,
)

TEMPERATURES = (0.0, 0.6, 1.0)  # of the answers, in turn
LIKELIEST = 16  # tokens whose probability is kept
PARTS = ("training", "validation")
VALIDATION_SHARE = 16  # one answer for validation to so many for training
LEAST_VALIDATION = 30  # answers: five kinds and own questions, at three temperatures
TEXTS_OF_A_SHARD = 64
ANSWERED_AT_ONCE = TEXTS_OF_A_SHARD  # in float32, 120 tokens/s, and 105 with 32 at once
QUESTION = 96  # most tokens of a question that the target writes
QUESTION_TOP_P = 0.9  # at temperature 1; above, small models write questions without sense


@dataclass(frozen=True)
class DraftDataRecipe:
    """What decides the data, but for its amount."""

    target: str
    prompts: str | None  # a file; None: those written here
    answer: int
    seed: int
    dtype: str
    target_sha256: str | None = None  # of its weights
    prompts_sha256: str | None = None


@dataclass(frozen=True)
class Shard:
    """Some answers, and the time that they took."""

    tokens: NDArray[Any]  # of all texts behind each other, prompts included, ``[N]``
    ends: NDArray[np.int64]  # where each text ends, ``[texts]``
    prompt_lengths: NDArray[np.int64]  # tokens of each prompt, ``[texts]``
    temperatures: NDArray[np.float32]  # of each answer, ``[texts]``
    likely: NDArray[Any]
    """The likeliest tokens before each token of an answer, ``[answered, 16]``; places that were not
    filled hold the likeliest again."""
    log_probabilities: NDArray[np.float16]  # theirs at temperature 1; -inf in places not filled
    seconds: float  # wall time, questions included


def write_draft_data(
    recipe: DraftDataRecipe, texts: int, out: Path, report: Report
) -> dict[str, Any]:
    """Writes answers that are not there yet, and a sixteenth as many for validation, or 30.

    Args:
        texts: Number of answers to learn from.
        out: The folder. What an earlier run left there is kept.
        report: Called with what is done, parts done, and parts in all.

    Returns:
        `summary` of the folder.

    Raises:
        SequoiaError: The folder has data of another recipe, or a prompt cannot be asked.
    """
    tokenizer = load_tokenizer(recipe.target)
    opening = None if recipe.prompts else _opening(tokenizer)
    _check_prompts(recipe, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    _keep_recipe(recipe, out)
    # Validation first: a draft can be trained on what a stopped run left.
    todo = [
        (part, number, questions)
        for part in reversed(PARTS)
        for number, questions in enumerate(_questions(recipe, part, texts, opening is not None))
        if not (path := _shard_path(out, part, number)).is_file()
        or len(_read_shard(path).ends) < len(questions)
    ]
    report("answers", 0, len(todo))
    if todo:
        with _engine(recipe) as llm:
            for done, (part, number, questions) in enumerate(todo, start=1):
                began, seed = time.monotonic(), _first_seed(recipe, part, number)
                asked = _ask(llm, opening, questions, seed)
                shard = _answer(llm, tokenizer, recipe, asked, seed, began)
                _save(shard, _shard_path(out, part, number))
                report("answers", done, len(todo))
    return summary(out)


def summary(folder: Path) -> dict[str, Any]:
    """Numbers of answers and answered tokens, hours, and tokens per second."""
    shards = [shard for part in PARTS for shard in read_shards(folder, part)]
    answered, seconds = sum(len(one.likely) for one in shards), sum(one.seconds for one in shards)
    return {
        "answers": sum(len(one.ends) for one in shards),
        "answered_tokens": answered,
        "hours": round(seconds / 3600, 3),
        "tokens_per_second": round(answered / max(seconds, 1e-9), 1),
    }


def read_shards(folder: Path, part: str) -> list[Shard]:
    """Reads a folder's answers of a part, one of `PARTS`; refuses a folder without."""
    paths = sorted((folder / part).glob("*.npz"))
    if not paths:
        raise SequoiaError(f"{folder} has no {part} data; write it first, with draft-data")
    return [_read_shard(path) for path in paths]


def _read_shard(path: Path) -> Shard:
    with np.load(path) as file:
        fields = {name: file[name] for name in file.files}
    return Shard(**{**fields, "seconds": float(fields["seconds"])})


def read_recipe(folder: Path) -> DraftDataRecipe:
    path = folder / "recipe.json"
    if not path.is_file():
        raise SequoiaError(f"{folder} has no recipe.json; write data first, with draft-data")
    return DraftDataRecipe(**json.loads(path.read_text("utf-8")))


def _keep_recipe(recipe: DraftDataRecipe, out: Path) -> None:
    path = out / "recipe.json"
    if path.is_file() and (there := read_recipe(out)) != recipe:
        raise SequoiaError(
            f"{out} has data of another recipe, {asdict(there)}: choose another folder"
        )
    path.write_text(json.dumps(asdict(recipe), indent=2) + "\n", "utf-8")


def _check_prompts(recipe: DraftDataRecipe, tokenizer: Any) -> None:
    """Encodes all prompts of the user's file, before an engine starts."""
    if recipe.prompts is None:
        return
    path, most = Path(recipe.prompts), _longest(recipe) - 1
    for line, one in numbered_prompts(path):
        where = f"prompts {path}, line {line}"
        try:
            length = len(encode_prompts([one], tokenizer)[0])
        except PromptError as error:
            raise SequoiaError(f"{where}: {error}") from error
        if length > most:
            raise SequoiaError(
                f"{where} has {length:,} tokens, and the target reads {most:,} at most here: "
                "shorten it, or leave it out"
            )


def _questions(
    recipe: DraftDataRecipe, part: str, texts: int, own: bool
) -> Iterator[Sequence[Prompt | None]]:
    """The prompts of each shard; the first ones do not depend on how many there are."""
    held_out = part == "validation"
    count = max(LEAST_VALIDATION, texts // VALIDATION_SHARE) if held_out else texts
    found: Sequence[Prompt | None]
    if recipe.prompts is None:
        found = prompts(held_out, count, recipe.seed, own)
    else:
        found = read_prompts(Path(recipe.prompts), held_out, count, recipe.seed)
    for first in range(0, len(found), TEXTS_OF_A_SHARD):
        yield found[first : first + TEXTS_OF_A_SHARD]


def _shard_path(out: Path, part: str, number: int) -> Path:
    return out / part / f"{number:05}.npz"


def _save(shard: Shard, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **asdict(shard))
    partial.replace(path)


@contextmanager
def _engine(recipe: DraftDataRecipe) -> Iterator[Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = EngineSpec(recipe.target, "", dtype=recipe.dtype, enforce_eager=True)
    options = {
        "max_num_seqs": ANSWERED_AT_ONCE, "max_logprobs": LIKELIEST,
        "max_model_len": _longest(recipe),
        "enable_chunked_prefill": False,  # on CPUs vLLM cannot read a seeded prompt in chunks
    }  # fmt: skip
    with engines_end_here(), open_engine(spec, **options) as llm:
        yield llm


def _longest(recipe: DraftDataRecipe) -> int:
    """Most tokens of a prompt with its answer."""
    from transformers import AutoConfig

    return min(2048, int(AutoConfig.from_pretrained(recipe.target).max_position_embeddings))


def _first_seed(recipe: DraftDataRecipe, part: str, number: int) -> int:
    return (recipe.seed * 2 + PARTS.index(part)) * 10**8 + number * TEXTS_OF_A_SHARD


def _opening(tokenizer: Any) -> list[int] | None:
    """A chat until its user begins to write; None if the target has no such chats."""
    if tokenizer.chat_template is None:
        return None
    mark = "QUESTION"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = chat.partition(mark)
    return tokenizer(before, add_special_tokens=False).input_ids if found and before else None


def _ask(
    llm: Any, opening: list[int] | None, questions: Sequence[Prompt | None], seed: int
) -> list[Prompt]:
    """Lets the target write what is None: it continues a chat where the user begins."""
    from vllm import SamplingParams

    places = [place for place, one in enumerate(questions) if one is None]
    sampling = [
        SamplingParams(
            temperature=1.0, top_p=QUESTION_TOP_P, max_tokens=QUESTION, seed=seed + place
        )
        for place in places
    ]
    asked = [{"prompt_token_ids": opening}] * len(places)
    outputs = llm.generate(asked, sampling, use_tqdm=False) if places else []
    written = iter(output.outputs[0].text.strip() or "?" for output in outputs)
    return [one or Prompt(prompt=next(written)) for one in questions]


def _answer(
    llm: Any, tokenizer: Any, recipe: DraftDataRecipe, questions: Sequence[Prompt], seed: int,
    began: float,
) -> Shard:  # fmt: skip
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": ids} for ids in encode_prompts(questions, tokenizer)]
    temperatures = [TEMPERATURES[place % len(TEMPERATURES)] for place in range(len(questions))]
    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=recipe.answer, logprobs=LIKELIEST,
            detokenize=False, seed=seed + place,
        )
        for place, temperature in enumerate(temperatures)
    ]  # fmt: skip
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    texts = [
        [*ask["prompt_token_ids"], *answer] for ask, answer in zip(asked, answers, strict=True)
    ]
    laws = [_likeliest(at) for one in outputs for at in one.outputs[0].logprobs]
    kind_of_number = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    return Shard(
        tokens=np.array([token for text in texts for token in text], dtype=kind_of_number),
        ends=np.cumsum([len(text) for text in texts], dtype=np.int64),
        prompt_lengths=np.array([len(one["prompt_token_ids"]) for one in asked], dtype=np.int64),
        temperatures=np.array(temperatures, dtype=np.float32),
        likely=np.array([tokens for tokens, _ in laws], dtype=kind_of_number),
        log_probabilities=np.array([values for _, values in laws], dtype=np.float16),
        seconds=time.monotonic() - began,
    )


def _likeliest(at: dict[int, Any]) -> tuple[list[int], list[float]]:
    ranked = sorted(at.items(), key=lambda item: -item[1].logprob)[:LIKELIEST]
    missing = LIKELIEST - len(ranked)
    tokens = [token for token, _ in ranked] + [ranked[0][0]] * missing
    return tokens, [one.logprob for _, one in ranked] + [float("-inf")] * missing


def digest(folder: Path, pattern: str) -> str:
    """SHA-256 over the files of a folder that a pattern finds, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: found)
    return found.hexdigest()
