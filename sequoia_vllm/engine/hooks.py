"""The patches on vLLM: the shorthand, the translation, the checks, the metrics.

They are the only functions of vLLM that are replaced in place (`ledger` lists
them); everything else is done by subclasses that vLLM is told to use.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager

from sequoia_vllm.config import METHOD, ConfigError, SequoiaConfig
from sequoia_vllm.engine import tree_reports
from sequoia_vllm.engine.cluster import current_versions
from sequoia_vllm.engine.contract import check_contract
from sequoia_vllm.engine.device_name import current_device_name
from sequoia_vllm.engine.load import plan_load
from sequoia_vllm.engine.refusals import refuse_unsupported
from sequoia_vllm.engine.settings import DECLINED, SequoiaSettings
from sequoia_vllm.engine.swap import swapped
from sequoia_vllm.engine.tree_choice import choose_engine_tree
from sequoia_vllm.known_pairs import known_draft
from sequoia_vllm.library.pair_key import PairKey

logger = logging.getLogger("vllm.sequoia")

CPU_WORKER = "sequoia_vllm.engine.worker_cpu.SequoiaCPUWorker"
GPU_WORKER = "sequoia_vllm.engine.worker_gpu.SequoiaGPUWorker"
TREE_SCHEDULER = "sequoia_vllm.engine.v2.scheduler.TreeScheduler"
_MARK = "_sequoia_original"
_SEQUOIA = "_sequoia"  # set on the SpeculativeConfig of a Sequoia engine, to a `_Mark`


def install() -> None:
    """Patches vLLM, once per process."""
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(EngineArgs, "create_speculative_config", _create_speculative_config)
    _wrap(EngineArgs, "add_cli_args", _add_cli_args, static=True)
    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    tree_reports.add_report_field()
    _wrap(Scheduler, "update_from_output", tree_reports.update_from_output)
    _wrap(StatLoggerManager, "__init__", tree_reports.init_stat_logger_manager)
    _wrap(LLMEngine, "get_metrics", tree_reports.get_metrics)


def installed() -> bool:
    """Whether this process is patched."""
    return hasattr(EngineArgs.create_engine_config, _MARK)


def _wrap(owner: type, name: str, replacement: Callable[..., Any], static: bool = False) -> None:
    """Replaces ``owner.name`` by ``replacement(original, *args)``, unless that was done."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)


# -- the command line ------------------------------------------------------------------


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """``--speculative-config sequoia`` and ``--spec-method sequoia`` parse, too."""
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "speculative_config":
            action.type = _json_or_shorthand(action.type)
        elif action.dest == "spec_method" and action.choices is not None:
            action.choices = [*action.choices, METHOD]
    return parser


