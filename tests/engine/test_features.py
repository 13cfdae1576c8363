"""What engines can do besides decoding, with trees: the tokens are those of plain vLLM."""

import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm
from vllm.sampling_params import BeamSearchParams

from sequoia_vllm.bench.measure import NEAR_TIE
from sequoia_vllm.engine.runner import cpu_linear
from tests.support.conversing import converse, turns
from tests.support.engines import generated, metric, plain_outputs, runner_of, running, sequoia
from tests.support.generating import counted, greedy_and_seeded, joined
from tests.support.models import TARGET, prompts
from tests.support.quantised import QUANTISED, save_quantised

pytestmark = pytest.mark.engine

PROMPTS = prompts(12)
SMALL_CACHE = {"kv_cache_memory_bytes": 7 << 20, "block_size": 32}
PARAMS = greedy_and_seeded(12, 48, 0.8)
RANKED = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)


def test_priority_scheduling():
    priorities, tokens, ended = [(-place) % 5 for place in range(12)], {}, []
    with running(sequoia(), scheduling_policy="priority", **SMALL_CACHE) as llm:
        for place, request in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            llm.llm_engine.add_request(str(place), *request, priority=priorities[place])
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
                ended += [priorities[int(output.request_id)]] * output.finished
        assert metric(llm, "vllm:num_preemptions") > 5
        assert metric(llm, "sequoia:trees") > 100
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 200
    assert [tokens[place] for place in range(12)] == plain_outputs(PROMPTS, PARAMS)
    assert ended[:3] == [0, 0, 0]
    assert ended[-3:] == [4, 4, 4]


def test_prefix_cache_reset_and_pauses():
    """Between generations and amid one: the same trees again, which are as good.

    A reset amid one preempts all: each request reads its tokens again, in a step without a tree.
    """
    expected = plain_outputs(PROMPTS, PARAMS)

    def disturb(step: int) -> None:
        if step in (4, 8, 12):
            assert llm.reset_prefix_cache(reset_running_requests=True)
        if step == 14:
            llm.sleep(level=0, mode="keep")
            assert llm.llm_engine.step() == []
            llm.wake_up(tags=["scheduling"])

    with running(sequoia(), enable_prefix_caching=True, block_size=32, max_num_seqs=12) as llm:

        def again() -> dict:
            assert generated(llm, PROMPTS, PARAMS) == expected
            return counted(llm)

        first = again()
        assert first["tokens_per_tree"] > 1.5
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert llm.reset_prefix_cache()
        assert trees_of(again()) == trees_of(first)
        assert metric(llm, "vllm:prefix_cache_hits") == hits

        found = joined(llm, PROMPTS, PARAMS, every=0, before_step=disturb)
        assert [tokens for [tokens] in found] == expected
        assert metric(llm, "vllm:num_preemptions") == 3 * 12
        assert counted(llm)["tokens_per_tree"] > 0.95 * first["tokens_per_tree"]

        assert llm.reset_prefix_cache()
        assert trees_of(again()) == trees_of(first)


def trees_of(stats: dict) -> tuple:
    return stats["tree_steps"], stats["tokens"], stats["depth_counts"]


def test_beam_search():
    """Each beam is a request for one token, which no tree helps with; others have theirs."""

    def beams(llm) -> list:
        params = BeamSearchParams(beam_width=3, max_tokens=12)
        found = llm.beam_search([{"prompt": text} for text in PROMPTS[:3]], params)
        return [[(one.tokens, one.cum_logprob) for one in output.sequences] for output in found]

    with running() as llm:
        plain = beams(llm)
    expected = plain_outputs(PROMPTS, PARAMS)
    with running(sequoia()) as llm:
        for _ in range(2):
            found = beams(llm)
            assert generated(llm, PROMPTS, PARAMS) == expected
        assert metric(llm, "sequoia:trees") > 200
    for ours, theirs in zip(found, plain, strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], 1e-4)


