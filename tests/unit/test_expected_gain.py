"""The line on an engine's tree: what it is expected to bring, or that it may not pay."""

import logging

import pytest

pytest.importorskip("torch")

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.engine.frontend.tree_choice import ExpectedGain, gain_line
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.tree import TokenTree
from tests.support.plans import chosen

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
    assert gain(EPYC).pays is False  # and 16 nodes are drafted all the same
    assert gain(tree={"size": 16}).tokens > 2
    assert gain(tree={"parents": [-1, 0]}) == ExpectedGain()
    path = tmp_path / "chain.json"
    TokenTree.chain(3).save(path)
    assert gain(tree=str(path)) == ExpectedGain()
