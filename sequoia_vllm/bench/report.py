"""A whole comparison: measured, summed up with its provenance, as a file and as a picture."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

from pydantic import Field

from sequoia_vllm.bench.engines import PARTS
from sequoia_vllm.bench.measure import (
    BenchRuns,
    BenchSettings,
    EngineCase,
    GreedyCheck,
    MethodRuns,
    Opener,
    measure,
    pooled,
)
from sequoia_vllm.bench.methods import Kind
from sequoia_vllm.figures import GREY, colour_of, draw_grid, legend_of, new_figure, save_figure
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.measuring.engines import Progress
from sequoia_vllm.measuring.provenance import model_hashes, provenance, synthetic_origin

MOST_SPREAD = 1.15
"""Rounds disagree if highest / lowest exceeds this: something disturbed the machine."""

LEAST_DRAFTED = 0.01
"""Trees per step below which an engine counts as plain: adaptation tries drafting now and then."""
MOST_TRIED, NOTHING_GAINED = 0.25, 1.005
"""Trees per step, and tokens per step, below which an engine drafted in probes alone: a short
measurement holds one or two, of some 24 trees each."""
# Environment variables that change speed on CPUs.
_ENVIRONMENT = (
    "LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_SGL_KERNEL", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
CHAIN_SAMPLES_WRONGLY = (
    "vLLM's chain samples wrongly at temperatures above 0 on CPUs without Triton "
    "(vllm-project/vllm#55005). Its tokens are not the target's, and it accepts fewer drafts than "
    "it should. So its speed there says nothing of vLLM's chain elsewhere"
)
DECLINED = "the engine chose not to speculate here"


class Spread(FileModel):
    """Median and range of a value over several rounds."""

    median: float = Field(description="Over rounds.")
    low: float = Field(description="The lowest round's.")
    high: float = Field(description="The highest round's.")

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Sums up one value per round, at least one."""
        return cls(median=median(values), low=min(values), high=max(values))

    @property
    def in_words(self) -> str:
        """The range of a speedup, like ``1.06x to 1.32x``."""
        return f"{self.low:.2f}x to {self.high:.2f}x"


class StepSplit(FileModel):
    """Mean seconds of each part of a step, over steps in which the whole batch decodes."""

    target: float = Field(ge=0, description="The target's forward pass, LM head included.")
    draft: float = Field(ge=0)
    """The draft's forward passes, LM head included; for a chain on V2 all drafting."""
    drawing: float = Field(ge=0)  # the rest of drafting: choosing children, preparing the passes
    verify: float = Field(ge=0, description="Verification and commit; plain vLLM's: sampling.")
    other: float = Field(description="The rest: scheduling, preparing inputs, output, transport.")

    @property
    def outside(self) -> float:
        """Seconds outside both models' forward passes."""
        return self.drawing + self.verify + self.other


class Result(FileModel):
    """One method at one batch size and temperature."""

    method: str
    kind: Kind
    batch_size: int = Field(ge=1)
    temperature: float = Field(ge=0)
    drafts: int = Field(ge=0, description="Drafts per request and step; 0: no speculation.")
    depth: int = Field(ge=0, description="Depth of the drafts: a chain's length, a tree's depth.")
    tokens_per_second: Spread  # tokens of the whole batch while all of it decodes, without prompts
    speedup: Spread = Field(description="Speed relative to plain vLLM in the same round.")
    tokens_per_step: float = Field(ge=0, description="Tokens per request and step of all rounds.")
    step_seconds: float = Field(gt=0, description="Mean of all rounds.")
    split: StepSplit
    best_chain: bool = Field(
        default=False, description="The chain with the highest median speedup here."
    )
    note: str | None = Field(default=None, description="Remark that belongs to this number.")
    drafted: float | None = Field(default=None, ge=0)
    """Sequoia's trees per request and step; none: another method."""

    @property
    def is_plain(self) -> bool:
        """Whether Sequoia drafted nothing: it ran plain vLLM, and its speedup is noise."""
        return self.drafted is not None and self.drafted < LEAST_DRAFTED

    @property
    def speed_in_words(self) -> str:
        """The speedup with its range; ``= plain`` where nothing was drafted, but for probes."""
        if self.is_plain:
            return "= plain"
        said = f"{self.speedup.median:.2f}x ({self.speedup.in_words})"
        few = self.drafted is not None and self.drafted < MOST_TRIED
        return f"{said} = plain" if few and self.tokens_per_step < NOTHING_GAINED else said


