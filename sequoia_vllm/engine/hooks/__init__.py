"""The patches on vLLM: which of its functions are replaced in place, and by what.

They are the only ones (`ledger` says why); everything else is done by subclasses
that vLLM is told to use.

May import: common, compat, core, frontend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.spec_decode.metrics import SpecDecodingProm
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm.engine.common import draft_schedule
from sequoia_vllm.engine.common.request_options import check_options
from sequoia_vllm.engine.common.settings import is_or_will_be_tagged, is_tagged
from sequoia_vllm.engine.compat.versions import cuts_length_to_draft
from sequoia_vllm.engine.core import core_messages, draft_slots, grammar, tree_reports
from sequoia_vllm.engine.frontend import engine_config, request, vllm_counts

_ORIGINAL = "_sequoia_original"  # set on what replaces a function of vLLM, to that function


def install() -> None:
    """Patches vLLM, once per process."""
    _wrap(EngineArgs, "create_engine_config", engine_config.create_engine_config)
    _wrap(EngineArgs, "create_speculative_config", engine_config.create_speculative_config)
    _wrap(EngineArgs, "add_cli_args", request.add_cli_args, static=True)
    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    _wrap(StructuredOutputManager, "validate_tokens", grammar.validate_tokens)
    _wrap(StructuredOutputManager, "grammar_bitmask", grammar.grammar_bitmask)
    tree_reports.add_report_field()
    _wrap(Scheduler, "update_from_output", tree_reports.update_from_output)
    _wrap(Scheduler, "schedule", draft_slots.schedule)
    _wrap(EngineCore, "post_step", core_messages.post_step)
    _wrap(Scheduler, "_handle_stopped_request", draft_slots.handle_stopped_request)
    _wrap(StatLoggerManager, "__init__", tree_reports.init_stat_logger_manager)
    _wrap(SpeculativeConfig, "__repr__", vllm_counts.describe)
    _wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _verify_vocabulary_size)
    _wrap(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", draft_schedule.check_schedule)
    if cuts_length_to_draft():
        _wrap(VllmConfig, "_limit_max_model_len_to_draft", engine_config.limit_length)
    _wrap(VllmConfig, "_set_max_num_scheduled_tokens", vllm_counts.check_budget)
    _wrap(SpeculativeConfig, "max_num_new_slots_for_drafting", vllm_counts.slots_for_drafting)
    _wrap(Scheduler, "make_stats", vllm_counts.make_stats)
    _wrap(SpecDecodingProm, "__init__", vllm_counts.init_acceptance_counters)
    _wrap(LLMEngine, "get_metrics", tree_reports.get_metrics)


def is_patched() -> bool:
    """Whether this process's vLLM is patched."""
    return hasattr(EngineArgs.create_engine_config, _ORIGINAL)


def _wrap(owner: type, name: str, replacement: Callable[..., Any], static: bool = False) -> None:
    """Replaces ``owner.name`` by ``replacement(original, *args)``, unless that was done."""
    found: Any = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapped, _ORIGINAL, original)
    form = property if original is not found else staticmethod if static else None
    setattr(owner, name, form(wrapped) if form else wrapped)


def _validate_spec_decode(
    original: Callable[..., Any], self: SamplingParams, speculative_config: Any
) -> None:
    """Checks Sequoia's options instead of vLLM's rule, which refuses min_p and logit_bias."""
    if is_tagged(speculative_config):
        check_options(self)
    else:
        original(self, speculative_config)


def _verify_vocabulary_size(original: Callable[..., Any], self: SpeculativeConfig) -> None:
    """Calls vLLM's, unless the engine is Sequoia's, which maps vocabularies itself."""
    if not is_or_will_be_tagged(self):
        original(self)
