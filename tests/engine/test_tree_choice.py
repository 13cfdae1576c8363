"""The ``tree`` setting: files, names, sizes, "auto", and what the engine is told."""

import json
import logging
import shutil

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common import draft_schedule
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend import engine_config, plan, tree_choice
from sequoia_vllm.engine.frontend.drafts import DraftReader
from sequoia_vllm.engine.runner import cpu_linear
from sequoia_vllm.engine.worker.worker_base import AgreeingWorker
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import Selection
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.tree import TokenTree
from tests.support.engines import configured, sequoia
from tests.support.models import DRAFT, TARGET, save_random_draft
from tests.support.plans import chosen

MODEL = drafter("model")
EMBEDDED = {"method": "sequoia", "model": DRAFT}
H200 = PairKey("NVIDIA H200", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "bfloat16")


def choose(pair: PairKey = H200, **keys):
    return chosen(SequoiaConfig.parse({"method": "sequoia", **keys}).loaded(), pair)


def test_trees_that_we_choose_leave_room_for_tokens():
    config = SequoiaConfig(tree="auto")
    whole = chosen(config, H200, max_model_len=4096)
    assert whole == choose(tree="auto")
    short = chosen(config, H200, max_model_len=128)
    assert short.tree == whole.tree.trim(32)
    assert max(drafts for _, _, drafts in short.schedule) == 31
    assert [entry[:2] for entry in short.schedule] == [entry[:2] for entry in whole.schedule]
    assert "its first 32 nodes" in short.source
    given = SequoiaConfig(tree={"size": 64})
    assert chosen(given, H200, max_model_len=128).tree.size == 64


def test_nothing_given_is_auto_where_that_speculates():
    assert choose() == choose(tree="auto")


def test_size_with_an_acceptance_vector(tmp_path):
    assert choose(tree={"size": 4}, acceptance=[0.9]).tree == TokenTree.chain(3)
    assert choose(tree={"size": 4}, acceptance=[0.34, 0.33, 0.33]).tree.depth == 1
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"acceptance": [0.9]}), encoding="utf-8")
    assert choose(acceptance=str(path)).tree.max_branch == 1


@pytest.mark.parametrize("has_own_layers", [False, True])
def test_compiled_code_is_kept_whatever_the_tree(has_own_layers, monkeypatch):
    """vLLM keys it by a hash of the configuration; plain decoding's serves trees, too.

    But where a CPU has no bfloat16 instructions layers call another operator.
    """
    monkeypatch.setattr(cpu_linear, "pays_here", lambda dtype: has_own_layers)

    def compiled_as(speculative_config) -> str:
        return configured(speculative_config, dtype="bfloat16").compute_hash()

    trees = [{"size": 16, "depth": 4}, {"size": 8, "depth": 2}, {"parents": [-1, 0, 0]}]
    chain = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4}
    [key] = {compiled_as(sequoia(tree=tree)) for tree in trees}
    assert (key != compiled_as(chain)) == has_own_layers


def source(target: str, draft: str, **keys) -> str:
    """What an engine of this pair says of its tree, on a device with trees on the CPU."""
    config = configured({"method": "sequoia", "model": draft, **keys}, model=target)
    return SequoiaSettings.of(config).tree_source


@pytest.fixture
def epyc(monkeypatch, tmp_path):
    """A CPU that the library knows, and no trees tuned on it."""
    monkeypatch.setattr(engine_config, "current_device_name", lambda: "AMD EPYC")
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "trees"))


@pytest.mark.usefixtures("epyc")
def test_trees_are_computed_from_what_vllm_says_of_the_models(tmp_path, monkeypatch):
    """A draft that the library has nothing of: 64 wide, one layer, its own output matrix."""
    draft = save_random_draft(tmp_path / "draft-7B")
    assert "default size; the library has no trees for this pair" in source(TARGET, str(draft))
    monkeypatch.setattr(engine_config, "current_device_name", lambda: "NVIDIA L40S")
    found = source(TARGET, str(draft))
    assert "computed for a target of 4.16m and a draft of 0.561m parameters" in found
    assert "(bfloat16, TP size 1)" in found
    assert "(roofline, not measured)" in found