@pytest.mark.sharded
def test_a_target_in_int8(tmp_path, monkeypatch):
    """With the draft of the target as it was. vLLM's other kernel, for AMX, takes no float32."""
    monkeypatch.setattr(scaled_mm, "check_cpu_sgl_kernel", lambda *_: False)
    plain, trees = quantised(tmp_path, "int8", PARAMS)
    assert [one.token_ids for one in trees] == [one.token_ids for one in plain]


def test_a_target_in_int4(tmp_path):
    """It computes in bfloat16, which rounds by the batch's size: answers may part at near ties."""
    part_at_near_ties(*quantised(tmp_path, "int4", RANKED))


def part_at_near_ties(answers: list, others: list, dtype: str = "bfloat16") -> None:
    """Checks that fewer than half of the greedy answers part, and only there: none in float32."""
    parted = 0
    for plain, trees in zip(answers, others, strict=True):
        tokens = zip(plain.token_ids, trees.token_ids, plain.logprobs, strict=True)
        for wanted, found, likely in tokens:
            if wanted != found:
                assert likely[wanted].logprob - likely[found].logprob <= NEAR_TIE.get(dtype, -1.0)
                parted += 1
                break
    assert parted < len(PROMPTS) / 2


def has_our_kernel(llm) -> bool:
    layer = runner_of(llm).model.model.layers[0].mlp.down_proj
    return vars(layer)["cpu_linear"] is torch.ops.sequoia_vllm.linear_rows


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        pytest.param(None, "bfloat16", id="ours"),
        pytest.param(None, "float32", id="ours, float32"),
        pytest.param(False, "bfloat16", id="vLLM's"),
        pytest.param(False, "float16", id="vLLM's, float16", marks=pytest.mark.sharded),
    ],
)
def test_linear_layers_for_few_rows_and_half_precision(asked, dtype, monkeypatch):
    """They are ours on CPUs without bfloat16 instructions, unless the user says no."""
    monkeypatch.setattr(cpu_linear, "pays_here", lambda dtype: dtype != torch.float16)
    options = {"dtype": dtype}
    if asked is not None:
        options["additional_config"] = {cpu_linear.KEY: asked}
    found, sets = [], []
    for config in (None, sequoia()):
        with running(config, **options) as llm:
            outputs = llm.generate(PROMPTS, RANKED, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
            if config:
                assert counted(llm)["tokens_per_tree"] > 1.3
            sets.append(instruction_sets(llm))
            expected = config is not None and asked is None
            assert has_our_kernel(llm) == expected
            if expected:
                llm.collective_rpc("reload_weights")
                assert has_our_kernel(llm)
                again = llm.generate(PROMPTS, RANKED, use_tqdm=False)
                part_at_near_ties(found[-1], [output.outputs[0] for output in again], dtype)
    part_at_near_ties(*found, dtype)
    assert sets[1] == sets[0]  # also AMX's, whose caches are packed


def instruction_sets(llm) -> set[str]:
    """Those of the attention of target and draft: with others vLLM would read prompts slowly."""
    layers = runner_of(llm).compilation_config.static_forward_context.values()
    return {layer.isa for layer in layers if hasattr(layer, "isa")}


def quantised(folder, how: str, params) -> list[list]:
    model, found = save_quantised(folder / how, TARGET, how), []
    for config in (None, sequoia()):
        with running(config, model=model, dtype=QUANTISED[how].dtype) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
            assert config is None or counted(llm)["tokens_per_tree"] > 1.3
    return found


def test_streamed_prompts():
    """A turn that ends amid an accepted path keeps of it what was emitted, but for the last.

    Each piece comes after an answer; then all are there from the start.
    """
    params = greedy_and_seeded(6, range(9, 15), 0.8)
    found = []
    for config in (None, sequoia()):
        with running(config, block_size=32) as llm:
            pieces = turns(PROMPTS[:6], llm.get_tokenizer())
            for at_once in (False, True):
                found.append(converse(llm, pieces, params, at_once))
                assert config is None or counted(llm)["tokens_per_tree"] > 1.3
    assert found[2:] == found[:2]