class BenchModel(FileModel):
    """A model of the pair."""

    name: str = Field(min_length=1)
    hashes: dict[str, str] = Field(description="SHA-256 of its files, where they are local.")
    grown_from: dict[str, Any] | None = None  # origin of a synthetic target; none: ordinary


class BenchReport(FileModel):
    """A whole comparison."""

    schema_: Literal["sequoia-vllm/bench/v1"] = "sequoia-vllm/bench/v1"
    date: datetime.date
    device: str = Field(min_length=1)
    target: BenchModel
    draft: BenchModel
    dtype: str
    settings: dict[str, Any] = Field(description="As given, with the prompts' name and hash.")
    results: list[Result] = Field(min_length=1)
    greedy: GreedyCheck | None = None  # None: no greedy outputs were asked for
    notes: list[str] = Field(description="Remarks that belong to all numbers.")
    provenance: dict[str, Any]  # arguments, time, versions, CPU, git revision, environment


def disagreement(results: Sequence[Result]) -> str | None:
    """Warns of methods whose speedup differs too much between rounds; None: there are none."""
    disturbed = "; ".join(
        f"{one.method} at T={one.temperature:g}, batch {one.batch_size}: {one.speedup.in_words}"
        for one in results
        if one.speedup.high > MOST_SPREAD * one.speedup.low
    )
    if not disturbed:
        return None
    return (
        f"rounds disagree by more than {MOST_SPREAD - 1:.0%} ({disturbed}): something "
        "else ran on this machine; repeat the command when it is quiet"
    )


def shown(results: Sequence[Result]) -> list[Result]:
    """Selects the results that pictures show: all but the slower ones of vLLM's chains."""
    return [result for result in results if result.kind is not Kind.CHAIN or result.best_chain]


def plot_speeds(report: BenchReport, path: Path) -> None:
    """Draws tokens/s of a request by batch size, with a panel for each temperature: medians of
    rounds, from the lowest to the highest; of vLLM's chains only the fastest."""
    temperatures = sorted({result.temperature for result in report.results})
    sizes = sorted({result.batch_size for result in report.results})
    figure, panels = new_figure(1.2 + 3.4 * len(temperatures), 3.5, len(temperatures))
    lines: dict[str, list[Result]] = {}
    for result in shown(report.results):
        name = "vLLM's best chain" if result.kind is Kind.CHAIN else legend_of(result.method)
        lines.setdefault(name, []).append(result)
    kinds = [results[0].kind for results in lines.values()]
    for number, (name, results) in enumerate(lines.items()):
        colour = colour_of(kinds[number], kinds[:number].count(kinds[number]))
        shift = 0.06 * (number - (len(lines) - 1) / 2)
        for axes, temperature in zip(panels, temperatures, strict=True):
            of_panel = [result for result in results if result.temperature == temperature]
            rates = [(one.tokens_per_second, one.batch_size) for one in of_panel]
            axes.errorbar(
                [sizes.index(one.batch_size) + shift for one in of_panel],
                [rate.median / size for rate, size in rates],
                yerr=[[(rate.median - rate.low) / size for rate, size in rates],
                      [(rate.high - rate.median) / size for rate, size in rates]],
                color=colour, label=name, marker="o", markersize=4, elinewidth=1.2, capsize=3,
            )  # fmt: skip
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes, temperature in zip(panels, temperatures, strict=True):
        title = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xticks(range(len(sizes)), labels=[str(size) for size in sizes])
        axes.set_xlabel("requests at once")
        axes.set_ylim(0, top)
        draw_grid(axes, "y")
    panels[0].set_ylabel("tokens/s of a request")
    panels[-1].legend(frameon=False, fontsize=9.5)
    said = "; synthetic target" if report.target.grown_from else ""
    # A folder's own name is often no more than "target".
    paths = (Path(model.name).parts[-2:] for model in (report.target, report.draft))
    names = " with ".join(map("/".join, paths))
    figure.supxlabel(f"{names}, {report.dtype}{said}\n{report.device}", fontsize=8, color=GREY)
    save_figure(figure, path)


