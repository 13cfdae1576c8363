"""Turns vLLM's engine arguments into its configuration of a Sequoia engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.config_tag import to_be_tagged
from sequoia_vllm.engine.common.device_name import current_device_name
from sequoia_vllm.engine.common.draft_schedule import planning_schedule
from sequoia_vllm.engine.common.replicas import are_started_apart
from sequoia_vllm.engine.common.settings import DECLINED, SequoiaSettings
from sequoia_vllm.engine.compat.contract import check_contract
from sequoia_vllm.engine.core.scheduling import TreeScheduling, before_users
from sequoia_vllm.engine.core.scheduling_ahead import TreeSchedulingAhead
from sequoia_vllm.engine.frontend.command_errors import short_in_commands
from sequoia_vllm.engine.frontend.drafts import DraftReader, check_method, draft_problem, kinds_here
from sequoia_vllm.engine.frontend.expected_gain import gain_line
from sequoia_vllm.engine.frontend.refusals import refuse_model, refuse_unsupported
from sequoia_vllm.engine.frontend.request import sequoia_request
from sequoia_vllm.engine.frontend.resolve import Resolved, find_draft, resolve
from sequoia_vllm.engine.offload.settings import choose_offloading, with_offload
from sequoia_vllm.engine.offload.weight_source import (
    OffloadedLayers,
    weight_source,
    with_streamed,
)
from sequoia_vllm.engine.runner.vocabulary import TokensOf, compare_vocabularies, tokens_to_draft
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import USER_DIRECTORY_VARIABLE

logger = logging.getLogger("vllm.sequoia")

CPU_WORKER = "sequoia_vllm.engine.worker.worker_cpu.SequoiaCPUWorker"
GPU_WORKER = "sequoia_vllm.engine.worker.worker_gpu.SequoiaGPUWorker"
# For an engine that is faster without drafts, while its other nodes may find otherwise.
PLAIN_CPU_WORKER = "sequoia_vllm.engine.worker.worker_cpu.PlainCPUWorker"
PLAIN_GPU_WORKER = "sequoia_vllm.engine.worker.worker_gpu.PlainGPUWorker"


def create_engine_config(
    original: Callable[..., Any], self: EngineArgs, *args: Any, **kwargs: Any
) -> Any:
    """Checks the contract, calls vLLM's, then refuses unsupported set-ups.

    Raises:
        SequoiaError: What we cannot do; in vLLM's own commands a line and exit code 2.
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
    with planning_schedule(keep_schedule=is_users):
        vllm_config = original(self, *args, **kwargs)
    if SequoiaSettings.declined(vllm_config):
        return vllm_config
    if not SequoiaSettings.enabled(vllm_config):
        raise ConfigError(
            f"the checkpoint {self.model!r} brings its own speculator, which replaces the "
            "speculative config: serve its target model by name instead"
        )
    refuse_unsupported(vllm_config)
    _choose_scheduler(vllm_config)
    _keep_draft_in_one_group(vllm_config)
    return vllm_config


def limit_length(original: Callable[..., None], self: VllmConfig) -> None:
    """Keeps ``max_model_len``, which vLLM cuts to the draft's, also as an engine core starts.

    Beyond it vLLM's own V2 drafts cannot be skipped; ours are skipped. Other engines stay cut.
    """
    if not SequoiaSettings.enabled(self):
        original(self)


def _choose_scheduler(vllm_config: Any) -> None:
    """Names our scheduler, before a class of the user's own if there is one.

    Raises:
        ConfigError: That class is no scheduler of vLLM's.
    """
    config = vllm_config.scheduler_config
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


def _keep_draft_in_one_group(vllm_config: Any) -> None:
    """Gives layers with a window and others one KV cache group on the V1 runner.

    vLLM's V1 proposer takes drafts whose layers lie in one group. Without this they lie in several.
    It costs memory where a model has both kinds: tokens before a window are kept.
    """
    if not vllm_config.use_v2_model_runner:
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True


