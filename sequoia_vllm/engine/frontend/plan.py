"""Plans a Sequoia engine from what the user asks for and what is known.

It reads no file but tables of this package.

`engine_config` collects the facts, and applies the plan to vLLM's objects.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import Drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.tree_choice import (
    Facts,
    TreeChoice,
    choose_engine_tree,
    gain_line,
)
from sequoia_vllm.hardware import graph_sizes
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import USER_DIRECTORY_VARIABLE
from sequoia_vllm.verification.methods import usual_method

_WORKERS = {
    "cpu": "sequoia_vllm.engine.worker.worker_cpu.SequoiaCPUWorker",
    "gpu": "sequoia_vllm.engine.worker.worker_gpu.SequoiaGPUWorker",
}
# For an engine that is faster without drafts, while its other nodes may find otherwise.
PLAIN_WORKERS = {
    "cpu": "sequoia_vllm.engine.worker.worker_cpu.PlainCPUWorker",
    "gpu": "sequoia_vllm.engine.worker.worker_gpu.PlainGPUWorker",
}


@dataclass(frozen=True)
class Plan:
    """What to make of one engine."""

    config: SequoiaConfig  # what the user gave
    draft: str  # name or path of the draft
    drafter: Drafter  # what it is
    choice: TreeChoice  # the tree, its schedule and its expected gain
    settings: SequoiaSettings  # what workers need to know
    worker_cls: str  # the engine's worker
    speculative_config: dict[str, Any]  # the same for vLLM, see `_as_chain`
    notes: list[tuple[int, str]]  # lines for the log, each with its level

    @property
    def speculates(self) -> bool:
        """Whether there is anything to draft; if not, the engine decodes plainly."""
        return self.choice.tree.num_speculative_tokens > 0


def plan(config: SequoiaConfig, facts: Facts) -> Plan:
    """Chooses the tree of an engine, and all that depends on it.

    Raises:
        ConfigError: The tree is too deep for the draft, or the schedule has more drafts than the
            tree. The output layer of a head is to be trimmed, or keys are about the checkpoint of
            a draft that has none. Or the user names another worker.
    """
    kind, pair = facts.drafter, facts.pair
    if config.draft_vocabulary and kind.is_head:
        raise ConfigError(
            f'"draft_vocabulary" trims draft models, and {pair.draft!r} is {kind.name}, which has '
            "the output layer it was trained with: leave the key out"
        )
    if not kind.has_weights:
        keys = "draft_vocabulary", "quantization", "revision", "code_revision", "draft_load_config"
        if given := sorted(key for key in keys if getattr(config, key) is not None):
            raise ConfigError(
                f'"drafter": "{kind.kind}" loads no draft, and {", ".join(given)} would be the '
                f"draft's: leave {'it' if len(given) == 1 else 'them'} out"
            )
    choice = choose_engine_tree(config, facts)
    tree, levels = choice.tree, facts.levels
    if levels is not None and tree.depth > levels:
        raise ConfigError(
            f"the tree has {tree.depth} levels, and the {kind.short_name} {pair.draft!r} drafts "
            f"{levels} at most, one for each position of its block that predicts: choose a tree of "
            f'depth {levels} or less, such as "tree": {{"size": {tree.size}, "depth": {levels}}}'
        )
    rule = graph_sizes.usual_rule(facts.on_cpu)
    settings = SequoiaSettings(
        tree=tree,
        tree_source=choice.source,
        chosen_for=choice.device,
        versions=dict(facts.versions),
        context_rule=(*rule,) if rule else None,
        retrieval=config.retrieval,
        recycling=config.recycling,
        history=config.history,
        dynamic_tree=_is_dynamic(config, facts),
        verification=config.verification or usual_method(facts.on_cpu),
        adapts_as=facts.file_name if config.adapts else None,
        expected_speedup=choice.gain.speedup,
        drafter=kind.kind,
        keeps=facts.not_kept is None,
    )
    worker_cls = _worker(facts, tree.num_speculative_tokens > 0)
    chain = _as_chain(config, pair, kind, choice)
    notes = list(_notes(config, facts, choice))
    return Plan(config, pair.draft, kind, choice, settings, worker_cls, chain, notes)


def _is_dynamic(config: SequoiaConfig, facts: Facts) -> bool:
    """Whether greedy requests have dynamic trees. On Model Runner V2 only if asked for: it keeps
    tables for each request then, and no GPU has shown that they pay."""
    if config.dynamic_tree is not None:
        return config.dynamic_tree
    kind = facts.drafter
    return kind.has_weights and not kind.is_head and not facts.on_v2


def _worker(facts: Facts, speculates: bool) -> str:
    device = "cpu" if facts.on_cpu else "gpu"
    if not speculates:
        asks_others = facts.is_apart and facts.worker_cls == "auto"
        return PLAIN_WORKERS[device] if asks_others else facts.worker_cls
    if facts.worker_cls not in ("auto", _WORKERS[device]):
        raise ConfigError(
            f"worker_cls is {facts.worker_cls!r}: Sequoia brings its own worker; leave it at 'auto'"
        )
    return _WORKERS[device]


def _as_chain(
    config: SequoiaConfig, pair: PairKey, kind: Drafter, choice: TreeChoice
) -> dict[str, Any]:
    """The same as a speculative configuration of vLLM's own method for this kind of drafter.

    It schedules as trees need: look-ahead slots, the draft's layers in the KV cache, a head's
    states. A kind without weights goes as the target: nothing of it is loaded.
    """
    drafts = choice.tree.num_speculative_tokens
    # vLLM knows where the target's own layers lie, and that they are quantized alike.
    model = {"model": pair.draft if kind.has_weights else pair.target}
    if kind.is_targets_own:
        model = {}
    return {
        **config.draft_keys(),
        **model,
        "method": kind.method,
        "num_speculative_tokens": drafts,
        # A schedule is always given: without one, vLLM pads requests that join with placeholder
        # drafts, to keep CUDA graphs uniform. `plan_schedule` fits it to the engine's limits.
        "num_speculative_tokens_per_batch_size": choice.schedule or [(1, 1, drafts)],
    }


def _notes(config: SequoiaConfig, facts: Facts, choice: TreeChoice) -> Iterator[tuple[int, str]]:
    if facts.not_kept is not None and (config.adapts or config.is_tree_chosen):
        line = (
            "nothing that this engine learns is kept for its next start, and what was tuned or "
            f"kept before is used only where it can be read: {facts.not_kept}"
        )
        yield logging.WARNING, line
    if facts.is_apart and config.is_tree_chosen and not facts.shares_files:
        line = (
            "each node of this engine chooses a tree by the files in a directory of its own, and "
            "only the first node keeps anything there. So nodes will choose different trees, and "
            'a later start will be refused: give all of them the same "tree", or one directory '
            f"({USER_DIRECTORY_VARIABLE})"
        )
        yield logging.WARNING, line
    if choice.tree.num_speculative_tokens == 0:
        yield logging.INFO, f"not speculating, as plain decoding is faster ({choice.source})"
        return
    draft = facts.drafter.short_name
    if facts.drafter.has_weights:
        draft = f"{draft} {facts.pair.draft}"
    yield gain_line(
        choice.gain, draft, choice.tree.size,
        choice.tree.depth, adapts=config.adapts, on_cpu=facts.on_cpu,
    )  # fmt: skip
    yield logging.DEBUG, f"the tree was chosen so: {choice.source}"
