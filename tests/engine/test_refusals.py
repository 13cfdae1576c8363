"""Set-ups that would run and be wrong are refused at start-up, with the reason and the fix."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from vllm.config import KVTransferConfig, ModelConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from sequoia_vllm import plugin
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.common.cluster import as_alone, current_versions
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend import engine_config as frontend
from sequoia_vllm.engine.frontend import plan, refusals, request
from sequoia_vllm.engine.frontend.tree_choice import TreeChoice
from sequoia_vllm.engine.runner import attention_layers, cpu_attention
from sequoia_vllm.engine.v2.attention import attention_gpu, layers_with_states
from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend
from sequoia_vllm.engine.worker import worker_base
from sequoia_vllm.hardware.support import kinds_of, refusal
from sequoia_vllm.tree import TokenTree
from tests.support.engines import configured, lookup_trees, running, sequoia
from tests.support.models import DRAFT, TARGET

plugin.register()


def engine_config(**options):
    return configured(options.pop("speculative_config", sequoia()), **options)


def refused(*messages: str, **options) -> str:
    """What the refusal says."""
    with pytest.raises((ConfigError, ValueError)) as error:
        engine_config(**options)
    said = str(error.value)
    assert all(message in said for message in messages), said
    return said


def only(reasons: list[str], *messages: str) -> None:
    """There is one reason, and it says all this; without messages there is none."""
    assert len(reasons) == bool(messages)
    assert all(message in reason for reason in reasons for message in messages)


TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip

MODELS = {
    "sparse": (
        lambda: transformers.DeepseekV2Config(
            **TINY, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, v_head_dim=16,
            qk_nope_head_dim=16, index_topk=16, architectures=["DeepseekV2ForCausalLM"],
        ),
        "chooses the tokens that it attends to (sparse MLA",
    ),
    "alibi": (
        lambda: transformers.BloomConfig(
            vocab_size=4096, hidden_size=64, n_layer=1, n_head=2, seq_length=256,
            architectures=["BloomForCausalLM"],
        ),
        "uses ALiBi (a bias by distance",
    ),
}  # fmt: skip


def save_config(path: Path, config) -> str:
    config.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, path / name)
    return str(path)


@pytest.mark.parametrize("kind", MODELS)
def test_target_models(kind, tmp_path, monkeypatch):
    """Before a draft is asked for, in the words of commands that read the configuration alone."""
    # vLLM would start a process for each, which takes 25 s.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    make, reason = MODELS[kind]
    target = save_config(tmp_path, make())
    kinds = kinds_of(json.loads((tmp_path / "config.json").read_text()))
    said = refused(
        reason, refusal(target, "target", kinds), model=target, skip_tokenizer_init=True,
        speculative_config={"method": "sequoia"}, enable_prefix_caching=False,
    )  # fmt: skip
    assert "no draft" not in said


def test_hybrid_targets_on_cpus_and_their_largest_trees(tmp_path):
    config = transformers.Qwen3NextConfig(
        **TINY, num_experts=2, num_experts_per_tok=1, architectures=["Qwen3NextForCausalLM"],
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    options = {
        "model": save_config(tmp_path, config), "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }  # fmt: skip
    refused("trees over recurrent layers are for GPUs", **options)
    large = sequoia(size=65, depth=8)
    refused("choose one of 64 nodes at most", speculative_config=large, **options)


def test_sparse_targets_on_cpus(tmp_path, monkeypatch):
    """vLLM serves DeepSeek V3.2 by another class than that of `MODELS`."""
    # Else vLLM sets it for the whole process, and for engines that later tests start.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    config = transformers.DeepseekV32Config(
        **TINY, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, v_head_dim=16,
        qk_nope_head_dim=16, index_topk=16, architectures=["DeepseekV32ForCausalLM"],
    )  # fmt: skip
    said = refused(
        "trees over DeepSeek Sparse Attention are for GPUs", model=save_config(tmp_path, config),
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    assert "chooses the tokens" not in said


def test_draft_models(tmp_path):
    make, reason = MODELS["sparse"]
    draft = save_config(tmp_path, make())
    said = f"the draft model {draft} uses multi-head latent attention (MLA): choose another"
    refused(said, f"the draft model {draft} {reason}", speculative_config=sequoia(draft=draft))
    named = shutil.copytree(DRAFT, tmp_path / "eagle3" / "draft")
    refused("by its name: if it is a draft model, put", speculative_config=sequoia(draft=named))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "heads and MTP layers need vLLM's Model Runner V2"),
        ({"target_hidden_size": 512}, "hidden size is 512, and this one's 256"),
    ],
)
def test_heads(changes, message, tmp_path):
    """On Model Runner V1, and of another target. No weights are read."""
    config = transformers.LlamaConfig.from_pretrained(TARGET)
    config.update({"num_hidden_layers": 1, "draft_vocab_size": 512, **changes})
    config.save_pretrained(tmp_path / "head")
    refused(message, speculative_config=sequoia(draft=tmp_path / "head"))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("greater than the derived max_model_len",
         {"speculative_config": sequoia(max_model_len=100_000)}),
        ('a lookup of what followed before drafts static trees only: leave "dynamic_tree" out',
         {"speculative_config": lookup_trees(dynamic_tree=True)}),
        ("accepted paths would have to reach every stage", {"pipeline_parallel_size": 2}),
        ("draft_tensor_parallel_size",
         {"speculative_config": sequoia(draft_tensor_parallel_size=1), "tensor_parallel_size": 2}),
        ("use --kv-cache-dtype auto", {"kv_cache_dtype": "fp8", "dtype": "float32"}),
        ("use --kv-cache-dtype bfloat16", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
        ("drop --cpu-offload-gb and --offload-group-size", {"cpu_offload_gb": 1}),
        ("drop --cpu-offload-gb and --offload-group-size", {"offload_group_size": 2}),
        ("drop --enable-prompt-embeds", {"enable_prompt_embeds": True}),
        ("drop --use-fp64-gumbel", {"use_fp64_gumbel": True}),
        ("leave it at 'auto'", {"worker_cls": "some.Worker"}),
        ("does not fit in max_num_batched_tokens=64",
         {"speculative_config": sequoia(size=64), "max_num_batched_tokens": 64}),
        ("does not fit in max_model_len=48",
         {"speculative_config": sequoia(size=64), "max_model_len": 48}),
    ],
)  # fmt: skip
def test_engine_options(message, options):
    refused(message, **options)


def connector(name: str, **changes):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **changes)


def several(*names: str):
    given = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return connector("MultiConnector", kv_connector_extra_config={"connectors": given})


BOTH_WAYS = {"bidirectional_kv_xfer": True}


@pytest.mark.parametrize(
    ("fault", "transfer"),
    [
        ("ExampleConnector saves each layer", connector("ExampleConnector")),
        ("LMCacheConnectorV1 may save each layer",
         several("OffloadingConnector", "LMCacheConnectorV1")),
        ("MooncakeConnector was not read", connector("MooncakeConnector")),
        ("NixlConnector was not read",
         connector("NixlConnector", kv_connector_module_path="some.module")),
        ("NixlConnector with bidirectional_kv_xfer",
         connector("NixlConnector", kv_connector_extra_config=BOTH_WAYS)),
    ],
)  # fmt: skip
def test_connectors_that_may_take_nodes(fault, transfer):
    config = engine_config()
    config.kv_transfer_config = transfer
    fix = "drop --kv-transfer-config, or use OffloadingConnector"
    only(refusals._feature_reasons(config), fault, fix)
    config.cache_config.kv_offloading_size = 1
    assert "drop --kv-offloading-size" in refusals._feature_reasons(config)[0]


def test_connectors_that_take_committed_tokens(monkeypatch):
    config = engine_config()
    for transfer in several("OffloadingConnector", "NixlConnector"), connector("NixlPushConnector"):
        config.kv_transfer_config = transfer
        only(refusals._feature_reasons(config))
    only(refusals._feature_reasons(engine_config(kv_offloading_size=0.01)))
    monkeypatch.setattr(refusals, "kinds_in_vllm", lambda _: {"hybrid"})
    only(refusals._feature_reasons(config), "not tried with trees over recurrent layers")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_checkpoints_that_ask_for_a_quantized_cache(role, monkeypatch):
    config = engine_config(dtype="bfloat16")
    models = {"target": config.model_config, "draft": config.speculative_config.draft_model_config}
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    monkeypatch.setattr(models[role].hf_config, "quantization_config", scheme, raising=False)
    only(refusals._feature_reasons(config), "use --kv-cache-dtype bfloat16")
    config.cache_config.cache_dtype = "bfloat16"
    only(refusals._feature_reasons(config))


def test_shared_keys_of_two_sizes_on_cpus(monkeypatch):
    """As Gemma 4 E2B has them: vLLM's runner asks for a layer that no cache group describes."""
    config = engine_config()
    text = config.model_config.hf_text_config
    monkeypatch.setattr(text, "num_kv_shared_layers", 2, raising=False)
    only(refusals._feature_reasons(config))
    monkeypatch.setattr(text, "global_head_dim", 512, raising=False)
    only(refusals._feature_reasons(config), "heads of two sizes: serve it without Sequoia")


