"""From counts to acceptance vectors, and what ends the counting, without an engine."""

import json
import os
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from sequoia_vllm.calibration import measure_acceptance as acceptance_module
from sequoia_vllm.calibration.measure_acceptance import (
    AcceptanceSettings,
    estimate_acceptance,
    measure_acceptance,
    precision,
    probing_tree,
    tokens_margin,
    wilson_interval,
)
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.provenance import model_hashes
from sequoia_vllm.prompts import BUILTIN, encode_prompts, load_prompts, load_tokenizer
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from tests.support.commands import command, in_words
from tests.support.models import DRAFT, TARGET


def test_probing_tree():
    # 0 ── 1 2 3
    assert probing_tree(3) == TokenTree((-1, 0, 0, 0))
    assert probing_tree(1, 3) == TokenTree((-1, 0, 1, 2))
    # 0 ─┬─ 1 ─┬─ 3 ─┬─ 7
    #    │     │     └─ 8
    #    │     └─ 4 ─┬─ 9
    #    └─ 2 ─┬─ 5  └─ 10
    #          └─ 6
    assert probing_tree(2, 3) == TokenTree((-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4))
    assert probing_tree(16, 3).size == 1 + 5 * 16
    # Below 7 and 8, too, go on two children of each.
    with_tail = probing_tree(3, 2, 2)
    assert with_tail.parents[:10] == probing_tree(3, 2).parents
    assert with_tail.parents[10:] == (4, 4, 5, 5, 10, 10, 11, 11)
    assert probing_tree(1, 2, 3) == probing_tree(1, 5)


def test_how_well_tokens_per_step_are_known():
    """They are known as well as they repeat: the same vector counted again and again."""
    random, truth = np.random.default_rng(0), np.array([[0.5, 0.2, 0.0], [0.6, 0.1, 0.1]])
    tree, trials = optimize_tree(Acceptance.of(truth), 24, 6), [[300] * 3, [150] * 3]
    found = []
    for _ in range(400):
        counted = [
            random.multinomial(n[0], [*row, 1 - row.sum()])[:3] / n[0]
            for row, n in zip(truth, trials, strict=True)
        ]
        found.append(tree.expected_tokens(Acceptance.of(np.array(counted))))
    margin = tokens_margin(tree, Acceptance.of(truth), trials)
    assert margin == pytest.approx(1.96 * np.std(found), rel=0.15)
    assert tokens_margin(TokenTree((-1,)), Acceptance.of(truth), trials) == 0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # scipy.stats.binomtest(8, 10).proportion_ci(method="wilson")
        (0, 100, 0.0, 0.036995),
        (100, 100, 0.963005, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-5)


def test_rows_of_few_trials_are_left_out():
    """The optimizer would use the last one for all depths below it."""
    offered = [[1000, 1000], [600, 600], [0, 0]]  # nobody came to depth 2
    found = estimate_acceptance(offered, [[600, 100], [450, 30], [0, 0]])
    assert found.acceptance == [[0.6, 0.1], [0.75, 0.05]]
    few = estimate_acceptance([[150, 150], [100, 100], [99, 99], [100, 100]], [[90, 9]] * 4)
    assert [row[0] for row in few.trials] == [150, 100]
    alone = estimate_acceptance([[5, 5]], [[3, 1]])  # the root's row always stays
    assert alone.acceptance == [[0.6, 0.2]]
    with pytest.raises(CalibrationError, match="no tree was verified"):
        estimate_acceptance([[0, 0]], [[0, 0]])


@pytest.mark.parametrize(
    ("accepted", "widest", "reach"),
    [
        ([[200, 40], [100, 10]], (200, 400), 1.0),
        # An entry counts by how often it is reached: here the second row is the wider one.
        ([[399, 0], [100, 10]], (100, 200), 0.5),
    ],
)
def test_precision_is_the_widest_half_width_by_reach(accepted, widest, reach):
    low, high = wilson_interval(*widest)
    found = precision(estimate_acceptance([[400, 400], [200, 200]], accepted))
    assert found == pytest.approx((high - low) / 2 * reach, abs=1e-5)


TRUTH = np.array([0.6, 0.1, 0.05])


class DiceEngine:
    """Accepts child k of the root with probability TRUTH[k]; each tree emits a token or two."""

    def __init__(self, interrupted_by: signal.Signals | None, drafts: int) -> None:
        self._drafts = drafts
        self._rng = np.random.default_rng(0)
        self._signal = interrupted_by
        self._counts = np.zeros(3, dtype=int)
        self._trees, self._is_limited = 0, False
        self.seen: list[list[int]] = []

    def collective_rpc(self, name, args):
        if name == "sequoia_limit_drafts":  # the whole tree, so that none is a branch
            assert (args, self._trees) == ((self._drafts,), 0)
            self._is_limited = True
            return [None]
        assert name == "sequoia_stats"
        return [
            {
                "tree_steps": self._trees, "tokens": self._trees + int(self._counts.sum()),
                "offered": [[self._trees] * 3], "accepted": [self._counts.tolist()],
            }
        ]  # fmt: skip

    def generate(self, requests, params, use_tqdm):
        assert self._is_limited
        assert params.seed is None
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt  # workers in the background ignore the signal
        if self._signal is not None:
            os.kill(os.getpid(), self._signal)
        self.seen += [request["prompt_token_ids"] for request in requests]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=self._completion(params))])
            for _ in requests
        ]

    def _completion(self, params):
        tokens: list[int] = []
        while len(tokens) < params.max_tokens:
            taken = self._rng.multinomial(1, [*TRUTH, 1 - TRUTH.sum()])[:3]
            self._counts += taken
            self._trees += 1
            tokens += [1] * (1 + int(taken.sum()))
        return tokens[: params.max_tokens]


