"""What a configuration comes to for one target: draft, tree, settings and worker. No vLLM."""

import subprocess
import sys

import numpy as np
import pytest

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import DRAFTERS
from sequoia_vllm.engine.frontend.draft_choice import find_draft
from sequoia_vllm.engine.frontend.plan import Facts, plan
from sequoia_vllm.engine.frontend.tree_choice import look_up
from sequoia_vllm.hardware import context_rule
from sequoia_vllm.hardware.context_rule import ContextRule
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.metrics.prometheus import first_clause
from sequoia_vllm.tree import TokenTree
from tests.support.plans import planned

TARGET = "meta-llama/Llama-3.1-8B"


def resolved(target=TARGET, device="NVIDIA H200", facts=None, **keys):
    config = SequoiaConfig.parse({"method": "sequoia", **keys}).loaded()
    model = DRAFTERS["model"]
    draft, _ = find_draft(config, target, [model], lambda draft: model)
    pair = PairKey(device, target, draft, "bfloat16")
    return planned(config, pair, versions={"vLLM": "1"}, **(facts or {}))


def test_a_known_target_needs_no_draft():
    assert resolved().draft == "meta-llama/Llama-3.2-1B-Instruct"
    assert resolved(model="another/draft").draft == "another/draft"


def test_recurrent_layers_bound_a_chosen_tree():
    """A larger one is refused, so none may be chosen."""
    whole = resolved(tree="auto").choice.tree
    most = whole.size // 2
    found = resolved(tree="auto", facts={"most_nodes": most}).speculative_config
    assert found["num_speculative_tokens"] == most - 1
    given = resolved(tree={"size": 2 * most, "depth": 3}, facts={"most_nodes": most})
    assert given.choice.tree.size == 2 * most


def test_an_unknown_target_needs_one():
    with pytest.raises(ConfigError, match='"model": "DRAFT"'):
        resolved(target="nobody/knows-this")


def test_without_a_model_the_target_is_named_to_vllm_and_nothing_is_loaded(caplog):
    """Also where no draft is known, and the user names no kind."""
    kinds, text = [DRAFTERS["model"], DRAFTERS["lookup"]], DRAFTERS["lookup"]
    with caplog.at_level("INFO", logger="vllm.sequoia"):
        assert find_draft(SequoiaConfig(), "nobody/knows-this", kinds, None) == ("lookup", text)
    assert "as no draft model is known for the target 'nobody/knows-this'" in caplog.text
    with pytest.raises(ConfigError, match="no draft model is known"):
        find_draft(SequoiaConfig(drafter="model"), "nobody/knows-this", kinds, None)
    config = SequoiaConfig(drafter="lookup")
    assert find_draft(config, TARGET, kinds, None) == ("lookup", text)
    pair = PairKey("cpu", TARGET, "lookup", "bfloat16")
    found = planned(config, pair, "lookup")
    assert found.speculative_config["model"] == TARGET
    assert found.choice.tree != planned(config, pair).choice.tree  # made for its own vector
    with pytest.raises(ConfigError, match=r'"lookup" drafts without a model.*leave "model" out'):
        find_draft(SequoiaConfig(drafter="lookup", model="a/draft"), TARGET, kinds, None)
    with pytest.raises(ConfigError, match=r"loads no draft, and revision would be .*leave it out"):
        planned(SequoiaConfig(drafter="lookup", revision="main"), pair, "lookup")


def test_settings_are_those_of_the_chosen_tree():
    found = resolved(tree={"parents": [-1, 0, 0, 1]})
    assert found.speculates
    assert found.choice.tree == found.settings.tree == TokenTree((-1, 0, 0, 1))
    assert found.settings.tree_source == "given as parents"
    assert found.settings.chosen_for is None
    assert found.settings.versions == {"vLLM": "1"}


def test_flash_attention_reads_contexts_on_gpus_once_it_has_run_on_one(monkeypatch):
    """The settings, which workers unpickle, have the rule as plain data."""
    pair = PairKey("a device", TARGET, "a/draft", "bfloat16")
    for ran_on, rule in ((None, None), ("a GPU", (32, 524_288))):
        monkeypatch.setattr(context_rule, "_RAN_ON", ran_on)
        on_gpu = planned(SequoiaConfig(model="a/draft"), pair, on_cpu=False).settings
        assert on_gpu.context_rule == rule
        assert type(on_gpu.context_rule) in (tuple, type(None))
        assert planned(SequoiaConfig(), pair, on_cpu=True).settings.context_rule is None


def test_rows_and_contexts_decide_what_flash_attention_reads():
    rule = ContextRule(rows=32, product=64 * 8192)
    long, rows = np.array([8192, 8192]), np.array([32, 32])
    assert rule.holds(rows, long)
    assert not rule.holds(rows, long - 1)
    assert not rule.holds(rows[:1], long[:1])
    assert rule.holds(rows[:1], 2 * long[:1])
    assert not rule.holds(rows - 1, 2 * long)  # few rows are read at the speed of memory
    assert rule.holds(np.array([32, 0]), np.array([16384, 0]))
    assert not rule.holds(np.array([0, 0]), 100 * long)


def test_a_tree_of_the_library_was_chosen_for_the_device():
    found = resolved(model="meta-llama/Llama-3.2-1B", tree="auto")
    assert found.settings.chosen_for == "NVIDIA H200"
    assert found.choice.schedule


