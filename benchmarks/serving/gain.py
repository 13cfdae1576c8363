"""``python -m benchmarks.serving.gain``: is `sequoia:measured_speedup` what clients see?

Two servers run side by side, plain vLLM and Sequoia. They get the same requests in turns, never at
the same time. A round's gain is the plain server's time over Sequoia's, by the client's clock.
Run it with nothing else on the machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.embedded_pair import DRAFT, TARGET, encoded_prompts
from benchmarks.serving.loads import BATCH, server_options
from benchmarks.serving.server import running_server
from sequoia_vllm.cli.common import friendly_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_PAUSE = 2.0  # seconds: a worker polls for one after its last step
_GAUGE = re.compile(r"^sequoia:measured_speedup\{[^}]*\} ([\d.]+)$", re.MULTILINE)
_DRAFTED = re.compile(r"^vllm:spec_decode_num_drafts_total\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


@app.command()
def gain(
    model: Annotated[str, typer.Option(help="The target.")] = TARGET,
    draft_model: Annotated[str, typer.Option(help="Its draft.")] = DRAFT,
    tokens: Annotated[str, typer.Option(help="Tokens of answers, each a case.")] = "8,100",
    clients: Annotated[str, typer.Option(help="Requests at once, each a case.")] = "1,4",
    seconds: Annotated[float, typer.Option(help="Of each server's turn, about.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server, and one before.")] = 6,
    opt_out: Annotated[bool, typer.Option(help="Requests want no drafts: both are plain.")] = False,
) -> None:
    """Compare the gain that Sequoia reports with the gain of its clients."""
    cases = [(int(t), int(c)) for t in tokens.split(",") for c in clients.split(",")]
    options = server_options(max(t for t, _ in cases))
    speculative = json.dumps({"method": "sequoia", "model": draft_model})
    with friendly_errors(), tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "trees").mkdir()
        plain, ours = (
            stack.enter_context(
                running_server(model, [*options, *more], folder / f"{log}.log", folder / "trees")
            )
            for log, more in (("plain", ()), ("ours", (f"--speculative-config={speculative}",)))
        )
        for length, at_once in cases:
            client = _Client(model, length, at_once, opt_out)
            found = _case(client, plain, ours, seconds, rounds)
            print(json.dumps(found), flush=True)


def _case(each: _Client, plain: str, ours: str, seconds: float, rounds: int) -> dict[str, Any]:
    """The gain by the client's clock and by the metric, medians and ranges over rounds."""
    each.run(plain, 2)
    count = max(1, round(seconds / each.run(plain, 4) * 4))
    for _ in range(2):  # it learns
        each.run(ours, count)
    times, gauges, drafted = [], [], []
    for number in range(rounds):
        found = {}
        before = _metric(ours, _DRAFTED)
        for url in (plain, ours) if number % 2 else (ours, plain):
            found[url] = each.run(url, count)
            if url == ours:
                gauges.append(_metric(ours, _GAUGE))
        drafted.append((_metric(ours, _DRAFTED) or 0) - (before or 0))
        times.append(found[plain] / found[ours])
    shown = [gauge for gauge in gauges if gauge is not None]
    return {
        "tokens": each.tokens, "clients": each.clients, "answers": count * each.clients,
        "client": _spread(times), "metric": _spread(shown) if shown else None,
        "metric_over_client": round(median(shown) / median(times), 3) if shown else None,
        "trees_of_each_turn": drafted,
    }  # fmt: skip


def _spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (median(values), min(values), max(values))]


def _metric(url: str, pattern: re.Pattern[str]) -> float | None:
    import httpx

    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    found = pattern.search(text)
    return None if found is None else float(found[1])


class _Client:
    """Sends the same requests again and again, some of them at once."""

    def __init__(self, model: str, tokens: int, clients: int, opt_out: bool) -> None:
        self.tokens, self.clients = tokens, clients
        self._body = {
            "model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            **({"vllm_xargs": {"sequoia_max_drafts": 0}} if opt_out else {}),
        }  # fmt: skip
        self._prompts = [ids[:32] for ids in encoded_prompts(200)]
        assert clients <= BATCH

    def run(self, url: str, count: int) -> float:
        """Seconds until every client has had so many answers, after a pause."""
        time.sleep(_PAUSE)
        return asyncio.run(self._run(url, count))

    async def _run(self, url: str, count: int) -> float:
        import httpx

        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
            await self._ask(client, 0, 1)  # connects
            begun = time.perf_counter()
            await asyncio.gather(
                *(self._ask(client, number * count, count) for number in range(self.clients))
            )
            return time.perf_counter() - begun

    async def _ask(self, client: Any, first: int, count: int) -> None:
        for number in range(first, first + count):
            prompt = self._prompts[number % len(self._prompts)]
            answer = await client.post("/v1/completions", json={**self._body, "prompt": prompt})
            answer.raise_for_status()


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.serving.gain")
