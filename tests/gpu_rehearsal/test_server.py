"""``vllm serve`` on the GPU engine: an engine core in a process of its own, its graphs replayed."""

import json

import pytest
from vllm import SamplingParams

from tests.support.engines import generated, running
from tests.support.generating import random_prompts, save_related_pair
from tests.support.heads import save_mimo
from tests.support.interpreted import gpu_environment
from tests.support.serving import Server, environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LENGTHS = [9, 18]
TOKENS = 12


@pytest.mark.parametrize("own_layer", [False, True])
def test_a_server_replays_graphs_and_gives_plain_tokens(own_layer, tmp_path):
    """With a draft model, or the target's own MTP layer, which the shorthand finds.

    `test_ranks.py` has an EAGLE-3 head in processes of their own.
    """
    if own_layer:
        target, config = save_mimo(tmp_path / "target"), "sequoia"
    else:
        target, draft = save_related_pair(tmp_path)
        config = json.dumps({"method": "sequoia", "model": draft})
    requests = random_prompts(LENGTHS)
    variables = {**environment(), **gpu_environment(multiprocessing=True)}
    with Server(
        tmp_path / "server.log",
        f"--speculative-config={config}",
        # What the tiny models need; all else is left alone.
        "--dtype=float32", "--skip-tokenizer-init", "--max-num-seqs=2", "--max-model-len=128",
        model=target, variables={**variables, "GPU_STAND_IN_REPORT": str(tmp_path / "graphs")},
        start_deadline=480,  # kernels are interpreted: 60 on an idle machine
    ) as server:  # fmt: skip
        answer = server.complete(
            prompt=[request["prompt_token_ids"] for request in requests],
            temperature=0, max_tokens=TOKENS,
            extra_body={"ignore_eos": True, "return_token_ids": True, "detokenize": False},
        )  # fmt: skip
        accepted, trees = (
            sum(server.metric(f"vllm:spec_decode_num_{counted}_total"))
            for counted in ("accepted_tokens", "drafts")
        )
    found = [list(choice.token_ids) for choice in answer.choices]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    with running(None, model=target, skip_tokenizer_init=True) as llm:
        assert found == generated(llm, requests, params)
    # How many trees there are adaptation decides, by the clock. A draft model is right more often.
    assert accepted > (0.3 if own_layer else 1.5) * trees > 0
    [report] = tmp_path.glob("graphs.*")
    replayed = json.loads(report.read_text())["replayed"]
    assert all(replayed[kind] > 0 for kind in ("DraftGraphs", "TreeGraphManager"))