@pytest.fixture
def dice(monkeypatch):
    """Replaces vLLM, and keeps the engines made; ``signal`` comes while they generate."""
    made = SimpleNamespace(signal=None, engines=[])

    @contextmanager
    def open_engine(engine, *, seed, **options):
        [(_, _, drafts)] = options["speculative_config"]["num_speculative_tokens_per_batch_size"]
        made.engines.append(DiceEngine(made.signal, drafts))
        yield made.engines[-1]

    monkeypatch.setattr(acceptance_module, "open_engine", open_engine)
    return made


def settings_of(**given) -> AcceptanceSettings:
    options = {"branch": 3, "depth": 1, "max_tokens": 32, "batch_size": 1, **given}
    return AcceptanceSettings(EngineSpec(TARGET, DRAFT), **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_runs_until_the_precision_is_reached(dice, temperature):
    said = []
    chosen = settings_of(precision=0.05, temperature=temperature)
    found = measure_acceptance(chosen, lambda *given: said.append(given))
    state = found.calibration
    assert state.stopped_by == "precision"
    assert state.precision <= 0.05
    assert said[0] == ("starting the engine", 0, 1)
    *before, last = (float(what.split()[1].rstrip(",")) for what, _, _ in said[1:])
    assert min(before) > 0.05 >= last
    # 0.98 / sqrt(n) = 0.05 at n = 369 for p = 0.6; two completions have some 37 trees
    assert 360 < state.trees < 420
    assert np.abs(np.array(found.acceptance) - TRUTH).max() < 0.1
    assert found.temperature == temperature


@pytest.mark.parametrize(
    ("few", "temperature", "asked"), [(False, 0.0, 7), (True, 0.0, 2), (True, 0.7, 7)]
)
def test_stops_at_the_most_tokens_and_counts_greedy_completions_once(
    dice, tmp_path, few, temperature, asked
):
    """Completions are of 32. Sampled passes go round; greedy ones would repeat themselves."""
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(BUILTIN.read_text("utf-8").splitlines()[:2]), "utf-8")
    own = {"prompts": file} if few else {}
    chosen = settings_of(precision=0.001, temperature=temperature, max_tokens_total=200, **own)
    state = measure_acceptance(chosen).calibration
    assert state.stopped_by == ("prompts" if asked == 2 else "tokens")
    assert state.precision > 0.001
    encoded = encode_prompts(load_prompts(chosen.prompts), load_tokenizer(TARGET))
    assert dice.engines[0].seen == [encoded[turn % len(encoded)] for turn in range(asked)]


def test_acceptance_files_hide_where_prompts_lie(dice, tmp_path):
    prompts = tmp_path / "mine.txt"
    prompts.write_text("def f():\nclass A:\n")
    chosen = settings_of(prompts=prompts, temperature=0.7, top_p=0.9, max_tokens_total=100)
    found = measure_acceptance(chosen)
    assert "temperature 0.7, top-p 0.9" in found.description
    assert "mine.txt" in found.description
    assert (found.temperature, found.top_p) == (0.7, 0.9)
    assert found.provenance["prompts_used"] == 2
    assert str(tmp_path) not in json.dumps(found.to_dict())
    assert list(found.provenance["models"]["target"]) == ["config.json", "model.safetensors"]
    assert list(found.provenance["settings"]) == [
        "target", "draft", "prompts", "max_tokens", "temperature", "top_p", "branch", "depth",
        "precision", "max_tokens_total", "batch_size", "dtype",
        "tensor_parallel_size", "enforce_eager", "kv_cache_gib", "offload",
    ]  # fmt: skip
    assert found.provenance["settings"]["prompts"] == "mine.txt"


def test_model_hashes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert list(model_hashes(str(tmp_path))) == ["config.json"]
    assert model_hashes("org/model-never-downloaded") == {}
    assert model_hashes("/no/such/directory") == {}


@pytest.mark.usefixtures("dice")
def test_prompts_too_long_for_the_target(tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("x = 1; " * 3000 + "\nshort\n")
    found = measure_acceptance(settings_of(prompts=prompts, max_tokens_total=32))
    assert found.provenance["prompts_used"] == 1
    prompts.write_text("x = 1; " * 3000)
    with pytest.raises(CalibrationError, match="no prompt leaves room for 32 tokens"):
        measure_acceptance(settings_of(prompts=prompts))


PAIR = ("--model", TARGET, "--draft-model", DRAFT)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("library")
def test_an_interrupted_command_keeps_nothing(dice, tmp_path, number, code):
    dice.signal = number
    said = command("tune", *PAIR, code=code).stderr
    assert "interrupted: no tree was chosen" in said
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts none.jsonl", "name a file with --prompts"),
        ("--prompts none.txt", "name a file with --prompts"),
        ("--model t", "the target 't' is no folder here"),
        ("--draft-model d", "the draft 'd' is no folder here"),
        ("--tokens 1;2", "whole numbers separated by commas"),
        ("--tokens 1,2", "the largest at least 4"),
        ("--batch-sizes 0", "batch size 0"),
        ("--context 8", "too short for 32 tokens per completion; give at least 17"),
        ("--context 256,99999", "contexts [256, 99999]: the target takes"),
        ("--context 0,256", "give at least 1"),
    ],
)
@pytest.mark.usefixtures("library")
def test_friendly_errors(dice, tmp_path, monkeypatch, arguments, message):
    """Before any engine starts. Of a repeated option the last counts."""
    monkeypatch.chdir(tmp_path)
    done = command("tune", *PAIR, *arguments.split(), code=2)
    assert message in in_words(done.output)
    assert not dice.engines
    assert not list(tmp_path.rglob("*.json"))