def test_dynamic_trees_on_gpus(monkeypatch):
    config = engine_config()
    settings = replace(SequoiaSettings.of(config), dynamic_tree=True, verification="traversal")
    large = replace(settings, verification="sequoia", tree=TokenTree.chain(128))
    for each in (settings, large):
        each.store(config.speculative_config)
        only(refusals._tree_reasons(config))
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    only(refusals._tree_reasons(config), "have at most 128 nodes", "or give a smaller tree")
    settings.store(config.speculative_config)
    only(refusals._tree_reasons(config), "one tree for all requests", 'leave "dynamic_tree" out')
    replace(settings, drafter="dflash", verification="sequoia").store(config.speculative_config)
    only(refusals._tree_reasons(config), "a DFlash head drafts static trees only")


def test_options_that_trees_do_not_follow():
    """On CPUs vLLM itself refuses some of them; here its checks are past."""
    config = engine_config()
    for part, name in [
        (config.aux_output_config, "enable_return_routed_experts"),
        (config.model_config, "return_sampling_mask"),
        (config.model_config, "enable_trace_replay"),
        (config, "watermark_config"),
    ]:
        with patch.object(part, name, True):
            only(refusals._feature_reasons(config), f"drop --{name.replace('_', '-')}")
    for chosen, refused in (("auto", False), ("latency_specialized", True)):
        with patch.object(config, "additional_config", {"decode_backend": chosen}):
            only(refusals._feature_reasons(config), *["drop decode_backend"] * refused)
    only(refusals._feature_reasons(config))


