"""What a configuration comes to for one target: draft, tree, gain, settings, worker. No vLLM."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from examples.smollm2 import cached_folder
from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import DRAFTERS
from sequoia_vllm.engine.frontend.draft_choice import find_draft
from sequoia_vllm.engine.frontend.plan import plan
from sequoia_vllm.engine.frontend.tree_choice import ExpectedGain, Facts, gain_line, look_up
from sequoia_vllm.hardware import graph_sizes
from sequoia_vllm.hardware.graph_sizes import ContextRule
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.metrics.prometheus import first_clause
from sequoia_vllm.tree import TokenTree
from tests.support.commands import python
from tests.support.plans import chosen, planned

ROOT = Path(__file__).parents[2]
TARGET = "meta-llama/Llama-3.1-8B"
PAIR = PairKey("NVIDIA H200", TARGET, "a/draft", "bfloat16")


def resolved(target=TARGET, device="NVIDIA H200", facts=None, **keys):
    config = SequoiaConfig.parse({"method": "sequoia", **keys}).loaded()
    model = DRAFTERS["model"]
    draft, _ = find_draft(config, target, [model], lambda draft: model)
    pair = PairKey(device, target, draft, "bfloat16")
    return planned(config, pair, versions={"vLLM": "1"}, **(facts or {}))


def test_recurrent_layers_bound_a_chosen_tree():
    """A larger one is refused, so none may be chosen."""
    whole = resolved(tree="auto").choice.tree
    most = whole.size // 2
    found = resolved(tree="auto", facts={"most_nodes": most}).speculative_config
    assert found["num_speculative_tokens"] == most - 1
    given = resolved(tree={"size": 2 * most, "depth": 3}, facts={"most_nodes": most})
    assert given.choice.tree.size == 2 * most


def test_without_a_model_the_target_is_named_to_vllm_and_nothing_is_loaded(caplog):
    """Also where no draft is known, and the user names no kind."""
    kinds, text = [DRAFTERS["model"], DRAFTERS["lookup"]], DRAFTERS["lookup"]

    def found(target, **keys):
        return find_draft(SequoiaConfig(**keys), target, kinds, None)

    with caplog.at_level("INFO", logger="vllm.sequoia"):
        assert found("nobody/knows-this") == found(TARGET, drafter="lookup") == ("lookup", text)
    assert "as no draft model is known for the target 'nobody/knows-this'" in caplog.text
    with pytest.raises(ConfigError, match="no draft model is known"):
        found("nobody/knows-this", drafter="model")
    with pytest.raises(ConfigError, match=r'"lookup" drafts without a model.*leave "model" out'):
        found(TARGET, drafter="lookup", model="a/draft")
    config, pair = SequoiaConfig(drafter="lookup"), PairKey("cpu", TARGET, "lookup", "bfloat16")
    plan_ = planned(config, pair, "lookup")
    assert plan_.speculative_config["model"] == TARGET
    assert plan_.choice.tree != planned(config, pair).choice.tree  # made for its own vector
    with pytest.raises(ConfigError, match=r"loads no draft, and revision would be .*leave it out"):
        planned(SequoiaConfig(drafter="lookup", revision="main"), pair, "lookup")


def test_settings_are_those_of_the_chosen_tree():
    found = resolved(tree={"parents": [-1, 0, 0, 1]})
    assert found.speculates
    assert found.choice.tree == found.settings.tree == TokenTree((-1, 0, 0, 1))
    assert found.settings.tree_source == "given as parents"
    assert found.settings.chosen_for is None
    assert found.settings.versions == {"vLLM": "1"}
    assert not resolved(tree={"parents": [-1]}).speculates  # the root alone


def test_flash_attention_reads_contexts_on_gpus_once_it_has_run_on_one(monkeypatch):
    """The settings, which workers unpickle, have the rule as plain data."""
    for ran_on, rule in ((None, None), ("a GPU", (32, 524_288))):
        monkeypatch.setattr(graph_sizes, "_RAN_ON", ran_on)
        on_gpu = planned(SequoiaConfig(model="a/draft"), PAIR, on_cpu=False).settings
        assert on_gpu.context_rule == rule
        assert type(on_gpu.context_rule) in (tuple, type(None))
        assert planned(SequoiaConfig(), PAIR, on_cpu=True).settings.context_rule is None


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


@pytest.mark.parametrize(("kind", "on_v2", "given", "dynamic"), [
    ("model", False, None, True), ("lookup", False, None, False), ("model", True, None, False),
    ("eagle3", True, None, False), ("eagle3", True, True, True), ("model", False, False, False),
])  # fmt: skip
def test_dynamic_trees_are_decided_once(kind, on_v2, given, dynamic):
    """Both runners read the setting as it stands."""
    config = SequoiaConfig(dynamic_tree=given)
    assert planned(config, PAIR, kind, on_v2=on_v2).settings.dynamic_tree is dynamic


def test_the_example_in_python_is_one_that_pays():
    """On a CPU, by its start-up log and the page's sentence."""
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 'str(cached_folder()),\n        speculative_config={"method": "sequoia"},' in code
    draft = str(ROOT / "examples/models/smollm2-draft")
    pair = PairKey("AMD EPYC", str(cached_folder()), draft, "bfloat16")
    [(_, line), _] = planned(SequoiaConfig(), pair, on_cpu=True).notes
    [said] = re.findall(r"\n?two CPU cores (\d\.\d\dx) plain decoding is expected", text)
    assert f"expected {said} plain decoding, one request (measured)" in line


