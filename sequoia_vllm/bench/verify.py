"""Runs the engines of `sequoia-vllm verify` one after the other, and sums up what they showed.

The engine under test drafts whole trees, whatever pays. Then it runs without CUDA graphs, and then
as a server runs it. Plain vLLM runs last, as it scores what all others answered. No two engines are
alive together, so a target may take the whole device.
"""

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from sequoia_vllm.bench.engines import speculative_config
from sequoia_vllm.bench.measure import BenchRuns, EngineCase, MethodRuns, run_round
from sequoia_vllm.bench.methods import PLAIN, Kind, Method
from sequoia_vllm.bench.report import Result, chain_samples_wrongly, results
from sequoia_vllm.bench.verify_engine import (
    TOGETHER,
    Traffic,
    VerifyEngine,
    open_verified,
)
from sequoia_vllm.bench.verify_law import DRAFT, Samples, draft_options, laws, scored_samples
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.measuring.engines import EngineSpec, Progress, longest_context
from sequoia_vllm.measuring.provenance import model_hashes, provenance
from sequoia_vllm.tree import MOST_NODES
from sequoia_vllm.verifying.answers import Compared, Rounding, Scored, compare, measure_rounding
from sequoia_vllm.verifying.report import (
    Check,
    Outcome,
    Trees,
    VerifyModel,
    VerifyReport,
    check_answers,
    check_drafted,
    check_graphs,
    check_laws,
    check_memory,
    verdict_of,
)

Opener = Callable[[Method, Mapping[str, Any]], AbstractContextManager[VerifyEngine]]
"""Starts an engine, like `open_verified`."""
_MOST_DRAFTS = MOST_NODES - 1
_ROOM = 1024  # tokens of a request besides its prompt: a preface, two answers, a tree
_REQUESTS = 16  # at once, where the user gives no --max-num-seqs
ALONE, BATCH, TRAFFIC = "answers, one at a time", "answers in a batch", "answers under traffic"
WITHOUT, SERVED = "without graphs", "as served"


@dataclass(frozen=True)
class VerifySettings:
    """What to check, and how much of it."""

    target: str
    draft: str
    _: KW_ONLY
    config: dict[str, Any]  # the speculative configuration of a server
    options: dict[str, Any]  # other arguments of ``vllm.LLM``, as the user gave them
    chain: Method | None  # vLLM's own chain, for its speed; None: there is none
    prompts: tuple[list[int], ...]  # token ids
    max_tokens: int = 64  # of each greedy answer
    samples: int = 8  # answers to each prompt at temperature 1
    sampled_tokens: int = 16  # of each
    rounds: int = 2  # of speed
    speed_sizes: tuple[int, ...] = (1, TOGETHER)  # requests at once

    def engine_options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that all engines share."""
        longest = max(map(len, self.prompts)) + _ROOM + 2 * self.max_tokens
        usual = {
            "max_model_len": min(longest, longest_context(self.target)),
            "max_num_seqs": _REQUESTS, "seed": 0,
        }  # fmt: skip
        return {**usual, **self.options, "model": self.target, "max_logprobs": -1}

    def whole_trees(self) -> Method:
        """The engine under test: it drafts whole trees at every batch size."""
        config = {**self.config, "adapt": False}
        if config.get("tree") in (None, "auto"):
            config.pop("tree", None)
            config["num_speculative_tokens_per_batch_size"] = [[1, 1, _MOST_DRAFTS]]
        return Method("Sequoia, whole trees", Kind.SEQUOIA, config, _MOST_DRAFTS)

    def served(self) -> Method:
        """The engine as a server runs it."""
        return Method("Sequoia", Kind.SEQUOIA, self.config, _MOST_DRAFTS)


@dataclass
class Found:
    """What the engines showed so far."""

    observed: dict[str, tuple[list[list[int]], list[list[int]]]] = field(default_factory=dict)
    """Prompts and greedy answers by how they were made."""
    trees: dict[str, Trees] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    sampled: list[list[int]] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    runs: dict[EngineCase, list[MethodRuns]] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    dtype: str = "?"
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note_answers(self, what: str, prompts: Sequence[list[int]], found: list[Scored]) -> None:
        """Keeps answers of an engine that is to be compared."""
        self.observed[what] = (list(prompts), [list(answer.tokens) for answer in found])

    def note_traffic(self, what: str, found: Traffic) -> None:
        """Keeps answers to requests that came and went."""
        self.observed[what] = (found.prompts, found.answers)
        self.traffic[what] = found

    def note_trees(self, what: str, engine: VerifyEngine) -> None:
        """Keeps the engine's counters since they were last taken."""
        counters = engine.take_counters()
        if counters is not None:
            self.trees[what] = Trees(trees=counters["tree_steps"], tokens=counters["tokens"])