def test_batch_invariance(monkeypatch):
    config = engine_config()
    for name, value in (("is_cpu", False), ("is_cuda", True)):
        monkeypatch.setattr(type(refusals.current_platform), name, lambda self, value=value: value)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    only(refusals._platform_reasons(config))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    only(refusals._platform_reasons(config), "unset VLLM_BATCH_INVARIANT")


def test_adapters_need_no_budget_for_whole_trees_at_all_loads():
    """Limits are GPUs' defaults; vLLM asks for 256 * 16 tokens, and knows no schedule."""
    config = engine_config(enable_lora=True, max_num_seqs=256, max_num_batched_tokens=2048)
    assert config.speculative_config.num_speculative_tokens == 15
    assert config.num_speculative_tokens == 15
    by_batch = config.speculative_config.num_speculative_tokens_per_batch_size
    assert max((last * (drafts + 1) for _, last, drafts in by_batch if drafts), default=0) <= 2048


@pytest.mark.parametrize("prunes", [False, True])
def test_pruned_videos(prunes, monkeypatch):
    config = engine_config()
    images = SimpleNamespace(is_multimodal_pruning_enabled=lambda: prunes)
    monkeypatch.setattr(config.model_config, "multimodal_config", images)
    only(refusals._feature_reasons(config), *["drop --video-pruning-rate"] * prunes)


@pytest.mark.parametrize(("length", "is_refused"), [(34, True), (35, False)])
def test_gpu_engines_have_room_for_vllms_warm_up(length, is_refused, monkeypatch):
    """Its requests outgrow their rows of the block table; on CPUs there are none."""
    config = engine_config(speculative_config=sequoia(size=16), max_model_len=length)
    monkeypatch.setattr(type(refusals.current_platform), "is_cuda", lambda self: True)
    found = [reason for reason in refusals._size_reasons(config) if "warms up" in reason]
    only(found, *["requests of 35 tokens"] * is_refused)


def test_replicas_in_lock_step(monkeypatch):
    """Dense models' replicas are independent; those of mixtures of experts are not."""
    assert engine_config(data_parallel_size=2).parallel_config.data_parallel_size == 2
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda model: model.model == TARGET))
    refused("which vLLM cannot do on CPUs", data_parallel_size=2)
    monkeypatch.setattr(CpuCommunicator, "all_gatherv", None, raising=False)
    config = engine_config(data_parallel_size=2)
    assert config.parallel_config.data_parallel_size == 2
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    only(refusals._parallel_reasons(config))
    with patch.object(config.parallel_config, "enable_dbo", True):
        only(refusals._parallel_reasons(config), "drop --enable-dbo")
    monkeypatch.setattr(ModelConfig, "is_moe", True)
    fix = "the draft has experts, too: run one engine per replica"
    only(refusals._parallel_reasons(config), fix)