@pytest.mark.usefixtures("epyc")
def test_the_embedded_pair_is_known_by_its_files(tmp_path):
    shutil.copytree(TARGET, tmp_path / "anything")
    assert source(TARGET, DRAFT) == source(str(tmp_path / "anything"), DRAFT)
    assert "tree x86-cpu/4.16m-1.67m/embedded-greedy" in source(TARGET, DRAFT)


def test_shapes_of_both_models(tmp_path):
    target = EngineArgs(model=TARGET).create_model_config()
    shapes = DraftReader(target, SequoiaConfig()).shapes(DRAFT, MODEL)
    assert shapes.problem is None
    assert (shapes.target.layers, shapes.draft.layers) == (4, 2)
    assert shapes.target.hidden == 256
    assert (shapes.draft.hidden, shapes.draft.head_size, shapes.draft.tied) == (192, 32, True)
    assert not shapes.quantized
    quantized = DraftReader(target, SequoiaConfig(quantization="fp8")).shapes(DRAFT, MODEL)
    assert quantized.draft.layer_weight_bytes == 1.0
    in_fp8 = DraftReader(target, SequoiaConfig()).shapes(DRAFT, MODEL, has_fp8_cache=True)
    assert (in_fp8.target.kv_value_bytes, in_fp8.draft.kv_value_bytes) == (1.0, 1.0)
    missing = DraftReader(target, SequoiaConfig()).shapes(str(tmp_path / "nowhere"), MODEL)
    assert missing.target == shapes.target
    assert missing.draft is None
    assert missing.problem.startswith("cannot read the configuration of")


def test_shapes_are_read_only_where_the_tree_depends_on_them(monkeypatch):
    def read(*_):
        raise AssertionError("read")

    monkeypatch.setattr(DraftReader, "shapes", read)
    config = configured({**EMBEDDED, "tree": {"parents": [-1, 0]}})
    assert SequoiaSettings.of(config).tree.size == 2
    with pytest.raises(AssertionError, match="read"):
        configured(EMBEDDED)


def declining(pair, monkeypatch):
    """Makes the library answer: do not speculate."""
    nothing = {"tree": TokenTree((-1,)), "schedule": [(1, 256, 0)]}
    entry = TreeLibrary().entry("h200/8b-1b/shipped").model_copy(update=nothing)
    monkeypatch.setattr(TreeLibrary, "select", lambda *_: Selection(entry, "too slow here"))


def test_engine_without_speculation_is_plain_vllm(monkeypatch):
    declining(H200, monkeypatch)
    config = configured({**EMBEDDED, "tree": "auto"})
    assert SequoiaSettings.declined(config)
    assert not SequoiaSettings.enabled(config)
    assert config.speculative_config is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def of_two_nodes(**keys) -> VllmConfig:
    nodes = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}
    return configured({**EMBEDDED, **keys}, **nodes)


def test_a_node_without_speculation_asks_whether_the_others_have_any(monkeypatch):
    declining(H200, monkeypatch)
    config = of_two_nodes(tree="auto")
    assert SequoiaSettings.declined(config)
    assert config.parallel_config.worker_cls == plan.PLAIN_WORKERS["cpu"]
    assert issubclass(resolve_obj_by_qualname(plan.PLAIN_WORKERS["cpu"]), AgreeingWorker)


def test_nodes_that_choose_for_themselves_are_warned(monkeypatch):
    said = []
    monkeypatch.setattr(
        engine_config.logger, "log",
        lambda level, _, line: said.append(line) if level == logging.WARNING else None,
    )  # fmt: skip
    of_two_nodes()  # one directory is given, which may be on all nodes
    monkeypatch.delenv("SEQUOIA_VLLM_TREES")
    of_two_nodes(tree={"parents": [-1, 0]})
    assert said == []
    of_two_nodes()
    assert "a later start will be refused" in said[0]


def limited(size: int = 64, **options):
    """The configuration of an engine, with a schedule of its own unless one is given."""
    config = sequoia(size=size, **options.pop("keys", {}))
    return configured(config, max_model_len=1024, **options)


def scheduled(config) -> list[tuple[int, int, int]]:
    ranges = config.speculative_config.num_speculative_tokens_per_batch_size
    return [tuple(entry) for entry in ranges]


