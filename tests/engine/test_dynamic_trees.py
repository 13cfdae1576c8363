"""Dynamic trees in V1 engines: who has them, and how they are counted.

What they emit `test_differential.py` compares.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.v2.drafting import request_modes
from sequoia_vllm.engine.v2.drafting.request_modes import RequestModes
from sequoia_vllm.tree import TokenTree
from tests.support.engines import runner_of, running, sequoia
from tests.support.models import prompts

pytestmark = pytest.mark.engine

KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "seeded, truncated": {"temperature": 1.0, "seed": 6, "top_k": 20, "min_p": 0.02},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seeded, edited": {
        "temperature": 0.8, "seed": 7, "bad_words": ["self", " in"], "min_tokens": 24,
        "stop_token_ids": list(range(260, 400)), "logit_bias": {300: 4.0, 301: -50.0},
    },
    "greedy, structured": {
        "temperature": 0, "structured_outputs": StructuredOutputsParams(regex=r"(x = \d+\n)+")
    },
    "sampled": {"temperature": 0.8},
}  # fmt: skip
DYNAMIC = {"greedy", "greedy, penalties"}


@pytest.fixture(scope="module")
def served():
    """Which topology each request's trees had, by kind; and counts."""
    names = [*KINDS, *KINDS]  # more than run at once
    params = [SamplingParams(max_tokens=40, **KINDS[name]) for name in names]
    topologies: dict[str, set[bool]] = {name: set() for name in KINDS}
    with running(sequoia(retrieval=True, dynamic_tree=None), max_num_seqs=6) as llm:
        runner = runner_of(llm)
        keep = runner._keep

        def noting(grown, requests, drafts):
            keep(grown, requests, drafts)
            for row, request in enumerate(requests.tolist()):
                if grown.is_told:  # in the place of a tree of either kind
                    continue
                name = names[int(runner.input_batch.req_ids[request].split("-")[0])]
                topologies[name].add(grown.layouts is not None)
                # What is verified by Q has it, for the engine's own tree.
                inner = grown.probs_rows[row, 0] >= 0 if name == "sampled" else True
                assert inner

        runner._keep = noting
        llm.generate(prompts(len(names)), params, use_tqdm=False)
        return topologies, runner.stats.counts


def test_only_greedy_requests_have_them(served):
    """Sampled requests keep the engine's tree, whose children are drawn without replacement."""
    topologies, _ = served
    assert topologies == {name: {name in DYNAMIC} for name in KINDS}


def test_counts_are_those_of_each_kind(served):
    """Trees by node are the dynamic ones, roots included; trees by child are the others, but for
    branches, which only the totals have."""
    _, counts = served
    dynamic = int(counts.scored_nodes[0])
    drafted = int(counts.depth_counts.sum())
    static, branches = drafted - dynamic, counts.trees - drafted
    assert min(dynamic, static) > 5
    assert counts.offered[0, 0] <= static
    told = counts.tokens - (counts.accepted_nodes.sum() + counts.accepted.sum() + static)
    assert branches <= told <= 64 * branches
    assert (counts.accepted_nodes <= counts.scored_nodes).all()
    # The likeliest nodes come first.
    assert counts.accepted_nodes[1:5].sum() > 3 * counts.accepted_nodes[5:].sum()


def test_on_gpus_they_are_for_batches_in_which_nobody_has_a_static_one(monkeypatch):
    """A request that never drafts is in nobody's way."""

    def on_host(count, dtype):
        return SimpleNamespace(np=np.zeros(count, dtype=np.int32))

    monkeypatch.setattr(request_modes, "UvaBackedTensor", on_host)
    modes = RequestModes(3, longest=99)
    given = ({"temperature": 0}, {"temperature": 0.9}, {"extra_args": {MOST_DRAFTS: 0}})
    for slot, options in enumerate(given):
        modes.start(slot, SamplingParams(max_tokens=40, **options), prompt_tokens=4)
    assert modes.can_choose(np.array([0, 2]))
    assert not modes.can_choose(np.array([0, 1]))


@pytest.mark.parametrize(
    ("dynamic", "adapts_as", "static"), [(True, "a file", 2), (True, None, 0), (False, None, 32)]
)
def test_engines_that_adapt_learn_from_some_static_trees(dynamic, adapts_as, static):
    tree = TokenTree((-1, 0, 0, 1))
    settings = SequoiaSettings(tree, "", None, {}, dynamic_tree=dynamic, adapts_as=adapts_as)
    assert sum(map(settings.is_static_step, range(1, 33))) == static
