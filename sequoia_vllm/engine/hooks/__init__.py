"""The patches on vLLM: which of its functions are replaced in place, and by what.

They are the only ones; everything else is done by subclasses that vLLM is told to use.

Until: vLLM lets plugins register a speculative method.

May import: common, compat, core, frontend.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from sequoia_vllm.engine.common import draft_schedule
from sequoia_vllm.engine.common.settings import SequoiaSettings, is_or_will_be_tagged, is_tagged
from sequoia_vllm.engine.common.step_messages import add_fields
from sequoia_vllm.engine.compat.versions import counts_blocks_as_rows, cuts_length_to_draft
from sequoia_vllm.engine.core import prediction_option
from sequoia_vllm.engine.core.eligibility import check_options
from sequoia_vllm.engine.core.scheduling import post_step
from sequoia_vllm.engine.frontend import (
    engine_config,
    predicted_outputs,
    request,
    tree_metrics,
)

_ORIGINAL = "_sequoia_original"  # set on what replaces a function of vLLM, to that function


def install() -> None:
    """Patches vLLM, once per process."""
    # Checks the contract and refuses unsupported set-ups in the user's own process.
    _wrap(EngineArgs, "create_engine_config", engine_config.create_engine_config)
    # Translates method 'sequoia' into 'draft_model', whose scheduling trees need.
    _wrap(EngineArgs, "create_speculative_config", engine_config.create_speculative_config)
    # Parses --speculative-config as JSON, which the bare word sequoia is not.
    _wrap(EngineArgs, "add_cli_args", request.add_cli_args, static=True)
    # Refuses min_p and logit_bias with any speculation; Sequoia serves them. Until: vLLM asks the
    # speculative method.
    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    # Knows no option of ours that needs the tokenizer or the vocabulary. Until: vLLM hands a
    # request's own options to the speculative method, with its tokenizer.
    _wrap(SamplingParams, "verify", prediction_option.verify)
    _wrap(SamplingParams, "update_from_tokenizer", prediction_option.update_from_tokenizer)
    # --enable-log-requests would log a prediction's text. Until: vLLM's log leaves out extra_args.
    _wrap(SamplingParams, "__repr__", prediction_option.describe_params)
    # Makes outputs of requests that have OpenAI's field for predictions, whose usage tells their
    # counts. Until: vLLM knows the field.
    _wrap(AsyncLLM, "generate", predicted_outputs.generate)
    add_fields()
    # Asks the workers for drafts, which the step's output has brought. Until: vLLM's engine core
    # sends workers one message per step.
    _wrap(EngineCore, "post_step", post_step)
    # Adds the logger of trees; the entry points for stat loggers are for AsyncLLM only, and having
    # one turns statistics on in every engine. Until: vLLM carries a speculative method's own
    # statistics from the worker to its loggers.
    _wrap(StatLoggerManager, "__init__", tree_metrics.init_stat_logger_manager)
    logging.getLogger("vllm.config.scheduler").addFilter(tree_metrics.is_not_about_ours)
    # vLLM's log would name the method draft_model.
    _wrap(SpeculativeConfig, "__repr__", tree_metrics.describe)
    without_check = _left_out(is_or_will_be_tagged)
    # Refuses drafts with another vocabulary size, whenever a configuration is made or copied; ours
    # are mapped, where vLLM's use_heterogeneous_vocab is greedy and for V1. Until: vLLM's
    # heterogeneous vocabularies draw at any temperature, on V2 too.
    _wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", without_check)
    # Takes schedules from data-parallel engines, whose replicas would run unequal numbers of
    # drafting passes; with trees replicas draft alone. Ours fits the schedule and CUDA graph sizes
    # to the engine's limits, which are known by then. Until: vLLM asks whether the replicas draft
    # in lock step, and speculative methods for a schedule.
    _wrap(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", draft_schedule.check_schedule)
    if cuts_length_to_draft():
        # Cuts the engine's length to the draft's; ours gives requests beyond it no drafts. Until:
        # vLLM asks the speculative method whether it can stop drafting for a request.
        _wrap(VllmConfig, "_limit_max_model_len_to_draft", _left_out(SequoiaSettings.enabled))
    if counts_blocks_as_rows():
        # For block heads counts a row for each draft in the target's batch, too, which then has
        # room for fewer requests. Until: `counts_blocks_as_rows` is False of every version.
        _wrap(SpeculativeConfig, "max_num_new_slots_for_drafting", draft_schedule.drafting_slots)
    else:
        # For block heads lowers max_num_active_seqs, so that a pass has a row for each draft;
        # trees' passes need one for each level, and take part of a batch. Until: vLLM asks the
        # speculative method how many requests it drafts for.
        _wrap(VllmConfig, "_set_max_num_scheduled_tokens", draft_schedule.check_budget)
    # Makes room in each recurrent state for all drafts. Until: vLLM asks the speculative method.
    _wrap(Platform, "_align_hybrid_block_size", draft_schedule.align_states, static=True)
    # Makes a counter for each node; a path ends at the tree's depth. Until: vLLM carries a
    # speculative method's own statistics from the worker to its loggers.
    _wrap(SpecDecodingProm, "__init__", tree_metrics.init_acceptance_counters)
    # Reads metrics that are named vllm:... only; ours are sequoia:... Until: vLLM reads metrics of
    # other names.
    _wrap(LLMEngine, "get_metrics", tree_metrics.get_metrics)


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


def _left_out(is_ours: Callable[[Any], bool]) -> Callable[..., None]:
    """Replaces what vLLM does by nothing where the configuration is a Sequoia engine's."""
    return lambda original, self: None if is_ours(self) else original(self)