def test_metrics_show_the_name_of_a_tree_file_alone(tmp_path):
    path = tmp_path / "mine.json"
    TokenTree.chain(3).save(path)
    source = resolved(tree=str(path)).choice.source
    assert source == f"mine.json: {path}"
    assert first_clause(source) == "mine.json"


def resolved_with_head(levels, **keys):
    config = SequoiaConfig.parse({"method": "sequoia", "model": "a/head", **keys}).loaded()
    pair = PairKey("NVIDIA H200", TARGET, "a/head", "bfloat16")
    return planned(config, pair, "dflash", levels=levels).choice.tree


@pytest.mark.parametrize(
    "keys", [{}, {"tree": "auto"}, {"tree": {"size": 64}}, {"acceptance": "shipped"}]
)
def test_trees_that_we_choose_are_no_deeper_than_the_head_drafts(keys):
    for levels in (1, 2):
        assert resolved_with_head(levels, **keys).depth == levels
    assert resolved_with_head(None, **keys).depth > 2


def test_a_tree_that_is_given_may_be_too_deep_for_the_head(tmp_path):
    path = tmp_path / "mine.json"
    TokenTree.chain(5).save(path)
    for tree in ({"size": 6, "depth": 5, "branch": 1}, {"parents": [-1, 0, 1, 2, 3, 4]}, str(path)):
        assert resolved_with_head(5, tree=tree).depth == 5
        assert resolved_with_head(4, tree=tree, num_speculative_tokens=4).depth <= 4
        with pytest.raises(ConfigError) as error:
            resolved_with_head(4, tree=tree)
        assert "5 levels, and the DFlash head 'a/head' drafts 4 at most" in str(error.value)
        assert '"tree": {"size": 6, "depth": 4}' in str(error.value)


def test_the_output_layer_of_a_head_is_not_trimmed():
    with pytest.raises(ConfigError, match="'a/head' is a DFlash head, which has the output layer"):
        resolved_with_head(5, draft_vocabulary=9)


def test_a_root_alone_does_not_speculate():
    assert not resolved(tree={"parents": [-1]}).speculates


def test_a_schedule_has_no_more_drafts_than_the_tree_given():
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 8, 3]]}
    assert resolved(tree={"size": 8}, **schedule).choice.schedule == [(1, 4, 7), (5, 8, 3)]
    for tree in ({"size": 6}, {"parents": [-1, 0, 0, 1, 1, 2]}):
        with pytest.raises(ConfigError, match=r"\[1, 4, 7\] drafts more than the 5 that the tree"):
            resolved(tree=tree, **schedule)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5\): give at most 5"):
        resolved(tree={"size": 8}, num_speculative_tokens=5, **schedule)


def test_a_schedule_is_cut_to_the_tree_that_we_choose():
    schedule = [[1, 4, 4000], [5, 8, 2]]
    choice = resolved(tree="auto", num_speculative_tokens_per_batch_size=schedule).choice
    assert choice.schedule == [(1, 4, choice.tree.num_speculative_tokens), (5, 8, 2)]


def test_planning_takes_no_vllm():
    code = "import sys, tests.support.plans; assert not {'vllm', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_reads_no_file(monkeypatch):
    config = SequoiaConfig(model="a/draft", tree="auto")
    pair = PairKey("NVIDIA H200", TARGET, "a/draft", "bfloat16")
    facts = Facts(pair, DRAFTERS["model"], library=look_up(config, pair), file_name="a-pair")

    def refuse(*_, **__):
        raise AssertionError("read")

    with monkeypatch.context() as within:
        for name in ("builtins.open", "io.open", "os.stat", "os.scandir", "os.access"):
            within.setattr(name, refuse)
        found = plan(config, facts)
    assert found.settings.adapts_as == "a-pair"
    assert found.choice.device == "NVIDIA H200"


def test_what_vllm_is_asked_for():
    found = resolved(tree={"size": 4, "depth": 3}, max_model_len=99).speculative_config
    assert (found["method"], found["model"]) == ("draft_model", resolved().draft)
    assert (found["num_speculative_tokens"], found["max_model_len"]) == (3, 99)
    assert found["num_speculative_tokens_per_batch_size"] == [(1, 1, 3)]
    pair = PairKey("NVIDIA H200", TARGET, TARGET, "bfloat16")
    assert "model" not in planned(SequoiaConfig(drafter="mtp"), pair, "mtp").speculative_config


@pytest.mark.parametrize(("tree", "on_cpu", "worker"), [
    ({"size": 4}, True, "SequoiaCPUWorker"), ({"size": 4}, False, "SequoiaGPUWorker"),
    ({"parents": [-1]}, True, "PlainCPUWorker"), ({"parents": [-1]}, False, "PlainGPUWorker"),
])  # fmt: skip
def test_the_worker_is_ours_unless_nothing_is_drafted_here_alone(tree, on_cpu, worker):
    config = SequoiaConfig.parse({"method": "sequoia", "tree": tree}).loaded()
    pair = PairKey("NVIDIA H200", TARGET, "a/draft", "bfloat16")
    assert planned(config, pair, on_cpu=on_cpu, is_apart=True).worker_cls.endswith(f".{worker}")
    alone = planned(config, pair, on_cpu=on_cpu).worker_cls
    assert (alone == "auto") == worker.startswith("Plain")
