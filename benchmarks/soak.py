"""Random traffic for hours, to a server with trees and to plain vLLM beside it.

    python -m benchmarks.soak --minutes 45 --out soak.json
    python -m benchmarks.soak --minutes 45 --rehearse --out soak-rehearsal.json

A round is a burst or a trickle of random requests (those of the differential tests), after one of
the things that operators do: the prefix cache is reset, weights are loaded again, an adapter is
loaded and dropped, always under one name. Of the clients 5 % hang up, and as many requests again
are refused. Every answer is compared. After each round both servers are idle: then memory, handles
and threads are counted, and what a fixed request accepts. It ends with status 1 if an answer
differs, a request fails or hangs, a count is wrong, or something grows that does not grow in plain
vLLM. Of a round in which something went wrong, the report has the errors that the servers logged,
and what memory the machine had left. The whole logs stay where it says at its start. The JSON file
is written after each round, for a soak that is stopped.

`--rehearse` runs vLLM's GPU engine without a GPU (`tests/gpu_rehearsal`). It sleeps and wakes up.
It has no adapters: vLLM's kernels for them refuse float32, in which answers are compared.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.measuring.provenance import provenance
from tests.support.adapters import RANK, save_adapter
from tests.support.interpreted import gpu_environment
from tests.support.memory_checks import VARIABLE as MEMORY_CHECKS
from tests.support.models import prompts
from tests.support.serving import DRAFT, FRESH, OPTIONS, Server, environment
from tests.support.soak.over_http import HANGS_AFTER, Endpoint, Tally, compare
from tests.support.soak.random_requests import RandomRequest, random_requests
from tests.support.soak.server_errors import logged_errors

app = typer.Typer(add_completion=False)
ADAPTER = "tuned"
TREES = {"method": "sequoia", "model": DRAFT}
_LORA = ("--enable-lora", "--max-loras=2", f"--max-lora-rank={RANK}")
_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
# Each must be refused with status 400 or 404, and leave nothing behind.
_REFUSED: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": -1.0},
    {"prompt": "word " * 4000},
    {"model": "nobody"},
    {"structured_outputs": {"regex": "("}},
    {"vllm_xargs": {MOST_DRAFTS: "many"}},
)
_PROBE = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
_MIB = 1 << 20
# Growth counts from this share of the run on: caches fill before.
_WARM = 1 / 3
# Failed requests that the report prints; a dead engine fails all that it has.
_SHOWN = 5


@dataclass(frozen=True)
class Engines:
    """One of vLLM's engines, and what suits it.

    Attributes:
        trees: The speculative configuration.
        sizes: Requests of a round.
        patience: Seconds after which a request hangs.
    """

    options: tuple[str, ...]
    variables: dict[str, str]
    trees: dict[str, Any] = field(default_factory=lambda: TREES)
    events: tuple[str, ...] = ("nothing", "nothing", "prefix cache", "weights", "adapter")
    sizes: tuple[int, ...] = (6, 12, 40)
    patience: float = HANGS_AFTER


CPUS = Engines((*OPTIONS[1:], *_LORA), {})


def rehearsed() -> Engines:
    """The GPU engine, whose kernels are interpreted: it is slow, and its times mean nothing.

    So it always drafts, in small trees. Other tests check what kernels do to memory.
    """
    quick = {"REHEARSE_QUICK_START": "1", MEMORY_CHECKS: "0"}
    return Engines(
        ("--dtype=float32", "--max-model-len=512", "--max-num-seqs=8", "--enable-sleep-mode"),
        gpu_environment(multiprocessing=True) | quick,
        {**TREES, "adapt": False, "tree": {"size": 8, "depth": 3}},
        events=("nothing", "nothing", "prefix cache", "weights", "sleep"),
        sizes=(3, 6, 12),
        patience=1200.0,
    )


@dataclass(frozen=True)
class Sample:
    """What one server's processes had after a round.

    Attributes:
        memory: MiB that no other process shares.
        accepted: Tokens per tree of the probe; None: plain vLLM, or nothing was drafted.
    """

    minutes: float
    memory: float
    handles: int
    threads: int
    accepted: float | None


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long to send requests.")] = 45.0,
    seed: Annotated[int, typer.Option(help="Of requests and events.")] = 0,
    pause: Annotated[float, typer.Option(help="Seconds between two rounds.")] = 5.0,
    rehearse: Annotated[bool, typer.Option(help="vLLM's GPU engine, without a GPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' logs.")] = None,
) -> None:
    """Sends random requests for so long, and says what differed, failed, hung or grew."""
    engines = rehearsed() if rehearse else CPUS
    logs = logs or Path(tempfile.mkdtemp(prefix="soak-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    typer.echo(f"The servers log to {logs}.", err=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        both_servers(Path(folder), logs, engines) as (ours, plain),
    ):
        soaking = Soaking(ours, plain, Path(folder), random.Random(seed), engines)
        stated = provenance()
        for _ in soaking.rounds(60 * minutes, pause):
            report = soaking.report()
            if out is not None:
                whole = {**report, "samples": soaking.samples_as_data(), "provenance": stated}
                partial = out.with_name(f"{out.name}.partial")
                partial.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
                partial.replace(out)
    typer.echo(json.dumps(report, indent=1))
    raise typer.Exit(bool(report["wrong"]))


@contextmanager
def both_servers(folder: Path, logs: Path, engines: Engines) -> Iterator[tuple[Server, Server]]:
    """A server with trees, by its defaults, and a plain one. CPUs: one thread each."""
    own = {"SEQUOIA_VLLM_TREES": str(folder / "trees")}
    variables = environment() | engines.variables | _VARIABLES | own
    with ExitStack() as stack:
        servers = [
            Server(
                logs / f"{name}.log",
                *(*engines.options, *more),
                variables=variables,
                start_deadline=engines.patience,
            )
            for name, more in (
                ("ours", ["--speculative-config", json.dumps(engines.trees)]),
                ("plain", []),
            )
        ]
        ours, plain = (stack.enter_context(server) for server in servers)
        yield ours, plain


def refused_request(source: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A key that is wrong in a request to complete a text, and the request."""
    wrong = source.choice(_REFUSED)
    [fault] = wrong
    return fault, {"model": model, "prompt": "def f(", **wrong}


