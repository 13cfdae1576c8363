"""``python -m benchmarks.serving``, on a recorded result of ``vllm bench serve``."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.serving import __main__ as command
from benchmarks.serving import run as module
from benchmarks.serving.__main__ import app
from benchmarks.serving.run import Run
from benchmarks.serving.server import ServingError, bench_serve, make_loads, server_options

RECORDED = json.loads((Path(__file__).parents[1] / "data/bench_serve.json").read_text())
RATES, REQUESTS = [0.25, 0.9, 2, 0.2], [2, 3, 4, 32, 3, 2]
SETTINGS = {
    "model": "target", "draft_model": "draft", "rates": RATES, "requests": REQUESTS,
    "tokens": 64, "warm_up": 300,
}  # fmt: skip
OPTIONS = (
    "--model=target", "--draft-model=draft", "--rates=0.25,0.9,2,0.2", "--requests=2,3,4,32,3,2",
)  # fmt: skip


class Machine:
    """Stands for servers and ``vllm bench serve``, and notes what is asked of them."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.servers: list[list[str]] = []
        self.sent: list[list[str]] = []
        self.breaks_at = breaks_at

    @contextmanager
    def running_server(self, model, options, log, trees):
        assert trees.is_dir()
        assert not list(trees.iterdir())
        self.servers.append(options)
        yield "http://127.0.0.1:1"

    def bench_serve(self, options, log):
        self.sent.append(options)
        if len(self.sent) == self.breaks_at:
            raise ServingError("the machine went down")
        return RECORDED


@pytest.fixture
def machine(monkeypatch):
    def start(breaks_at=None):
        made = Machine(breaks_at)
        monkeypatch.setattr(module, "running_server", made.running_server)
        monkeypatch.setattr(module, "bench_serve", made.bench_serve)
        monkeypatch.setattr(command, "check_name", lambda role, model: None)
        return made

    return start


def call(folder, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [f"--output={folder}", *OPTIONS, *options])
    assert result.exit_code == code, result.output
    return result.output


def test_one_server_per_variant_and_round(tmp_path, machine, monkeypatch):
    started = machine()
    library = {"LD_PRELOAD": "/lib/libiomp5.so"}
    monkeypatch.setattr(module, "server_environment", lambda trees: library)
    text = call(tmp_path, "--rounds=2")
    assert len(started.servers) == 6
    assert len(started.sent) == 6 * 6 * 2  # each load after its warm-up
    speculative = [options[-1].partition("=") for options in started.servers]
    assert speculative[0][0] != "--speculative-config"
    assert json.loads(speculative[2][2]) == {"method": "sequoia", "model": "draft"}
    assert text.count("| plain |") == text.count("| sequoia |") == 6
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["settings"] == SETTINGS
    assert table["provenance"]["preloaded"] == ["libiomp5.so"]
    assert call(tmp_path, "--table-only") == (tmp_path / "table.md").read_text()
    assert "give another --output" in call(tmp_path, "--tokens=32", code=2)


def test_it_goes_on_where_it_ended(tmp_path, machine):
    machine(breaks_at=1)
    call(tmp_path / "broken", code=2)
    assert "no results" in call(tmp_path / "broken", "--table-only", code=2)
    machine(breaks_at=16)  # the warm-up of the chain's second load
    call(tmp_path, "--rounds=1", code=2)
    assert list(Run(tmp_path).missing(["plain", "chain"], 1)) == [(1, "chain")]
    again = machine()
    call(tmp_path, "--rounds=1")
    assert len(again.servers) == 2
    assert len(again.sent) == 2 * (5 + 6)
    nothing = machine()
    call(tmp_path, "--rounds=1")
    assert nothing.servers == []


def test_vllm_takes_the_options(tmp_path, monkeypatch):
    """Its own parsers read them; a repeated option's last value counts."""
    from vllm.benchmarks import serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    seen = []

    def main(parsed):
        seen.append(parsed)
        return RECORDED

    monkeypatch.setattr(serve, "main", main)
    load = make_loads(RATES, REQUESTS)[0]
    log = tmp_path / "log"
    bench_serve(load.options(tmp_path, 64), log)
    bench_serve(load.options(tmp_path, 64, 300), log)
    timed, warm_up = seen
    assert (timed.request_rate, timed.num_prompts, timed.max_concurrency) == (0.25, 2, None)
    assert (warm_up.request_rate, warm_up.num_prompts) == (float("inf"), 5)
    assert warm_up.max_concurrency == 1
    assert make_arg_parser(FlexibleArgumentParser()).parse_args(server_options(64))