class Verification:
    """One run of all checks."""

    def __init__(
        self, settings: VerifySettings, progress: Progress | None = None,
        opener: Opener | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.found = Found()
        self._report = progress or (lambda what, done, total: None)
        self._open = opener or open_verified
        self._options = settings.engine_options()
        self._has_graphs = not self._options.get("enforce_eager", False)
        self._done, self._total = 0, 4 + (settings.chain is not None) + 2 * self._has_graphs

    def run(self) -> VerifyReport:
        """Runs all engines in turn.

        Raises:
            CalibrationError: vLLM cannot start one of ours, or plain.
        """
        settings, found = self.settings, self.found
        with self._engine(settings.whole_trees()) as engine:
            self._check_whole_trees(engine)
        if self._has_graphs:
            with self._engine(settings.whole_trees(), WITHOUT) as engine:
                self._answer_together(engine, f", {WITHOUT}")
        with self._engine(settings.served()) as engine:
            self._time(engine)
            self._say("requests that come and go")
            found.note_traffic(f"{TRAFFIC}, {SERVED}", self._traffic(engine))
        if settings.chain is not None:
            self._run_chain(settings.chain)
        ways: dict[str, list[Scored]] = {}
        if self._has_graphs:
            with self._engine(PLAIN, WITHOUT) as engine:
                self._say("answers in a batch")
                ways[WITHOUT] = self._answers(engine, TOGETHER)
        with self._engine(PLAIN) as engine:
            rounding, answers, samples = self._compare(engine, ways)
        return self._conclude(rounding, answers, samples)

    @contextmanager
    def _engine(
        self, method: Method, how: str = "", own: Mapping[str, Any] | None = None
    ) -> Iterator[VerifyEngine]:
        name = f"{method.name}, {how}" if how else method.name
        options = own or ({**self._options, "enforce_eager": True} if how else self._options)
        begun = time.monotonic()
        self._engine_name = name
        self._say("starting")
        with self._open(method, options) as engine:
            yield engine
        self._done += 1
        self.found.seconds[name] = round(time.monotonic() - begun, 1)

    def _say(self, what: str) -> None:
        self._report(f"{self._engine_name}: {what}", self._done, self._total)

    def _answers(self, engine: VerifyEngine, batch: int) -> list[Scored]:
        return engine.answer(self.settings.prompts, self.settings.max_tokens, batch)

    def _traffic(self, engine: VerifyEngine) -> Traffic:
        return engine.come_and_go(self.settings.prompts[:TOGETHER], self.settings.max_tokens)

    def _check_whole_trees(self, engine: VerifyEngine) -> None:
        found, prompts = self.found, self.settings.prompts
        found.limits = dict(engine.limits())
        found.limits["tree"] = {"nodes": engine.most_nodes}
        engine.take_counters()  # drops the start's
        self._say(ALONE)
        found.note_answers(ALONE, prompts, self._answers(engine, 1))
        found.note_trees(ALONE, engine)
        before = engine.memory()
        self._answer_together(engine)
        self._say("sampled answers")
        length = self.settings.sampled_tokens
        found.sampled = engine.sample(prompts, self.settings.samples, length)
        found.note_trees("sampled answers", engine)
        after = engine.memory()
        found.memory = {name: [used, after[name]] for name, used in before.items()}

    def _answer_together(self, engine: VerifyEngine, how: str = "") -> None:
        found = self.found
        engine.take_counters()
        self._say(BATCH)
        found.note_answers(BATCH + how, self.settings.prompts, self._answers(engine, TOGETHER))
        found.note_trees(BATCH + how, engine)
        self._say("requests that come and go")
        found.note_traffic(TRAFFIC + how, self._traffic(engine))
        found.note_trees(TRAFFIC + how, engine)

    def _run_chain(self, chain: Method) -> None:
        settings = self.settings
        spec = EngineSpec(settings.target, settings.draft)
        config = speculative_config(chain, spec)
        own = Method(chain.name, chain.kind, config, chain.most_drafts)
        try:
            with self._engine(own) as engine:
                self._time(engine)
        except CalibrationError as error:
            self._done += 1
            said = str(error).splitlines()[0]
            self.found.notes.append(f"vLLM's own {chain.name} did not run: {said}")

    def _time(self, engine: VerifyEngine) -> None:
        settings = self.settings
        most = min(len(settings.prompts), engine.limits()["max_num_seqs"])  # that run at once
        for size in sorted({min(size, most) for size in settings.speed_sizes}):
            self._say(f"speed of {size} at once")
            case = EngineCase(size, 0.0)
            prompts = settings.prompts[: max(size, 4)]
            engine.generate(prompts[:size], 0.0, 16)  # warms up
            rounds = [
                run_round(engine, prompts, case, settings.max_tokens)
                for _ in range(settings.rounds)
            ]
            drafts = engine.drafts(size)
            runs = MethodRuns(engine.method, engine.tree, drafts, rounds)
            self.found.runs.setdefault(case, []).append(runs)
            if engine.method.kind is Kind.SEQUOIA:
                what = f"answers {SERVED}, {size} at once"
                self.found.observed[what] = (list(prompts), rounds[-1].token_ids)

    def _compare(
        self, engine: VerifyEngine, ways: dict[str, list[Scored]]
    ) -> tuple[Rounding, list[Compared], list[Samples]]:
        """Plain vLLM's own answers, those of all others beside them, and samples with scores."""
        settings, found = self.settings, self.found
        found.dtype = engine.dtype
        self._time(engine)
        self._say(ALONE)
        ways = {ALONE: self._answers(engine, 1), BATCH: self._answers(engine, TOGETHER), **ways}
        self._say("scoring answers")
        scored = {
            name: self._scored(engine, settings.prompts, [list(one.tokens) for one in answers])
            for name, answers in ways.items()
        }
        both = {**ways, **{f"{name}, scored": answers for name, answers in scored.items()}}
        rounding = measure_rounding(both)
        expected: dict[tuple[int, ...], Scored] = {
            tuple(prompt): answer
            for prompt, answer in zip(settings.prompts, ways[ALONE], strict=True)
        }
        answers = []
        for what, (prompts, given) in found.observed.items():
            length = len(given[0]) if given else 0
            new = [prompt for prompt in prompts if tuple(prompt) not in expected]
            for prompt, answer in zip(
                new, engine.answer(new, settings.max_tokens, TOGETHER), strict=True
            ):
                expected[tuple(prompt)] = answer
            plain = [expected[tuple(prompt)] for prompt in prompts]
            ours = self._scored(engine, prompts, given)
            answers.append(compare(what, ours, plain, settings.max_tokens if length else 0))
        self._say("scoring samples")
        own = engine.sample(settings.prompts, settings.samples, settings.sampled_tokens)
        sampled = {"Sequoia": found.sampled, "plain vLLM": own}
        samples = scored_samples(engine, settings.prompts, settings.samples, sampled)
        return rounding, answers, samples

    def _conclude(
        self, rounding: Rounding, answers: list[Compared], samples: list[Samples]
    ) -> VerifyReport:
        settings, found = self.settings, self.found
        law, notes = laws(
            samples, settings.samples, settings.target, settings.draft,
            lambda: self._engine(DRAFT, own=draft_options(settings.draft, self._options)),
        )  # fmt: skip
        found.notes += notes
        return self._summed_up(
            checks=[
                *check_answers(rounding, answers),
                check_laws(*law),
                check_graphs(*self._trees_by_graphs()),
                check_drafted(found.trees),
                self._traffic_check(),
                check_memory(found.memory),
            ],
            rounding=rounding,
            answers=answers,
            law=law,
        )

    @staticmethod
    def _scored(
        engine: VerifyEngine, prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> list[Scored]:
        pairs = zip(prompts, answers, strict=True)
        return [engine.score(prompt, answer, 2) for prompt, answer in pairs]

    def _trees_by_graphs(self) -> tuple[Trees, Trees | None]:
        trees = self.found.trees

        def joined(how: str) -> Trees:
            parts = [trees.get(name + how, Trees(trees=0, tokens=0)) for name in (BATCH, TRAFFIC)]
            return Trees(
                trees=sum(part.trees for part in parts), tokens=sum(part.tokens for part in parts)
            )

        return joined(""), joined(f", {WITHOUT}") if self._has_graphs else None

    def _traffic_check(self) -> Check:
        found = list(self.found.traffic.values())
        what = {
            "aborts": sum(one.aborted for one in found),
            "preemptions": sum(one.preemptions for one in found),
            "tokens found in the prefix cache": sum(one.prefix_hits for one in found),
        }
        said = ", ".join(f"{number:,} {name}" for name, number in what.items())
        if not self.found.limits["prefix_caching"]:
            what.popitem()
            said += " (it is off)"
        lacking = [name for name, number in what.items() if not number]
        outcome = Outcome.UNTOLD if lacking else Outcome.PASSED
        return Check(name="traffic had all kinds", outcome=outcome, said=said)

    def _summed_up(self, checks: list[Check], **concluded: Any) -> VerifyReport:
        settings, found = self.settings, self.found
        plain_first = {case: [*runs[-1:], *runs[:-1]] for case, runs in found.runs.items()}
        speed = results(BenchRuns(found.dtype, plain_first), chain_is_wrong=chain_samples_wrongly())
        stated = provenance()
        stated.pop("argv")  # it may name the user's folders
        config = {key: _shown(value) for key, value in settings.config.items()}
        given = {name: _shown(value) for name, value in settings.options.items()}
        return VerifyReport(
            date=datetime.datetime.now(datetime.UTC).date(),
            device=stated["device"],
            devices=found.limits.get("tensor_parallel_size", 1),
            target=_model(settings.target),
            draft=_model(settings.draft),
            options={"given": given, "speculative_config": config, **found.limits},
            speed=[result.to_dict() for result in speed],
            memory=found.memory,
            seconds=found.seconds,
            notes=found.notes,
            provenance=stated,
            verdict=verdict_of(checks),
            checks=checks,
            **concluded,
        )


def _shown(value: Any) -> Any:
    """A value as JSON has it; of a path only its last part."""
    if isinstance(value, dict):
        return {str(key): _shown(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(one) for one in value]
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    text = str(value)
    return Path(text).name if Path(text).is_absolute() or Path(text).exists() else text


def _model(model: str) -> VerifyModel:
    return VerifyModel(name=str(_shown(model)), hashes=model_hashes(model), classes=_classes(model))


def _classes(model: str) -> list[str]:
    from sequoia_vllm.measuring.engines import load_config

    try:
        return [str(name) for name in load_config(model).architectures or ()]
    except CalibrationError:  # a draft without a model
        return []


def speeds(report: VerifyReport) -> list[Result]:
    """The report's rows of speed, as `bench` has them."""
    return [Result.model_validate(row) for row in report.speed]