def test_drafts_of_replicas_in_lock_step_run_as_if_alone():
    """vLLM's forward contexts would have them meet in every pass."""
    config = engine_config(data_parallel_size=2)
    alone = as_alone(config)
    assert alone.parallel_config.data_parallel_size == 1
    assert config.parallel_config.data_parallel_size == 2
    assert alone.compilation_config is config.compilation_config  # where layers are found
    assert as_alone(alone) is alone


def test_replicas_keep_the_schedule():
    schedule = [[1, 4, 7], [5, 8, 0]]
    config = engine_config(
        data_parallel_size=2,
        speculative_config=sequoia(num_speculative_tokens_per_batch_size=schedule),
    )
    speculative = config.speculative_config
    assert [list(entry) for entry in speculative.num_speculative_tokens_per_batch_size] == schedule
    config._maybe_disable_dynamic_sd_for_data_parallel()  # engine cores ask again
    assert speculative.num_speculative_tokens_per_batch_size is not None
    del speculative._sequoia  # as of an engine without trees
    config._maybe_disable_dynamic_sd_for_data_parallel()
    assert speculative.num_speculative_tokens_per_batch_size is None


def test_several_reasons_are_reported_together():
    refused("pipeline", "use --kv-cache-dtype", pipeline_parallel_size=2, kv_cache_dtype="fp8")


@pytest.mark.parametrize(("preferred", "capability", "images", "taken"), [
    ("FLASHINFER", 10, False, "FlashTreeBackend"),
    ("TRITON_FLASHINFER", 10, True, "TritonTreeBackend"),
    ("TRITON_FLASH_ATTN", 9, True, "TritonTreeBackend"),
])  # fmt: skip
def test_backends_are_passed_over_and_refused_by_name(
    preferred, capability, images, taken, monkeypatch
):
    """Where vLLM prefers them, as on B200; there it was found out once all weights were loaded."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of the GPU build"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(
        CudaPlatformBase,
        "get_device_capability",
        lambda device_id=0: DeviceCapability(capability, 0),
    )
    layer = AttentionSelectorConfig(256, torch.bfloat16, "auto", 16, use_mm_prefix=images)
    ask = CudaPlatformBase.get_attn_backend_cls
    with GPUTreeBackend(torch.ones(1, 1, dtype=torch.bool)).replace_attention([]):
        assert taken in ask(None, layer)
        with pytest.raises(ValueError, match="trees cannot use it: leave --attention-backend out"):
            ask(AttentionBackendEnum[preferred], layer)


@pytest.mark.parametrize(
    ("module", "model"),
    [("kda_layers", "KimiLinearForCausalLM"), ("bailing_layers", "BailingMoeV3ForCausalLM")],
)
def test_layers_of_other_models_are_not_imported(module, model, monkeypatch):
    """They import vLLM's modules of whole models, and what these need."""
    monkeypatch.setitem(sys.modules, f"{layers_with_states.__package__}.{module}", None)
    monkeypatch.setattr(layers_with_states, "check_model", lambda _: None)
    monkeypatch.delattr(sys.modules[layers_with_states.__package__], module, raising=False)
    assert len(layers_with_states.layers_of(["Qwen3NextForCausalLM"])) == 3
    with pytest.raises(ImportError, match=module):
        layers_with_states.layers_of([model])


@pytest.mark.parametrize("kind", ["FlashTreeImpl", "TritonTreeImpl"])
def test_no_outputs_are_quantised_within_attention_with_trees(kind):
    """vLLM's passes ask each layer; its Triton attention can, and with `fuse_attn_quant` would."""
    impl = object.__new__(getattr(attention_gpu, kind))
    assert TritonAttentionImpl.fused_output_quant_supported(None, kFp8StaticTensorSym)
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [("alibi_slopes", [0.5], "ALiBi"), ("chunk_lookback", 1, "chunked local attention")],
)
def test_attention_features_are_found_in_the_layers(attribute, value, name, monkeypatch):
    """What no configuration shows is caught when the model is loaded."""
    impl = object.__new__(cpu_attention.CPUTreeAttentionImpl)
    layers = {"layer.0": SimpleNamespace(impl=impl)}
    monkeypatch.setattr(attention_layers, "get_layers_from_vllm_config", lambda *_: layers)
    check = cpu_attention.unsupported_attention
    assert attention_layers.supported_layers(None, check) == ["layer.0"]
    setattr(impl, attribute, value)
    with pytest.raises(ValueError, match=f"layer layer.0 uses {name}. Serve it without"):
        attention_layers.supported_layers(None, check)


