"""Turns vLLM's engine arguments into its configuration of a Sequoia engine."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.engine.common.cluster import (
    are_started_apart,
    current_device_name,
    current_versions,
)
from sequoia_vllm.engine.common.draft_schedule import IS_USERS
from sequoia_vllm.engine.common.patched import known, patched
from sequoia_vllm.engine.common.settings import DECLINED, TO_BE_TAGGED, SequoiaSettings
from sequoia_vllm.engine.compat.contract import check_contract
from sequoia_vllm.engine.core.scheduling import TreeScheduling, before_users
from sequoia_vllm.engine.core.scheduling_ahead import TreeSchedulingAhead
from sequoia_vllm.engine.frontend.draft_choice import find_draft
from sequoia_vllm.engine.frontend.drafts import (
    DraftReader,
    check_method,
    draft_problem,
    kinds_here,
    runs_v2,
)
from sequoia_vllm.engine.frontend.plan import Plan, plan
from sequoia_vllm.engine.frontend.refusals import (
    asks_for_fp8_cache,
    kinds_in_vllm,
    refuse_model,
    refuse_unsupported,
)
from sequoia_vllm.engine.frontend.request import sequoia_request, short_in_commands
from sequoia_vllm.engine.frontend.tree_choice import Facts, look_up
from sequoia_vllm.engine.offload import (
    choose_offloading,
    is_offloaded,
    weight_source,
    with_offload,
    with_streamed,
)
from sequoia_vllm.engine.runner.cpu_linear import choose_linear_layers
from sequoia_vllm.engine.runner.vocabulary import TokensOf, compare_vocabularies, tokens_to_draft
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import USER_DIRECTORY_VARIABLE, reason_not_to_keep
from sequoia_vllm.tree import MOST_RECURRENT_NODES

logger = logging.getLogger("vllm.sequoia")


def create_engine_config(
    original: Callable[..., Any], self: EngineArgs, *args: Any, **kwargs: Any
) -> Any:
    """Checks the contract, calls vLLM's, then refuses unsupported set-ups.

    Raises:
        SequoiaError: We cannot do it. vLLM's own commands print a line, and end with exit code 2.
    """
    with short_in_commands():
        request = sequoia_request(self)
        if request is None:
            vllm_config = original(self, *args, **kwargs)
        else:
            vllm_config = _sequoia_engine_config(original, request, self, *args, **kwargs)
        choose_offloading(vllm_config)
        return vllm_config


def _sequoia_engine_config(
    original: Callable[..., Any], request: dict[str, Any], self: EngineArgs, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    check_contract()
    self.speculative_config = request
    self.spec_method = self.spec_model = self.spec_tokens = None
    is_users = request.get("num_speculative_tokens_per_batch_size") is not None
    with known(IS_USERS, is_users):
        vllm_config = original(self, *args, **kwargs)
    if SequoiaSettings.declined(vllm_config):
        return vllm_config
    if not SequoiaSettings.enabled(vllm_config):
        raise ConfigError(
            f"the checkpoint {self.model!r} brings its own speculator, which replaces the "
            "speculative config: serve its target model by name instead"
        )
    refuse_unsupported(vllm_config)
    scheduler = vllm_config.scheduler_config
    if not vllm_config.use_v2_model_runner:
        # vLLM's V1 proposer takes drafts whose layers lie in one KV cache group. Layers with a
        # window then share it with others, which costs memory: tokens before windows are kept.
        scheduler.disable_hybrid_kv_cache_manager = True
        if not is_offloaded(vllm_config):  # it hands layers weights from elsewhere
            choose_linear_layers(vllm_config)
    _choose_scheduler(scheduler)
    return vllm_config


def _choose_scheduler(config: Any) -> None:
    """Names our scheduler, before a class of the user's own, which must derive from vLLM's."""
    ours = TreeSchedulingAhead if config.async_scheduling else TreeScheduling
    users = config.scheduler_cls
    if users is None:
        config.scheduler_cls = f"{ours.__module__}.{ours.__name__}"
        return
    found = resolve_obj_by_qualname(users) if isinstance(users, str) else users
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(
            f"scheduler_cls is {users!r}, which does not derive from vLLM's "
            f"{Scheduler.__module__}.{Scheduler.__name__}, as a scheduler of trees must: derive "
            "it, or leave scheduler_cls out"
        )
    config.scheduler_cls = partial(before_users, ours, found)


def create_speculative_config(
    original: Callable[..., Any], self: EngineArgs, target_model_config: Any,
    target_parallel_config: Any,
) -> Any:  # fmt: skip
    """Calls vLLM's, with Sequoia translated; None for an engine that does not speculate.

    Raises:
        SequoiaError: The user's configuration is wrong, or trees cannot serve these models.
    """
    request = sequoia_request(self)
    if request is None:
        return original(self, target_model_config, target_parallel_config)
    refuse_model(target_model_config, "target")
    config = SequoiaConfig.parse(request).loaded()
    self.additional_config = with_offload(self.additional_config, config.offload)
    planned = plan(config, collect_facts(config, self, target_model_config, target_parallel_config))
    return apply(planned, original, self, target_model_config, target_parallel_config)


def collect_facts(config: SequoiaConfig, args: EngineArgs, target: Any, parallel: Any) -> Facts:
    """Finds out all that a plan depends on; refuses an engine for which there is no draft."""
    source = weight_source(args)
    reader = DraftReader(target, config)
    kinds = kinds_here()
    if config.drafter is None and config.draft_vocabulary:  # not for heads
        kinds = [kind for kind in kinds if not kind.is_head]
    name, kind = find_draft(config, target.model, kinds, reader.kind, reader.own_layer)
    pair = PairKey(
        device=current_device_name(),
        target=target.model,
        draft=name,
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel_size=parallel.tensor_parallel_size,
        offloading=source.name if source else None,
    )
    shapes = None
    if kind.has_weights and config.is_tree_chosen:
        has_fp8_cache = args.kv_cache_dtype.startswith("fp8") or asks_for_fp8_cache(target)
        shapes = with_streamed(reader.shapes(name, kind, has_fp8_cache), source, pair)
    return Facts(
        pair,
        kind,
        reader.levels(name, kind),
        MOST_RECURRENT_NODES if "hybrid" in kinds_in_vllm(target) else None,
        look_up(config, pair, shapes),
        max_model_len=target.max_model_len,
        file_name=pair.file_name,
        on_cpu=current_platform.is_cpu(),
        on_v2=runs_v2(),
        worker_cls=parallel.worker_cls,
        versions=current_versions(),
        not_kept=reason_not_to_keep(),
        is_apart=are_started_apart(parallel, target.is_moe),
        shares_files=USER_DIRECTORY_VARIABLE in os.environ,
    )


def apply(
    planned: Plan, create: Callable[..., Any], args: EngineArgs, target: Any, parallel: Any
) -> Any:
    """Makes vLLM's configuration of a plan (None: no speculation), and changes its other objects.
    It refuses a draft that vLLM or trees cannot use."""
    for level, line in planned.notes:
        logger.log(level, "Sequoia: %s", line)
    parallel.worker_cls = planned.worker_cls
    if not planned.speculates:
        args.additional_config = {**(args.additional_config or {}), DECLINED: True}
        return None
    translated = copy(args)
    translated.speculative_config = dict(planned.speculative_config)
    read_as: AbstractContextManager[None] = nullcontext()
    if not planned.drafter.has_weights:  # vLLM reads the target's configuration once more
        revisions = {"revision": args.revision, "code_revision": args.code_revision}
        translated.speculative_config.update(revisions)
        read_as = patched(SpeculativeConfig, "hf_config_override", staticmethod(_as_it_is))
    try:
        with known(TO_BE_TAGGED, True), read_as:
            speculative_config = create(translated, target, parallel)
    except (ValueError, OSError) as error:
        raise ConfigError(draft_problem(planned.draft, error)) from error
    check_method(planned.drafter, planned.draft, speculative_config.method)
    draft = speculative_config.draft_model_config
    kind, settings = planned.drafter, planned.settings
    if kind.has_weights and not kind.is_targets_own:
        refuse_model(draft, "draft")
    kind.complete(draft.hf_config)
    if kind.has_weights and not kind.is_head:  # heads bring no tokenizer
        settings = _with_vocabulary(settings, planned.config.draft_vocabulary, target, draft)
    settings.store(speculative_config)
    if args.enable_lora:
        # vLLM wants a token budget for whole trees then. `plan_schedule` puts the number back.
        speculative_config.num_speculative_tokens = 1
    return speculative_config


def _as_it_is(hf_config: Any, *_args: Any, **_options: Any) -> Any:
    """Stands for what takes a model with MTP layers for a draft of these; it is pickled by name."""
    return hf_config


def _with_vocabulary(
    settings: SequoiaSettings, given: Any, target: Any, draft: Any
) -> SequoiaSettings:
    """Finds out, and logs, whether the draft's tokens must be mapped, and which it drafts."""
    tokens = TokensOf.target(target)
    found = compare_vocabularies(tokens, TokensOf.draft(draft))
    if found.in_words:
        level = logging.WARNING if found.matching is None else logging.INFO
        logger.log(level, "Sequoia: %s", found.in_words)
    settings = replace(settings, maps_vocabulary=found.matching is not None)
    if given is None:
        return settings
    drafted, words = tokens_to_draft(given, tokens)
    logger.info("Sequoia: %s", words)
    learned = settings.adapts_as and f"{settings.adapts_as}--{len(drafted)}-tokens"
    return replace(settings, draft_tokens=drafted, adapts_as=learned)