def create_speculative_config(
    original: Callable[..., Any], self: EngineArgs, target_model_config: Any,
    target_parallel_config: Any,
) -> Any:  # fmt: skip
    """Calls vLLM's with a Sequoia configuration translated to the method that drafts such chains.

    Returns:
        vLLM's speculative configuration; None for an engine that does not speculate.
    """
    request = sequoia_request(self)
    if request is None:
        return original(self, target_model_config, target_parallel_config)
    refuse_model(target_model_config, "target")
    config = SequoiaConfig.parse(request).loaded()
    self.additional_config = with_offload(self.additional_config, config.offload)
    source = weight_source(self)
    reader = DraftReader(target_model_config, config)
    draft = find_draft(config, target_model_config.model, kinds_here(), reader.kind)
    pair = PairKey(
        device=current_device_name(),
        target=target_model_config.model,
        draft=draft.name,
        dtype=str(target_model_config.dtype).removeprefix("torch."),
        tensor_parallel_size=target_parallel_config.tensor_parallel_size,
        offloading=source.name if source else None,
    )
    shapes = reader.shapes(draft.name, draft.kind) if config.is_tree_chosen else None
    if shapes is not None and isinstance(source, OffloadedLayers):
        shapes = with_streamed(shapes, source, pair.dtype, pair.device, pair.tensor_parallel_size)
    draft = replace(draft, levels=reader.levels(draft.name, draft.kind), shapes=shapes)
    resolved = resolve(config, pair, draft, target_model_config.max_model_len)
    tree, tree_source = resolved.choice.tree, resolved.choice.source
    is_apart = are_started_apart(target_parallel_config, target_model_config.is_moe)
    if is_apart and config.is_tree_chosen and USER_DIRECTORY_VARIABLE not in os.environ:
        logger.warning(
            "Sequoia: each node of this engine chooses a tree by the files in a directory of its "
            "own, and only the first node keeps anything there. So nodes will choose different "
            'trees, and a later start will be refused: give all of them the same "tree", or one '
            "directory (%s)",
            USER_DIRECTORY_VARIABLE,
        )
    if not resolved.speculates:
        logger.info("Sequoia: not speculating, as plain decoding is faster (%s)", tree_source)
        self.additional_config = {**(self.additional_config or {}), DECLINED: True}
        if is_apart and target_parallel_config.worker_cls == "auto":
            on_cpu = current_platform.is_cpu()
            target_parallel_config.worker_cls = PLAIN_CPU_WORKER if on_cpu else PLAIN_GPU_WORKER
        return None
    level, line = gain_line(
        resolved.choice.gain, draft.name, tree.size, tree.depth, drafter=draft.kind,
        adapts=config.adapts, on_cpu=current_platform.is_cpu(),
    )  # fmt: skip
    logger.log(level, "Sequoia: %s", line)
    logger.debug("Sequoia: the tree was chosen so: %s", tree_source)
    target_parallel_config.worker_cls = _worker_class(target_parallel_config.worker_cls)
    translated = copy(self)
    translated.speculative_config = _as_chain(config, resolved)
    try:
        with to_be_tagged():
            speculative_config = original(translated, target_model_config, target_parallel_config)
    except (ValueError, OSError) as error:
        raise ConfigError(draft_problem(draft.name, error)) from error
    check_method(draft.kind, draft.name, speculative_config.method)
    refuse_model(speculative_config.draft_model_config, "draft")
    found = resolved.settings
    if not drafter(draft.kind).is_head:  # heads bring no tokenizer
        found = _with_vocabulary(
            found, config, target_model_config, speculative_config.draft_model_config
        )
    found.store(speculative_config)
    if self.enable_lora:
        # vLLM wants a token budget for the whole tree at all loads then: it knows no schedule.
        # `plan_schedule` puts the number back.
        speculative_config.num_speculative_tokens = 1
    return speculative_config


def _as_chain(config: SequoiaConfig, resolved: Resolved) -> dict[str, Any]:
    """The same as a speculative configuration of vLLM's own method for this kind of drafter.

    That method's scheduling is what trees need: as many look-ahead slots as drafts
    (`TreeScheduling`), and the draft's layers in the KV cache; for heads also the target's
    auxiliary hidden states, and a prefix cache that leaves out what they read with a later block's
    token.
    """
    drafts = resolved.choice.tree.num_speculative_tokens
    # A schedule is always given: without one, vLLM pads requests that join
    # with placeholder drafts, to keep CUDA graphs uniform. It is fitted to the
    # engine's limits when these are known, see `plan_schedule`.
    schedule = resolved.choice.schedule or [(1, 1, drafts)]
    # vLLM knows where the target's own layers lie, and that they are quantized alike.
    kind = drafter(resolved.draft.kind)
    model = {} if kind.is_targets_own else {"model": resolved.draft.name}
    return {
        **config.draft_keys(),
        **model,
        "method": kind.method,
        "num_speculative_tokens": drafts,
        "num_speculative_tokens_per_batch_size": schedule,
    }


def _with_vocabulary(
    settings: SequoiaSettings, config: SequoiaConfig, target: Any, draft: Any
) -> SequoiaSettings:
    """Finds out, and logs, whether the draft's tokens must be mapped, and which it drafts."""
    tokens = TokensOf.target(target)
    found = compare_vocabularies(tokens, TokensOf.draft(draft))
    if found.in_words:
        level = logging.WARNING if found.matching is None else logging.INFO
        logger.log(level, "Sequoia: %s", found.in_words)
    settings = replace(settings, maps_vocabulary=found.matching is not None)
    if config.draft_vocabulary is None:
        return settings
    assert not isinstance(config.draft_vocabulary, Path)  # by `SequoiaConfig.loaded`
    drafted, words = tokens_to_draft(config.draft_vocabulary, tokens)
    logger.info("Sequoia: %s", words)
    learned = settings.adapts_as and f"{settings.adapts_as}--{len(drafted)}-tokens"
    return replace(settings, draft_tokens=drafted, adapts_as=learned)


def _worker_class(current: str) -> str:
    ours = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    if current not in ("auto", ours):
        raise ConfigError(
            f"worker_cls is {current!r}: Sequoia brings its own worker; leave it at 'auto'"
        )
    return ours