def _json_or_shorthand(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(value: str) -> Any:
        if value.strip() == METHOD:
            return {"method": METHOD}
        try:
            return parse(value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(_not_a_config(value, error)) from error

    return parsed


def _not_a_config(value: str, error: Exception) -> str:
    """What to write instead of this ``--speculative-config``."""
    example = f"""'{{"method": "{METHOD}", "model": "DRAFT"}}'"""
    if value.lstrip().startswith("{"):
        # vLLM's own message shows the address of json.loads; its cause says what is wrong.
        return (
            f"{value!r} is not valid JSON: {error.__cause__ or error}. Give the JSON in single "
            f"quotes, with double ones inside: {example}"
        )
    is_near = difflib.get_close_matches(value.strip().lower(), [METHOD])
    question = f" (did you mean {METHOD}?)" if is_near else ""
    return (
        f"{value!r} is neither a JSON object nor the word {METHOD}{question}. Write {METHOD} "
        f"alone for a target with a known draft, or {example}"
    )


# -- from the user's configuration to vLLM's ---------------------------------------------


def sequoia_request(args: EngineArgs) -> dict[str, Any] | None:
    """The Sequoia configuration in these engine arguments, or None if there is none."""
    request = args.speculative_config
    if isinstance(request, str):
        request = {"method": METHOD} if request.strip() == METHOD else _json_object(request)
    if request is not None and not isinstance(request, dict):
        return None  # vLLM reports what is wrong with it
    merged = dict(request or {})
    flags = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    for key, value in flags.items():
        if value is None:
            continue
        if key in merged and merged[key] != value:
            raise ConfigError(f"{key} is given twice: {merged[key]!r} and {value!r}")
        merged[key] = value
    return merged if merged.get("method") == METHOD else None


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _create_engine_config(
    original: Callable[..., Any], self: EngineArgs, *args: Any, **kwargs: Any
) -> Any:
    """As vLLM's; checks the contract before, and refuses unsupported set-ups after."""
    request = sequoia_request(self)
    if request is None:
        return original(self, *args, **kwargs)
    check_contract()
    self.speculative_config = request
    self.spec_method = self.spec_model = self.spec_tokens = None
    is_users = request.get("num_speculative_tokens_per_batch_size") is not None

    def plan(vllm_config: VllmConfig) -> None:
        """Replaces a check that takes schedules from all data-parallel engines.

        It is for replicas in lock step; those of dense models are not, and others
        are refused (`refuse_unsupported`).
        """
        plan_load(vllm_config, keep_schedule=is_users)

    with (
        swapped(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", plan),
        swapped(VllmConfig, "_limit_max_model_len_to_draft", _keep_length, required=False),
    ):
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
    return vllm_config


def _keep_length(vllm_config: VllmConfig) -> None:
    """Replaces what cuts ``max_model_len`` to the draft's, since requests beyond it get no drafts.

    From 0.33 on, as vLLM's own V2 drafts cannot be skipped there; ours are.
    """


def _choose_scheduler(vllm_config: Any) -> None:
    """Names our scheduler where vLLM schedules ahead of the drafts, unless the user named one."""
    scheduler = vllm_config.scheduler_config
    schedules_ahead = vllm_config.use_v2_model_runner and scheduler.async_scheduling
    if schedules_ahead and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = TREE_SCHEDULER


def _create_speculative_config(
    original: Callable[..., Any], self: EngineArgs, target_model_config: Any,
    target_parallel_config: Any,
) -> Any:  # fmt: skip
    """Translates our configuration into one of vLLM's ``draft_model`` method.

    That method's scheduling is what trees need: as many look-ahead slots as
    drafts, and the draft's layers in the KV cache.
    """
    request = sequoia_request(self)
    if request is None:
        return original(self, target_model_config, target_parallel_config)
    config = SequoiaConfig.parse(request)
    draft = config.model or known_draft(target_model_config.model)
    choice = choose_engine_tree(
        config,
        PairKey(
            device=current_device_name(),
            target=target_model_config.model,
            draft=draft,
            dtype=str(target_model_config.dtype).removeprefix("torch."),
            tensor_parallel_size=target_parallel_config.tensor_parallel_size,
        ),
    )
    drafts = choice.tree.num_speculative_tokens
    if drafts == 0:
        logger.warning("Sequoia: not speculating, as plain decoding is faster (%s)", choice.source)
        self.additional_config = {**(self.additional_config or {}), DECLINED: choice.source}
        return None
    logger.info(
        "Sequoia: draft model %s; tree of %d nodes, depth %d (%s)",
        draft, choice.tree.size, choice.tree.depth, choice.source,
    )  # fmt: skip
    target_parallel_config.worker_cls = _worker_class(target_parallel_config.worker_cls)
    settings = SequoiaSettings(
        choice.tree, choice.source, choice.device, current_versions(), config.context_attention
    )
    self.additional_config = settings.store(self.additional_config)
    # A schedule is always given: without one, vLLM pads requests that join
    # with placeholder drafts, to keep CUDA graphs uniform. It is fitted to the
    # engine's limits when these are known, see `plan_load`.
    schedule = choice.schedule or [(1, 1, drafts)]
    self.speculative_config = {
        **config.draft_keys(),
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": drafts,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    try:
        speculative_config = original(self, target_model_config, target_parallel_config)
    finally:
        self.speculative_config = request
    setattr(speculative_config, _SEQUOIA, _Mark())
    return speculative_config


class _Mark:
    """Says that a configuration is Sequoia's, and patches each process that it is sent to.

    Ray Serve configures engines in another process than the one that talks to
    them, where no plugins are loaded: without the patches that one would refuse
    requests that Sequoia serves, and would count no trees.
    """

    def __reduce__(self) -> tuple[Callable[[], _Mark], tuple[()]]:
        return _received_mark, ()


def _received_mark() -> _Mark:
    install()
    return _Mark()


def _worker_class(current: str) -> str:
    ours = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    if current not in ("auto", ours):
        raise ConfigError(
            f"worker_cls is {current!r}: Sequoia brings its own worker; leave it at 'auto'"
        )
    return ours


# -- requests --------------------------------------------------------------------------


def _validate_spec_decode(
    original: Callable[..., Any], self: SamplingParams, speculative_config: Any
) -> None:
    """As vLLM's, which refuses min_p and logit_bias; a Sequoia engine serves both."""
    if not hasattr(speculative_config, _SEQUOIA):
        original(self, speculative_config)