class Soaking:
    """Both servers, what was sent to them, and what was seen."""

    def __init__(
        self, ours: Server, plain: Server, folder: Path, source: random.Random,
        engines: Engines = CPUS,
    ) -> None:  # fmt: skip
        self.servers = {"ours": ours, "plain": plain}
        self.samples: dict[str, list[Sample]] = {name: [] for name in self.servers}
        self._tally, self._source, self._engines = Tally(), source, engines
        self._began = time.monotonic()
        self._events = dict.fromkeys(engines.events, 0)
        self._refused = 0
        self._trees = 0.0
        self._wrong: list[str] = []
        self._logged: list[str] = []
        self._adapters = [save_adapter(folder / f"adapter{n}", n) for n in (1, 2)]
        self._clients = {
            name: httpx.Client(
                base_url=server.url, headers=FRESH, trust_env=False, timeout=engines.patience
            )
            for name, server in self.servers.items()
        }

    def rounds(self, seconds: float, pause: float) -> Iterator[None]:
        """Rounds for so long, at least one, or until a server does not serve any more."""
        until = time.monotonic() + seconds
        serves = True
        while serves:
            serves = self.checked_round() and time.monotonic() < until
            yield
            time.sleep(pause)

    def checked_round(self) -> bool:
        """A round, and what the servers logged if something went wrong; False: one has ended."""
        before = {name: len(server.log) for name, server in self.servers.items()}
        known, serves = self._count_wrong(), True
        try:
            self.round()
        except (AssertionError, OSError, httpx.HTTPError, psutil.Error) as error:
            self._wrong.append(f"it ended early: {type(error).__name__}: {str(error)[:500]}")
            serves = False
        if self._count_wrong() > known:
            free = psutil.virtual_memory().available // _MIB
            self._logged.append(
                f"at {self._minutes():.1f} minutes, {free} MiB free, load {os.getloadavg()[0]:.1f}"
            )
            for name, server in self.servers.items():
                errors = logged_errors(server.log[before[name] :])
                self._logged += [f"{name}: {line}" for line in errors]
        return serves

    def _count_wrong(self) -> int:
        tally = self._tally
        counted = self._wrong, tally.failed, tally.hung, tally.different
        return sum(len(one) for one in counted)

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def round(self) -> None:
        """One event, the requests behind it, and a sample when all have ended."""
        event = self._source.choice(self._engines.events)
        self._events[event] += 1
        count = self._source.choice(self._engines.sizes)
        requests = random_requests(prompts(32), count, self._source.randrange(1 << 30), 4096)
        if event == "prefix cache":
            self._post("/reset_prefix_cache")
        elif event == "weights":
            self._post("/collective_rpc", {"method": "reload_weights"})
        elif event == "sleep":
            self._post("/sleep?level=1")
            self._post("/wake_up")
        if event == "adapter":
            path = self._source.choice(self._adapters)
            self._post("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path})
            # vLLM's kernels for CPUs give all requests of a batch its last adapter.
            self._send(requests, ADAPTER)
            self._post("/v1/unload_lora_adapter", {"lora_name": ADAPTER})
        else:
            self._send(requests)
        for _ in range(max(count // 20, 1)):
            self._be_refused()
        self._sample()

    def _send(self, requests: Sequence[RandomRequest], model: str | None = None) -> None:
        if model is not None:  # structured outputs and adapters are tried apart
            requests = [replace(request, structured=None) for request in requests]
        patience = self._engines.patience
        ours, plain = (Endpoint(server, patience) for server in self.servers.values())
        ours.model, plain.model = model or ours.model, model or plain.model
        asyncio.run(compare(ours, plain, requests, self._tally))
        for name, server in self.servers.items():
            self._clients[name].get("/health").raise_for_status()  # an engine may have died
            server.wait_until_idle(patience)
            if any(server.metric("vllm:kv_cache_usage_perc")):
                self._wrong.append(f"{name}: an idle server holds KV cache")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """The same to both servers."""
        for name, client in self._clients.items():
            answer = client.post(path, json=body) if body else client.post(path)
            if answer.status_code != 200:
                self._wrong.append(f"{name}: {path} gave {answer.status_code}: {answer.text[:200]}")

    def _be_refused(self) -> None:
        fault, body = refused_request(self._source, self.servers["ours"].model)
        answer = self._clients["ours"].post("/v1/completions", json=body)
        self._refused += 1
        if answer.status_code not in (400, 404):
            self._wrong.append(f"a wrong {fault} gave {answer.status_code}, not 400")

    def _sample(self) -> None:
        """Sends the probe, and counts what both servers have."""
        for name, server in self.servers.items():
            before = _trees(server)
            probe = {"model": server.model, "prompt": prompts(1)[0], **_PROBE}
            answer = self._clients[name].post("/v1/completions", json=probe)
            if answer.status_code != 200:
                self._wrong.append(
                    f"{name}: the probe gave {answer.status_code}: {answer.text[:200]}"
                )
            server.wait_until_idle(self._engines.patience)
            after = _trees(server)
            trees, tokens = (now - then for now, then in zip(after, before, strict=True))
            self._trees = max(self._trees, after[0])  # plain vLLM has none
            family = [psutil.Process(one.pid) for one in server.family()]
            self.samples[name].append(
                Sample(
                    minutes=round(self._minutes(), 2),
                    memory=round(sum(one.memory_full_info().uss for one in family) / _MIB, 1),
                    handles=sum(one.num_fds() for one in family),
                    threads=sum(one.num_threads() for one in family),
                    accepted=round(tokens / trees, 3) if trees else None,
                )
            )

    def samples_as_data(self) -> dict[str, list[dict[str, Any]]]:
        """All samples, by server."""
        return {name: [asdict(one) for one in rows] for name, rows in self.samples.items()}

    def report(self) -> dict[str, Any]:
        """Counts, growth, and under ``wrong`` all that should not be."""
        tally, growth = self._tally, {name: _growth(rows) for name, rows in self.samples.items()}
        wrong = [*self._wrong, *(f"another answer: {one}" for one in tally.different)]
        wrong += [f"no answer: {one}" for one in tally.hung]
        for one in tally.failed[:_SHOWN]:
            for name, server in self.servers.items():
                one = one.replace(server.url, name)
            wrong.append(f"failed: {one}")
        for what, (mean, error) in growth["ours"].items():
            of_plain = growth["plain"][what][0]
            if mean - of_plain > max(4 * error, 1.0):
                wrong.append(f"{what} grew by {mean:.1f} an hour, plain vLLM's by {of_plain:.1f}")
        accepted = [one.accepted for one in self.samples["ours"] if one.accepted is not None]
        third = max(len(accepted) // 3, 1)
        return {
            "minutes": round(self._minutes(), 2),
            "events": self._events,
            "answered": tally.answered,
            "tokens": tally.tokens,
            "hung up": tally.left,
            "failed": len(tally.failed),
            "refused": self._refused,
            "trees": self._trees,
            "growth an hour, standard error": growth,
            "tokens per tree of the probe, first and last third": [
                round(float(np.mean(part)), 3)
                for part in (accepted[:third], accepted[-third:])
                if part
            ],
            "wrong": wrong,
            "logged where something went wrong": self._logged,
        }


def _trees(server: Server) -> list[float]:
    """Trees that were verified, and tokens that they brought; nothing of plain vLLM."""
    names = "sequoia:trees_total", "sequoia:emitted_tokens_total"
    return [sum(server.metric(name)) for name in names]


def _growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Growth per hour of each count, and its standard error, by a line through the warm samples."""
    warm = samples[int(len(samples) * _WARM) :]
    hours = np.array([one.minutes for one in warm]) / 60
    found = {}
    for what in ("memory", "handles", "threads"):
        if len(warm) < 3:
            found[what] = (0.0, 0.0)
            continue
        values = np.array([getattr(one, what) for one in warm], dtype=np.float64)
        apart = hours - hours.mean()
        slope = float(apart @ values / (apart @ apart))
        left = values - values.mean() - slope * apart
        error = float(np.sqrt(left @ left / (len(warm) - 2) / max(apart @ apart, 1e-9)))
        found[what] = (round(slope, 2), round(error, 2))
    return found


if __name__ == "__main__":
    app()
