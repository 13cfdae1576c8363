"""Every override of vLLM that this plugin makes: what, why, and when it can go.

Five kinds: a *patch* replaces a function of vLLM in place, in every process
that loads the plugin (and passes through unless Sequoia is asked for); a *field*
adds a field, None by default, to a message of vLLM; a *swap* replaces a function
for the length of one call; a *subclass* overrides a method or an attribute in a
class that vLLM is told to use; an *instance* is an attribute that we set on one
object of vLLM, in the place of what vLLM had put there. A test checks that nothing
is missing here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """One override.

    Attributes:
        kind: "patch", "field", "swap", "subclass" or "instance".
        what: What of vLLM, as ``Class.method``, ``Class.field``, ``module.name`` or,
            for an instance, ``Class.attribute[.attribute]``; by the class that has it,
            which may be a base of the one that ours derives from.
        why: Why vLLM's own does not do.
        removable: When this can go.
    """

    kind: str
    what: str
    why: str
    removable: str


_NEW_METHOD = "vLLM lets plugins register a speculative method"
_METRICS = "vLLM carries a speculative method's own statistics from the worker to its loggers"
_TIMES = "vLLM tells plugins how long the parts of a step take"

_EVERYWHERE = (
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
        "subclass", "StatLoggerBase.record", "counts trees and shows them", _METRICS
    ),
    Override(
        "subclass", "StatLoggerBase.log", "writes the trees' interval line", _METRICS
    ),
    Override(
        "subclass", "StatLoggerBase.log_engine_initialized",
        "abstract; there is nothing to say", _METRICS,
    ),
    Override(
        "swap", "VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
        "takes schedules from data-parallel engines; replicas of dense models do not need that. "
        "Ours fits schedule and CUDA graph sizes to the engine's limits, known by then",
        "vLLM asks whether the replicas run in lock step, and speculative methods for a schedule",
    ),
    Override(
        "swap", "VllmConfig._limit_max_model_len_to_draft",
        "cuts the engine's length to the draft's, from 0.33 on; requests beyond get no drafts here",
        "vLLM asks the speculative method whether it can stop drafting for a request",
    ),
    Override(
        "subclass", "Worker.init_device",
        "refuses nodes with other versions, and tensor-parallel groups of mixed devices",
        "vLLM compares versions of plugins between nodes",
    ),
    Override("subclass", "Worker.execute_model", "timed for sequoia_stats", _TIMES),
    Override(
        "subclass", "Worker.sample_tokens",
        "timed for sequoia_stats; its output takes the counts of trees along", _METRICS,
    ),
)  # fmt: skip


_TREE_HOOKS = "vLLM's V2 runner runs on CPUs (vllm-project/vllm#55847): v2/ has its part"

_CPU_V1 = (
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
    Override(
        "subclass", "CPUWorker.init_device",
        "see cpu_worker.CPUModelRunner and, with V2, cpu_model_runner_v2.CPUModelRunner",
        "the worker asks a method for its runner class",
    ),
    Override(
        "subclass", "CPUModelRunner.load_model",
        "our attention backend while layers look theirs up; then refuses attention features that "
        "trees cannot use",
        "the CPU platform honours a backend chosen by the speculative method",
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
        "instance", "GPUModelRunner.input_batch.generators",
        "empty while _bookkeeping_sync rewinds what it finds there", "see _bookkeeping_sync",
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
        "instance", "GPUModelRunner.drafter", "the proposer of chains; ours grows trees",
        _TREE_HOOKS,
    ),
    Override(
        "subclass", "SpecDecodeBaseProposer.dummy_run",
        "runs one forward per speculative token; a tree needs one per level", _TREE_HOOKS,
    ),
)  # fmt: skip


_CPU_KERNEL = "vLLM's CPU kernel takes a tree mask"

_CPU_ATTENTION = (
    Override(
        "subclass", "CPUAttentionBackendImpl.forward",
        "the kernel has no mask argument", _CPU_KERNEL,
    ),
    Override(
        "subclass", "CPUAttentionMetadataBuilder.build",
        "metadata that can carry a tree", "vLLM's metadata carries a tree mask",
    ),
    Override(
        "instance", "CPUAttentionMetadataBuilder.isa",
        "the cache layout that our kernel reads", _CPU_KERNEL,
    ),
    Override(
        "subclass", "CPUAttentionBackend.get_impl_cls", "names the two classes above",
        _CPU_KERNEL,
    ),
    Override(
        "subclass", "CPUAttentionBackend.get_builder_cls", "names the two classes above",
        _CPU_KERNEL,
    ),
)  # fmt: skip


_TREES = "vLLM's V2 runner drafts, scores and verifies token trees itself"
_SPECULATOR = "a speculative method of V2 brings its speculator and verifier"

_V2 = (
    Override(
        "swap", "cpu_model_runner_v2.CPUModelRunner",
        "CPUWorker.init_device imports the V2 runner by this name",
        "the worker asks a method for its runner class",
    ),
    Override(
        "swap", "model_runner.init_speculator",
        "the runner's constructor builds the speculator with it, by method", _SPECULATOR,
    ),
    Override(
        "subclass", "AsyncScheduler._update_after_schedule",
        "assumes drafts of every request while they are still being made; some requests get none",
        "vLLM asks the speculative method which requests it drafts for",
    ),
    Override(
        "subclass", "GPUModelRunner.load_model",
        "our attention backends while layers look theirs up; then refuses attention features "
        "that trees cannot use", "a backend can be chosen by the speculative method",
    ),
    Override(
        "subclass", "GPUModelRunner.add_requests",
        "notes what the draft has read of new requests, and how they sample", _SPECULATOR,
    ),
    Override(
        "subclass", "GPUModelRunner.prepare_attn",
        "tree nodes have the RoPE position of their depth, and a slot of their own", _TREES,
    ),
    Override(
        "instance", "GPUModelRunner.model_state.prepare_attn",
        "attention metadata has no place for a tree; the class of the model's state is vLLM's "
        "choice by model", "vLLM's metadata carries a tree mask",
    ),
    Override(
        "subclass", "GPUModelRunner.sample",
        "commits the accepted paths' keys and values, before anything reads them", _TREES,
    ),
    Override(
        "instance", "GPUModelRunner.rejection_sampler",
        "verifies chains; ours walks down trees", _SPECULATOR,
    ),
    Override(
        "instance", "RejectionSampler.sampler.add_request",
        "one flag stands for all that a request's logits need; a temperature is the walk's work, "
        "for the few rows that it reads", "vLLM tells temperature and other processing apart",
    ),
    Override(
        "instance", "RejectionSampler.sampler.sampling_states.add_request",
        "raises that flag for a temperature", "see RejectionSampler.sampler.add_request",
    ),
    Override(
        "subclass", "GPUModelRunner.take_draft_token_ids",
        "says that every request has drafts; some requests get none",
        "vLLM asks the speculative method which requests it drafts for",
    ),
    Override(
        "subclass", "DraftModelSpeculator.load_model",
        "allocates what the verifier reads where memory profiling sees it", _TREES,
    ),
    Override(
        "subclass", "StandaloneARSpeculator.set_attn",
        "the draft's growth works on the caches that it is given", _TREES,
    ),
    Override(
        "subclass", "StandaloneARSpeculator.propose", "grows trees, not chains", _TREES,
    ),
    Override(
        "subclass", "StandaloneARSpeculator.init_cudagraph_manager",
        "does nothing: vLLM captures no graphs of draft models",
        "vLLM captures draft models' steps",
    ),
    Override(
        "subclass", "StandaloneARSpeculator.capture",
        "does nothing; the whole growth of a tree is one graph",
        "vLLM captures draft models' steps",
    ),
    Override(
        "instance", "CudaGraphManager._capture_descs",
        "shapes to capture: of growth also by number of drafts, and only batches that draft; of "
        "the target only what the schedule can reach",
        "vLLM captures draft models' steps, and for each range of a schedule its own batches",
    ),
    Override(
        "instance", "CudaGraphManager._candidates",
        "gives a batch the next larger graph of any number of drafts, not the next of its own",
        "vLLM looks graphs up by number of drafts",
    ),
)  # fmt: skip


_KERNELS = "vLLM's attention kernels take a tree mask per request"
_GRAPHS = "vLLM's metadata carries a tree mask"

_GPU = (
    Override(
        "subclass", "Worker._make_model_runner", "makes vLLM's runner; ours has trees",
        "the worker asks a method for its runner class",
    ),
    Override(
        "swap", "model_runner.ModelCudaGraphManager",
        "initialize_kv_cache builds the manager of the target's graphs by this name",
        "vLLM captures for each range of a schedule its own batches",
    ),
    Override(
        "subclass", "GPUModelRunner.initialize_kv_cache",
        "see model_runner.ModelCudaGraphManager",
        "vLLM captures for each range of a schedule its own batches",
    ),
    Override(
        "subclass", "CudaGraphManager._init_candidates",
        "full graphs of the schedule's batches, found by number of drafts",
        "vLLM captures for each range of a schedule its own batches",
    ),
    *(
        override
        for name in ("FlashAttention", "TritonAttention")
        for override in (
            Override(
                "subclass", f"{name}Impl.forward",
                "kernels treat requests as chains; rows of tree nodes go through ours", _KERNELS,
            ),
            Override(
                "subclass", f"{name}MetadataBuilder._cudagraph_support",
                "a full CUDA graph holds trees of one size, or one token per request", _GRAPHS,
            ),
            Override(
                "subclass", f"{name}Backend.get_impl_cls", "names the two classes above", _KERNELS
            ),
            Override(
                "subclass", f"{name}Backend.get_builder_cls", "names the two classes above",
                _KERNELS,
            ),
            Override(
                "subclass", f"{name}Backend.supports_kv_cache_update_bypass",
                "off: from 0.33.0 on layers may pass no keys and values to forward", _KERNELS,
            ),
        )
    ),
)  # fmt: skip

OVERRIDES = (*_EVERYWHERE, *_CPU_V1, *_CPU_ATTENTION, *_V2, *_GPU)
