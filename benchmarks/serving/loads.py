"""The loads that every server gets, and the prompts that they send."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from benchmarks import PROMPTS, TARGET

BATCH = 16  # most requests that a server runs at once
PROMPT_TOKENS = {"short": 32, "long": 512}  # tokens of a prompt, by its kind


@dataclass(frozen=True)
class Load:
    """Requests that arrive by a Poisson process, ``rate`` per second, or all at once (infinite).
    The warm-up keeps ``running`` requests running, as the load will."""

    key: str
    title: str
    rate: float
    requests: int
    running: int
    prompts: str = "short"
    temperature: float = 0.0

    def options(self, folder: Path, tokens: int, warm_up: int | None = None) -> list[str]:
        """Options of ``vllm bench serve``; prompts lie in the folder, answers have these tokens.

        To warm up with so many tokens, other prompts come, and each answer brings the next request.
        """
        requests, how = self.requests, [f"--request-rate={self.rate:g}"]
        if warm_up is not None:
            requests = math.ceil(warm_up / tokens)
            how = [f"--max-concurrency={self.running}", "--seed=1"]
        # vLLM reads files of this data set without pandas.
        return [
            "--dataset-name=sharegpt", f"--dataset-path={folder / self.prompts}.json",
            f"--sharegpt-output-len={tokens}", "--ignore-eos",
            f"--temperature={self.temperature:g}", "--percentile-metrics=ttft,tpot,itl,e2el",
            "--metric-percentiles=99", "--disable-tqdm", f"--num-prompts={requests}", *how,
        ]  # fmt: skip


def make_loads(rates: Sequence[float], requests: Sequence[float]) -> list[Load]:
    """All loads, in the order in which a server gets them: arrivals per second for 1 request
    running, for 4, for a full batch, and of long prompts; requests at the first three rates, in the
    burst, at temperature 1, and with long prompts."""
    one, four, full, long = rates
    sent = [int(count) for count in requests]
    return [
        Load("one", f"{one:g} a second", one, sent[0], 1),
        Load("four", f"{four:g} a second", four, sent[1], 4),
        Load("full", f"{full:g} a second", full, sent[2], BATCH),
        Load("burst", f"{sent[3]} at once", math.inf, sent[3], BATCH),
        Load("sampled", f"{four:g} a second, T = 1", four, sent[4], 4, temperature=1.0),
        Load("long", f"{long:g} a second, long prompts", long, sent[5], 2, prompts="long"),
    ]


def server_options(tokens: int) -> list[str]:
    """Options of ``vllm serve``: room for `BATCH` of the longest requests, all prompts read."""
    longest = max(PROMPT_TOKENS.values()) + tokens + 64  # prompts are tokenized again
    return [
        f"--max-num-seqs={BATCH}", f"--max-model-len={longest}", "--max-num-batched-tokens=512",
        f"--kv-cache-memory-bytes={1 << 29}", "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def write_prompts(folder: Path) -> None:
    """Writes ``short.json`` and ``long.json`` for ``vllm bench serve``. The prompts in
    ``examples/models`` are one text: each begins where one of them does, and long ones go on with
    the next."""
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    tokenizer = load_tokenizer(TARGET)
    encoded = encode_prompts(load_prompts(Path(PROMPTS), 200), tokenizer)
    for kind, length in PROMPT_TOKENS.items():
        following = (chain.from_iterable(encoded[start:]) for start in range(len(encoded)))
        cut = [list(islice(ids, length)) for ids in following]
        texts = tokenizer.batch_decode(
            [ids for ids in cut if len(ids) == length], skip_special_tokens=True
        )
        data = [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]
        (folder / f"{kind}.json").write_text(json.dumps(data), encoding="utf-8")
