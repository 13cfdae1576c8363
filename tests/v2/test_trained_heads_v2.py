"""vLLM's own chains of the example heads accept what the script that trained them measures.

The script computes a head's drafts with torch alone, from its own reading of the checkpoint: the
two agree if layers, norms, residuals, positions and masks are those that vLLM serves it with.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.engines import metric, runner_of, running, tokens_of
from tests.support.models import MODELS, prompts
from tests.support.on_v2 import call_on_v2
from tests.support.train_pair import script_modules

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS, TOKENS, DRAFTS = 4, 32, 4
SPECULATORS = {"eagle3": "EagleSpeculator", "dflash": "DFlashSpeculator"}


def generate_with_a_head(
    kind: str, head: str, drafts: int, prompt_count: int, max_tokens: int
) -> dict[str, Any]:
    """Greedy tokens of the first prompts, and vLLM's counts of drafts.

    `kind`: vLLM's method; `drafts`: those of a step.
    """
    from vllm import SamplingParams

    config = {"method": kind, "model": head, "num_speculative_tokens": drafts}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with running(config) as llm:
        outputs = llm.generate(prompts(prompt_count), params, use_tqdm=False)
        return {
            "speculator": type(runner_of(llm).speculator).__name__,
            "tokens": tokens_of(outputs),
            "steps": metric(llm, "vllm:spec_decode_num_drafts"),
            "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        }


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with script_modules() as modules:
        yield modules


def expected(kind: str, scripts: Any) -> dict[str, Any]:
    """The same of the script, whose every chain is of the target's own greedy text."""
    from transformers import AutoTokenizer

    target = scripts.frozen_target.FrozenTarget(MODELS / "target", scripts.heads.LAYERS, "cpu")
    head = scripts.heads.load_head(MODELS / kind, target, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    found: dict[str, Any] = {"tokens": [], "steps": 0, "accepted": 0}
    for prompt in prompts(PROMPTS):
        beginning = torch.tensor([tokenizer(prompt).input_ids])
        [text] = target.write(beginning, TOKENS + DRAFTS + 1, torch.zeros(1))
        drafts = head.draft(target, text, target(text[None]), DRAFTS)
        lengths = scripts.head_quality.accepted(drafts, text)
        start, end = beginning.shape[1] - 1, beginning.shape[1] + TOKENS - 2
        while start < end:
            found["steps"] += 1
            found["accepted"] += int(lengths[start])
            start += int(lengths[start]) + 1
        found["tokens"].append(text[beginning.shape[1] :][:TOKENS].tolist())
    return found


@pytest.mark.parametrize("kind", SPECULATORS)
def test_vllms_chains_accept_what_the_script_says(kind, scripts, tmp_path):
    chains = call_on_v2(
        generate_with_a_head, tmp_path, kind=kind, head=str(MODELS / kind), drafts=DRAFTS,
        prompt_count=PROMPTS, max_tokens=TOKENS,
    )  # fmt: skip
    wanted = expected(kind, scripts)
    assert chains["speculator"] == SPECULATORS[kind]
    assert chains["tokens"] == wanted["tokens"]
    # Two most likely tokens may be as good as equal, and rounding differ.
    assert chains["accepted"] == pytest.approx(wanted["accepted"], abs=2)
    assert chains["steps"] == pytest.approx(wanted["steps"], abs=2)
    assert wanted["accepted"] > 0.4 * wanted["steps"]
