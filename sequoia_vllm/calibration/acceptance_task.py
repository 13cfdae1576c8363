"""What an acceptance measurement counts, on which prompts, and which earlier run it continues."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.counts import TAIL, probing_tree
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.library.files import CalibrationState
from sequoia_vllm.measuring.engines import EngineSpec, load_config, longest_context
from sequoia_vllm.measuring.provenance import model_hashes
from sequoia_vllm.prompts import (
    encode_prompts,
    load_prompts,
    load_tokenizer,
    prompts_sha256,
    source_name,
)
from sequoia_vllm.tree.token_tree import TokenTree
from sequoia_vllm.verification.methods import DEFAULT_METHOD


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to measure, and how.

    Attributes:
        engine: Models, and how engines run them.
        prompts: File with prompts (`load_prompts`); None: the built-in set.
        num_prompts: Prompts to use; None: all.
        raw_prompts: Give bare prompts to the target without its chat template.
        max_tokens: Tokens per completion. Make them as long as those to be served: long greedy
            texts repeat themselves, and repetition is easy to draft.
        temperature, top_p: Sampling of every request; temperature 0 is greedy.
        branch: Children offered at a node: entries of a row.
        depth: The most rows of the vector.
        precision: Stop when the vector is known this well (`counts.precision`).
        max_tokens_total: Stop when so many tokens were generated.
        batch_size: Requests at once.
        tree: Tree whose children to count; None: a probing tree of ``branch`` and ``depth``.
        verification: How sampled trees are verified, see `SequoiaConfig`.
    """

    engine: EngineSpec
    _: KW_ONLY
    prompts: Path | None = None
    num_prompts: int | None = None
    raw_prompts: bool = False
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    branch: int = 10
    depth: int = 5
    precision: float = 0.02
    max_tokens_total: int = 100_000
    batch_size: int = 8
    tree: TokenTree | None = None
    verification: str = DEFAULT_METHOD


@dataclass(frozen=True)
class AcceptanceTask:
    """A measurement that is ready to run.

    Attributes:
        settings: What to measure.
        prompts: Token ids of each prompt.
        tree: Tree that the engine drafts.
        measures: Identity of the measurement, as plain data; a run continues one of equal identity.
        name: Draft strength class of the result.
    """

    settings: AcceptanceSettings
    prompts: list[list[int]]
    tree: TokenTree
    measures: dict[str, Any]
    name: str

    @classmethod
    def prepare(cls, settings: AcceptanceSettings, name: str) -> AcceptanceTask:
        """Reads prompts and model files; starts no engine.

        Raises:
            PromptError, CalibrationError, TreeError: If they cannot be used.
        """
        engine = settings.engine
        prompts = load_prompts(settings.prompts, settings.num_prompts)
        tokenizer = load_tokenizer(engine.target)
        encoded = encode_prompts(prompts, tokenizer, raw=settings.raw_prompts)
        # This also refuses a missing draft before an engine starts.
        tail = _tail(settings.depth, load_config(engine.draft))
        tree = settings.tree or probing_tree(settings.branch, settings.depth, tail)
        # Trees must not be trimmed: leave room for a whole one after the last token.
        room = longest_context(engine.target) - tree.size
        fitting = [ids for ids in encoded if len(ids) + settings.max_tokens <= room]
        if not fitting:
            raise CalibrationError(
                f"no prompt leaves room for {settings.max_tokens} tokens in the target's context: "
                "give shorter prompts, or a smaller --max-tokens"
            )
        measures = {
            "target": engine.target,
            "draft": engine.draft,
            "target_sha256": model_hashes(engine.target),
            "draft_sha256": model_hashes(engine.draft),
            "prompts": source_name(settings.prompts),
            "prompts_sha256": prompts_sha256(prompts),
            "prompts_used": len(fitting),
            "raw_prompts": settings.raw_prompts,
            "temperature": settings.temperature,
            "top_p": settings.top_p if settings.temperature > 0 else None,
            "max_tokens": settings.max_tokens,
            "branch": settings.branch,
            "depth": settings.depth,
            "dtype": engine.dtype,
        }
        if settings.tree is None:
            measures["tail"] = tail
        else:
            measures["tree"] = list(settings.tree.parents)
            measures["verification"] = settings.verification
        return cls(settings, fitting, tree, measures, name)

    def differences(self, state: CalibrationState) -> list[str]:
        """Names of the settings that an earlier measurement had otherwise; empty: the same."""
        keys = self.measures.keys() | state.measures.keys()
        return sorted(k for k in keys if self.measures.get(k) != state.measures.get(k))

    def is_done(self, state: CalibrationState) -> bool:
        """True if an earlier run of this measurement already meets these settings."""
        if not state.complete:
            return False
        reached = state.precision is not None and state.precision <= self.settings.precision
        used_up = state.stopped_by == "tokens" and (
            state.most_tokens >= self.settings.max_tokens_total
        )
        return reached or used_up or state.stopped_by == "prompts"

    def can_go_on(self, state: CalibrationState) -> bool:
        """True if an earlier run of this measurement can be continued.

        A finished greedy run cannot: its completions are not kept.
        """
        return not state.complete or self.settings.temperature > 0


def class_name(text: str) -> str:
    """Turns ``text`` into the name of a draft strength class."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "measured"


def _tail(depth: int, draft: Any) -> int:
    """Levels to draft below the counted ones, as far as the draft (by its config) can."""
    from sequoia_vllm.engine.frontend.drafts import drafted_levels

    levels = drafted_levels(draft)
    return TAIL if levels is None else max(0, min(TAIL, levels - depth))
