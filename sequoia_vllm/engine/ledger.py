"""Every override of vLLM that this plugin makes: what, why, and when it can go.

Four kinds: a *patch* replaces a function of vLLM in place, in every process
that loads the plugin (and passes through unless Sequoia is asked for); a *field*
adds a field, None by default, to a message of vLLM; a *swap* replaces a function
for the length of one call; a *subclass* overrides a method in a class that vLLM
is told to use. A test checks that nothing is missing here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """One override.

    Attributes:
        kind: "patch", "field", "swap" or "subclass".
        what: What of vLLM, as ``Class.method``, ``Class.field`` or ``module.name``.
        why: Why vLLM's own does not do.
        removable: When this can go.
    """

    kind: str
    what: str
    why: str
    removable: str


_NEW_METHOD = "vLLM lets plugins register a speculative method"
_TREE_HOOKS = "vLLM's V2 runner runs on CPUs (vllm-project/vllm#55847) and we hook into that"

_METRICS = "vLLM carries a speculative method's own statistics from the worker to its loggers"

OVERRIDES = (
    Override(
        "patch", "EngineArgs.create_speculative_config",
        "translates method 'sequoia' into 'draft_model', whose scheduling trees need",
        _NEW_METHOD,
    ),
    Override(
        "patch", "EngineArgs.create_engine_config",
        "checks the contract and refuses unsupported set-ups in the user's own process",
        _NEW_METHOD,
    ),
    Override(
        "patch", "EngineArgs.add_cli_args",
        "--speculative-config is parsed by json.loads, which 'sequoia' alone is not for",
        _NEW_METHOD,
    ),
    Override(
        "patch", "SamplingParams._validate_spec_decode",
        "refuses min_p and logit_bias with any speculation; Sequoia serves them",
        "vLLM asks the speculative method",
    ),
    Override(
        "field", "SchedulerStats.sequoia_report",
        "takes the counts of trees to the front end; decoders drop fields they do not know",
        _METRICS,
    ),
    Override(
        "patch", "Scheduler.update_from_output",
        "moves the counts from the model runner's output to the statistics", _METRICS,
    ),
    Override(
        "patch", "StatLoggerManager.__init__",
        "adds the logger of trees; the entry points for stat loggers are for AsyncLLM only, and "
        "having one turns statistics on in every engine", _METRICS,
    ),
    Override(
        "patch", "LLMEngine.get_metrics",
        "reads metrics that are named vllm:... only; ours are sequoia:...",
        "vLLM reads metrics of other names",
    ),
    Override(
        "swap", "cpu_worker.CPUModelRunner",
        "CPUWorker.init_device builds the runner by this name",
        "the worker asks a method for its runner class",
    ),
    Override(
        "swap", "gpu_model_runner.build_logitsprocs",
        "drops logits processors when speculating; requests that need them get no drafts here",
        "vLLM asks the speculative method",
    ),
    Override("subclass", "CPUWorker.init_device", "see cpu_worker.CPUModelRunner", _TREE_HOOKS),
    Override(
        "subclass", "CPUWorker.load_model",
        "layers look their attention backend up while the model loads",
        "the CPU platform honours a backend chosen by the speculative method",
    ),
    Override("subclass", "CPUWorker.execute_model", "timed for sequoia_stats", _TREE_HOOKS),
    Override("subclass", "CPUWorker.sample_tokens", "timed for sequoia_stats", _TREE_HOOKS),
    Override(
        "subclass", "CPUModelRunner.load_model",
        "refuses attention features that trees cannot use, once layers exist", _TREE_HOOKS,
    ),
    Override(
        "subclass", "GPUModelRunner._update_states", "forgets drafts of finished requests",
        _TREE_HOOKS,
    ),
    Override(
        "subclass", "GPUModelRunner._prepare_inputs",
        "tree nodes have the RoPE position of their depth, and a slot of their own", _TREE_HOOKS,
    ),
    Override(
        "subclass", "GPUModelRunner._build_attention_metadata",
        "attention metadata has no place for a tree", "vLLM's metadata carries a tree mask",
    ),
    Override("subclass", "GPUModelRunner._model_forward", "timed for sequoia_stats", _TREE_HOOKS),
    Override(
        "subclass", "GPUModelRunner._sample",
        "the Sequoia verifier in place of the rejection sampler, then the KV commit", _TREE_HOOKS,
    ),
    Override(
        "subclass", "GPUModelRunner._bookkeeping_sync",
        "rewinds generators of unfinished prefills, which CPU generators cannot do; "
        "_sample does not advance them", "vLLM stops rewinding on CPUs",
    ),
    Override(
        "subclass", "GPUModelRunner._input_fits_in_drafter",
        "stops drafting for the whole batch when one request is near the end", _TREE_HOOKS,
    ),
    Override(
        "subclass", "GPUModelRunner.propose_draft_token_ids", "grows trees, not chains",
        _TREE_HOOKS,
    ),
    Override(
        "subclass", "DraftModelProposer.dummy_run",
        "runs one forward per speculative token; a tree needs one per level", _TREE_HOOKS,
    ),
    Override(
        "subclass", "CPUAttentionBackendImpl.forward",
        "the kernel has no mask argument", "vLLM's CPU kernel takes a tree mask",
    ),
    Override(
        "subclass", "CPUAttentionMetadataBuilder.build",
        "metadata that can carry a tree", "vLLM's metadata carries a tree mask",
    ),
    Override(
        "subclass", "CPUAttentionBackend.get_impl_cls", "names the two classes above",
        "vLLM's CPU kernel takes a tree mask",
    ),
    Override(
        "subclass", "CPUAttentionBackend.get_builder_cls", "names the two classes above",
        "vLLM's CPU kernel takes a tree mask",
    ),
)  # fmt: skip
