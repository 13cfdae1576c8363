"""Trees over latent attention (`DeepseekV3ForCausalLM`) on CPUs: tokens are plain vLLM's.

With ``VLLM_MLA_DISABLE=1`` vLLM keeps whole keys and values of these models, in ordinary layers.
"""

import pytest

from tests.support.engines import metric, running, sequoia, tokens_of
from tests.support.generating import greedy_and_seeded, random_prompts
from tests.support.latents import VOCABULARY, save_latent_pair

pytestmark = pytest.mark.engine

LENGTHS = [5, 37, 90, 20]
TOKENS = 40
OPTIONS = {"skip_tokenizer_init": True, "max_num_seqs": 3}


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_tokens_are_those_of_plain_vllm(disabled, tmp_path, monkeypatch):
    """Three requests at a time: a prompt is read beside trees."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", disabled)
    target, draft = save_latent_pair(tmp_path)
    prompts, params = random_prompts(LENGTHS, VOCABULARY), greedy_and_seeded(len(LENGTHS), TOKENS)
    with running(None, model=target, **OPTIONS) as llm:
        plain = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    with running(sequoia(16, draft=draft, dynamic_tree=True), model=target, **OPTIONS) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == plain
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 30
        assert llm.llm_engine.model_config.use_mla == (disabled == "0")