def test_models_that_prepare_their_own_inputs():
    """Their classes may be a plugin's. Kimi K3's, since vLLM 0.33, only starts its decoder."""

    def state_of(module):
        return type("OwnModelState", (), {"__module__": module})()

    for module in (DefaultModelState.__module__, "vllm.models.kimi_k3.nvidia.model_state"):
        attention_layers.refuse_own_inputs(state_of(module))
    with pytest.raises(ValueError, match=r"OwnModelState prepares its inputs.*Serve it without"):
        attention_layers.refuse_own_inputs(state_of("vllm.models.kimi_k9"))


# -- what users write -------------------------------------------------------------------


def parsed(*arguments: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", TARGET, *arguments]))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculative-config", "sequoia"),
        ("-sc", "sequoia"),
        ("--speculative-config", '{"method": "sequoia"}'),
        ("--speculative-config", f'{{"method": "sequoia", "model": "{DRAFT}"}}'),
        ("--spec-method", "sequoia"),
        ("--spec-method", "sequoia", "--spec-model", DRAFT, "--spec-tokens", "7"),
    ],
)
def test_command_line_forms(arguments):
    config = parsed(*arguments).create_engine_config()
    assert SequoiaSettings.enabled(config)
    assert config.speculative_config.model == DRAFT
    drafts = config.speculative_config.num_speculative_tokens
    assert SequoiaSettings.of(config).tree.num_speculative_tokens == drafts
    assert (
        config.parallel_config.worker_cls
        == "sequoia_vllm.engine.worker.worker_cpu.SequoiaCPUWorker"
    )
    if "--spec-tokens" in arguments:
        assert drafts <= 7


def test_python_shorthand_and_repeated_creation():
    args = EngineArgs(model=TARGET, speculative_config="sequoia", max_model_len=256)
    for _ in range(2):
        assert SequoiaSettings.enabled(args.create_engine_config())


def test_other_methods_are_vllms_own():
    for speculative_config in (
        None,
        {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ):
        config = engine_config(speculative_config=speculative_config)
        assert not SequoiaSettings.enabled(config)
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.mark.parametrize("nonsense", ["nonsense", ["sequoia"], 3])
def test_what_is_not_ours_is_left_to_vllm(nonsense):
    assert request.sequoia_request(EngineArgs(model=TARGET, speculative_config=nonsense)) is None


def test_unknown_pair_is_refused_with_the_json_to_write(tmp_path):
    """Where a draft model is asked for; else none is needed."""
    target = str(shutil.copytree(TARGET, tmp_path / "target"))
    with pytest.raises(ConfigError, match='"model": "DRAFT"'):
        engine_config(model=target, speculative_config={"method": "sequoia", "drafter": "model"})
    config = engine_config(model=target, speculative_config="sequoia").speculative_config
    assert (config.model, SequoiaSettings.on(config).drafter) == (target, "lookup")


def test_num_speculative_tokens_is_an_upper_bound():
    for bound, drafts in ((3, 3), (15, 15), (100, 15)):
        config = engine_config(speculative_config=sequoia(num_speculative_tokens=bound))
        assert config.speculative_config.num_speculative_tokens == drafts


@pytest.mark.engine
def test_a_node_with_another_version_is_refused(monkeypatch):
    """The worker compares; here the front end claims to be of another version."""
    there = {**current_versions(), "sequoia-vllm": "9.9.9"}
    monkeypatch.setattr(frontend, "current_versions", lambda: there)
    said = r"sequoia-vllm \d.* here and 9\.9\.9 there"
    with pytest.raises(ConfigError, match=said), running(sequoia()):
        pass


@pytest.mark.engine
def test_another_device_than_the_trees_is_refused(monkeypatch):
    monkeypatch.setattr(worker_base, "current_device_name", lambda index: "Another CPU")
    chosen = TreeChoice(TokenTree.chain(3), "a test", device="This CPU")
    monkeypatch.setattr(plan, "choose_engine_tree", lambda *arguments: chosen)
    said = "for This CPU, but this replica runs on Another"
    with pytest.raises(ConfigError, match=said), running(sequoia()):
        pass