def run_bench(
    settings: BenchSettings,
    described: dict[str, Any],
    progress: Progress | None = None,
    opener: Opener | None = None,
) -> BenchReport:
    """Measures, and sums it up; the report shows the settings as ``described``. See `measure`."""
    engine = settings.engine
    found = measure(settings, progress, opener)
    stated = provenance(
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    target, draft = (
        BenchModel(name=name, hashes=model_hashes(name), grown_from=synthetic_origin(name))
        for name in (engine.target, engine.draft)
    )
    summed = results(found, chain_is_wrong=chain_samples_wrongly())
    synthetic = [synthetic_note(model) for model in (target, draft)]
    return BenchReport(
        date=datetime.datetime.now(datetime.UTC).date(),
        device=stated["device"],
        target=target,
        draft=draft,
        dtype=found.dtype,
        settings=described,
        results=summed,
        greedy=found.greedy,
        notes=[note for note in (*synthetic, disagreement(summed)) if note is not None],
        provenance=stated,
    )


def results(found: BenchRuns, *, chain_is_wrong: bool) -> list[Result]:
    """Results of each method in each case."""
    summed = []
    for case, runs in found.runs.items():
        of_case = []
        for one in runs:
            is_chain = one.method.kind is Kind.CHAIN
            wrong = chain_is_wrong and is_chain and case.temperature > 0
            of_case.append(_result(case, one, runs[0], wrong))
        # By what the table and the demo's last sentence say.
        chains = [one for one in of_case if one.kind is Kind.CHAIN]
        best = max(chains, key=lambda one: one.speedup.median, default=None)
        summed += [one.model_copy(update={"best_chain": one is best}) for one in of_case]
    return summed


def _rates(runs: MethodRuns) -> list[float]:
    return [one.steady.tokens_per_second for one in runs.rounds]


def _result(case: EngineCase, runs: MethodRuns, plain: MethodRuns, wrong: bool) -> Result:
    rates, kind = _rates(runs), runs.method.kind
    steady = pooled([one.steady for one in runs.rounds])
    steps = max(1, sum(one.parts["steps"] for one in runs.rounds))
    parts = {part: sum(one.parts[part] for one in runs.rounds) / steps for part in PARTS}
    depth = 0 if runs.tree is None else runs.tree.trim(runs.drafts + 1).depth
    trees = sum(one.counters["tree_steps"] for one in runs.rounds if one.counters)
    declined = kind is Kind.SEQUOIA and runs.drafts == 0
    return Result(
        method=runs.method.name,
        kind=kind,
        batch_size=case.batch_size,
        temperature=case.temperature,
        drafts=runs.drafts,
        depth=runs.drafts if kind is Kind.CHAIN else depth,
        tokens_per_second=Spread.of(rates),
        speedup=Spread.of([rate / base for rate, base in zip(rates, _rates(plain), strict=True)]),
        tokens_per_step=steady.tokens_per_step,
        step_seconds=steady.step_seconds,
        split=StepSplit(**parts, other=steady.step_seconds - sum(parts.values())),
        note=CHAIN_SAMPLES_WRONGLY if wrong else DECLINED if declined else None,
        drafted=trees / (steady.steps * case.batch_size) if kind is Kind.SEQUOIA else None,
    )


def synthetic_note(model: BenchModel) -> str | None:
    """Note beside figures of a synthetic target; None: an ordinary model."""
    if (origin := model.grown_from) is None:
        return None
    return (
        f"{model.name} is a synthetic target made from {origin.get('from')}: "
        f"{origin.get('layers')} layers, MLP width {origin.get('intermediate_size')}. It computes "
        "what the small model does: speeds are those of a larger model whose draft is accepted as "
        "often as the small pair's."
    )


def chain_samples_wrongly() -> bool:
    """Whether vllm-project/vllm#55005 applies: a CPU build without Triton."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return bool(current_platform.is_cpu() and not HAS_TRITON)