@pytest.fixture
def log(caplog, monkeypatch) -> pytest.LogCaptureFixture:
    """What schedules log: by another logger, as the first configuration sets vLLM's up anew."""
    monkeypatch.setattr(draft_schedule, "logger", logging.getLogger("schedules"))
    caplog.set_level(logging.INFO, "schedules")
    return caplog


def test_default_limits_have_room_for_prompts(log):
    """2,048 tokens per step and 128 requests here; whole trees would take all with 32."""
    config = limited()
    assert config.scheduler_config.max_num_batched_tokens == 2048
    ranges = [(1, 16, 63), (17, 32, 31), (33, 64, 15), (65, 128, 7)]
    assert scheduled(config) == ranges
    assert config.speculative_config.num_speculative_tokens == 63
    [line] = [m for m in log.messages if "drafts by batch size" in m]
    assert "max_num_batched_tokens=2048: 1 to 16: 63, 17 to 32: 31" in line


def test_schedules_of_the_library_are_fitted_too(monkeypatch):
    found = tree_choice.TreeChoice(TokenTree.chain(9), "measured", [(1, 4, 9), (5, 256, 5)])
    monkeypatch.setattr(tree_choice, "_resolve", lambda *given: found)
    assert scheduled(limited(max_num_seqs=64)) == [(1, 4, 9), (5, 256, 5)]
    fitted = [(1, 4, 9), (5, 21, 5), (22, 32, 3)]
    assert scheduled(limited(max_num_seqs=32, max_num_batched_tokens=256)) == fitted


def test_given_schedules_are_kept_with_a_warning(log):
    keys = {"num_speculative_tokens_per_batch_size": [[1, 64, 63]]}
    config = limited(keys=keys, max_num_seqs=64)
    assert scheduled(config) == [(1, 64, 63)]
    [line] = [m for m in log.messages if "given schedule" in m]
    assert "at batch size 32 the given schedule takes 2080 tokens" in line
    assert "max_num_batched_tokens=2048" in line
    log.clear()
    limited(keys=keys, max_num_seqs=31)
    assert not any("given schedule" in m for m in log.messages)


def test_trees_may_be_larger_where_steps_wait_for_weights(monkeypatch):
    monkeypatch.setattr(engine_config, "refuse_unsupported", lambda _: None)  # CPUs, of offloading
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 8192}
    assert scheduled(limited(**limits)) == [(1, 16, 63), (17, 32, 31)]
    assert scheduled(limited(**limits, cpu_offload_gb=1)) == [(1, 1, 63)]


def test_cuda_graphs_reach_as_far_as_the_schedule(monkeypatch, log):
    """Model Runner V2's graphs. Here vLLM takes the sizes away after that: CPUs have no graphs."""
    planned, plan_schedule = [], draft_schedule.plan_schedule

    def plan(vllm_config, keep_schedule):
        with monkeypatch.context() as within:
            within.setattr(VllmConfig, "use_v2_model_runner", True)
            plan_schedule(vllm_config, keep_schedule)
        planned.append(vllm_config.compilation_config.cudagraph_capture_sizes)

    monkeypatch.setattr(draft_schedule, "plan_schedule", plan)
    limited(max_num_seqs=16)
    limited(max_num_seqs=2)
    limited(max_num_seqs=16, cudagraph_capture_sizes=[1, 2, 64])
    limited(max_num_seqs=16, max_cudagraph_capture_size=256)
    assert [sizes and sizes[-1] for sizes in planned] == [1024, 256, 64, None]
    assert 960 in planned[0]
    assert planned[2] == [1, 2, 64]
    assert not any("without CUDA graphs" in m for m in log.messages)
    keys = {"num_speculative_tokens_per_batch_size": [[1, 32, 63]]}
    limited(keys=keys, max_num_seqs=32, enforce_eager=True)
    assert not any("without CUDA graphs" in m for m in log.messages)
    limited(keys=keys, max_num_seqs=32)
    [line] = [m for m in log.messages if "without CUDA graphs" in m]
    assert "from 17 requests on" in line
    assert "more than 1024 tokens" in line