def test_the_source_of_a_tree(tmp_path):
    found = resolved(model="meta-llama/Llama-3.2-1B", tree="auto")
    assert found.settings.chosen_for == "NVIDIA H200"
    assert found.choice.schedule
    path = tmp_path / "mine.json"
    TokenTree.chain(3).save(path)
    source = resolved(tree=str(path)).choice.source
    assert source == f"mine.json: {path}"
    assert first_clause(source) == "mine.json"  # what metrics show


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
    with pytest.raises(ConfigError, match="'a/head' is a DFlash head, which has the output layer"):
        resolved_with_head(5, draft_vocabulary=9)


def test_a_schedule_has_no_more_drafts_than_the_tree_given():
    """It is cut to a tree that we choose."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 8, 3]]}
    assert resolved(tree={"size": 8}, **schedule).choice.schedule == [(1, 4, 7), (5, 8, 3)]
    for tree in ({"size": 6}, {"parents": [-1, 0, 0, 1, 1, 2]}):
        with pytest.raises(ConfigError, match=r"\[1, 4, 7\] drafts more than the 5 that the tree"):
            resolved(tree=tree, **schedule)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5\): give at most 5"):
        resolved(tree={"size": 8}, num_speculative_tokens=5, **schedule)
    schedule["num_speculative_tokens_per_batch_size"] = [[1, 4, 4000], [5, 8, 2]]
    choice = resolved(tree="auto", **schedule).choice
    assert choice.schedule == [(1, 4, choice.tree.num_speculative_tokens), (5, 8, 2)]


def test_planning_takes_no_vllm():
    python("import sys, tests.support.plans; assert not {'vllm', 'torch'} & sys.modules.keys()")


def test_a_plan_reads_no_file(monkeypatch):
    config = SequoiaConfig(model="a/draft", tree="auto")
    facts = Facts(PAIR, DRAFTERS["model"], library=look_up(config, PAIR), file_name="a-pair")

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
    known = "meta-llama/Llama-3.2-1B-Instruct"
    assert (found["method"], found["model"]) == ("draft_model", known)
    assert (found["num_speculative_tokens"], found["max_model_len"]) == (3, 99)
    assert found["num_speculative_tokens_per_batch_size"] == [(1, 1, 3)]
    assert "model" not in planned(SequoiaConfig(drafter="mtp"), PAIR, "mtp").speculative_config


@pytest.mark.parametrize(("tree", "on_cpu", "worker"), [
    ({"size": 4}, True, "SequoiaCPUWorker"), ({"size": 4}, False, "SequoiaGPUWorker"),
    ({"parents": [-1]}, True, "PlainCPUWorker"), ({"parents": [-1]}, False, "PlainGPUWorker"),
])  # fmt: skip
def test_the_worker_is_ours_unless_nothing_is_drafted_here_alone(tree, on_cpu, worker):
    config = SequoiaConfig.parse({"method": "sequoia", "tree": tree}).loaded()
    assert planned(config, PAIR, on_cpu=on_cpu, is_apart=True).worker_cls.endswith(f".{worker}")
    alone = planned(config, PAIR, on_cpu=on_cpu).worker_cls
    assert (alone == "auto") == worker.startswith("Plain")


ADAPTS = "drafts as many as measurements show to pay"


def line(gain, size=16, adapts=True, on_cpu=False):
    level, text = gain_line(gain, "draft model d", size, 4, adapts=adapts, on_cpu=on_cpu)
    assert text.startswith(f"draft model d; up to {size - 1} drafts, depth 4: ")
    assert len(text) < 240
    return level, text.split("depth 4: ")[1]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (ExpectedGain(2.118, "measured", 3.0),
         "expected 2.12x plain decoding, one request (measured)"),
        (ExpectedGain(tokens=3.0), "expected 3.00 tokens per step, if acceptance is as assumed"),
        (ExpectedGain(), "what it brings is not known before it runs"),
    ],
)  # fmt: skip
def test_what_is_expected(gain, words):
    assert line(gain) == (logging.INFO, f"{words}; {ADAPTS}")
    assert line(gain, adapts=False) == (logging.INFO, words)


@pytest.mark.parametrize(
    ("gain", "size", "words"),
    [
        (ExpectedGain(1.0, "measured", 1.0), 16, "expected not to pay here"),
        (ExpectedGain(made_for="h200"), 128, "made for h200, and may not pay here"),
        (ExpectedGain(tokens=4.0), 128, "more drafts than usually pay on CPUs, 63"),
    ],
)
def test_warnings_are_for_those_who_force_drafts(gain, size, words):
    assert line(gain, size, on_cpu=True) == (logging.INFO, f"{words}; {ADAPTS}")
    level, text = line(gain, size, adapts=False, on_cpu=True)
    assert level == logging.WARNING
    assert text == f'{words}; it drafts all the same, as "adapt" or a schedule fixes that'


def test_many_nodes_are_for_gpus():
    for on_cpu, gain in ((False, ExpectedGain(tokens=4.0)), (True, ExpectedGain(1.3, "measured"))):
        assert line(gain, 128, adapts=False, on_cpu=on_cpu)[0] == logging.INFO


H200 = PairKey("NVIDIA H200", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-1B", "bfloat16")
EPYC = PairKey("AMD EPYC", "examples/models/target", "examples/models/draft", "float32")


def gain(pair=H200, **keys):
    config = SequoiaConfig.parse({"method": "sequoia", **keys}).loaded()
    return chosen(config, pair).gain


def test_the_expected_gain_is_of_the_choice(tmp_path):
    found = gain(tree="auto")
    assert found.speedup > 1
    assert found.source == "roofline, not measured"
    assert gain(tree="h200/70b-1b/shipped").speedup > 1
    assert gain(EPYC, tree="h200/70b-1b/shipped") == ExpectedGain(made_for="h200")
    assert gain(EPYC).speedup <= 1  # and 16 nodes are drafted all the same
    assert gain(tree={"size": 16}).tokens > 2
    assert gain(tree={"parents": [-1, 0]}) == ExpectedGain()
    path = tmp_path / "chain.json"
    TokenTree.chain(3).save(path)
    assert gain(tree=str(path)) == ExpectedGain()
