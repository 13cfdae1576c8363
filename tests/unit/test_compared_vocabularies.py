"""What an engine makes of two models' tokenizers: nothing, a mapping, or a refusal."""

import json

import numpy as np
import pytest

pytest.importorskip("vllm")
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sequoia_vllm.bench.engines import speculative_config
from sequoia_vllm.bench.methods import chain, plain, sequoia
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.runner.vocabulary import TokensOf, compare_vocabularies, tokens_to_draft
from sequoia_vllm.measuring.engines import EngineSpec, compare_models
from tests.support.models import DRAFT, TARGET
from tests.support.vocabularies import save_other_draft

WORDS = [f"w{number}" for number in range(400)]


def tokenizer(folder, words, special=(), size=400):
    folder.mkdir()
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.save_pretrained(folder)
    return TokensOf(str(folder), size)


def test_the_same_tokens_are_left_as_they_are(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS, ["<one>"])
    theirs = tokenizer(tmp_path / "b", WORDS, ["<other>", "<more>"])
    for one, other in ((ours, theirs), (TokensOf(TARGET, 4096), TokensOf(DRAFT, 4096))):
        found = compare_vocabularies(one, other)
        assert (found.matching, found.in_words) == (None, "")


def test_a_few_renamed_tokens_are_mentioned(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    theirs = tokenizer(tmp_path / "b", [*WORDS[:-1], "renamed"])
    found = compare_vocabularies(ours, theirs)
    assert found.matching is None
    assert "1 of 400 tokens differ, the first is number 399" in found.in_words
    assert "'w399' of the target, 'renamed' of the draft" in found.in_words


def test_the_same_tokens_with_other_numbers_are_matched(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    theirs = tokenizer(tmp_path / "b", WORDS[:200] + WORDS[:199:-1])
    found = compare_vocabularies(ours, theirs)
    assert found.matching.drawn.tolist() == [*range(200), *range(399, 199, -1)]
    assert "400 of the target's 400 (100%)" in found.in_words


def test_the_same_tokens_and_another_number_of_rows_are_matched(tmp_path):
    """Models of one family are so, padded to different sizes."""
    found = compare_vocabularies(TokensOf(TARGET, 4160), TokensOf(DRAFT, 4096))
    assert found.matching.read[:4096].tolist() == list(range(4096))
    assert np.flatnonzero(found.matching.drawn < 0).tolist() == list(range(4096, 4160))
    assert "of which 100% of ordinary text is made" in found.in_words


def test_hardly_any_shared_token_is_refused(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    theirs = tokenizer(tmp_path / "b", [*WORDS[:19], *(f"v{number}" for number in range(381))])
    with pytest.raises(ConfigError) as error:
        compare_vocabularies(ours, theirs)
    message = str(error.value)
    assert f"{theirs.tokenizer!r} has another vocabulary than the target" in message
    assert "of its 400 tokens only 19 are also the target's" in message
    assert 'give "model" a draft of the target\'s family' in message


def test_a_draft_keeps_the_first_tokens_by_the_merges_or_those_it_is_given():
    target = TokensOf(TARGET, 4096)
    tokens, words = tokens_to_draft(1000, target)
    assert len(set(tokens)) == 1000
    assert {0, 1, 2} < set(tokens)  # what begins and ends sequences
    assert words.startswith("the draft computes logits of 1,000 of the target's 4,096 tokens")
    share = int(words.split("of which ")[1].split("%")[0])
    assert 60 < share < 90  # 78 measured
    assert tokens_to_draft([9, 4000], target)[0] == [9, 4000]
    with pytest.raises(ConfigError, match="has token 4096, and the target 4,096 tokens"):
        tokens_to_draft([9, 4096], target)


def test_a_number_of_tokens_needs_a_tokenizer(tmp_path):
    (tmp_path / "none").mkdir()
    target = TokensOf(str(tmp_path / "none"), 400)
    with pytest.raises(ConfigError, match="give a file of token ids"):
        tokens_to_draft(100, target)
    assert tokens_to_draft([5], target) == (
        [5], "the draft computes logits of 1 of the target's 400 tokens"
    )  # fmt: skip


def test_models_without_tokenizers_cannot_be_compared(tmp_path):
    ours = tokenizer(tmp_path / "a", WORDS)
    for name, content in (("none", None), ("nonsense", "nonsense")):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        assert compare_vocabularies(ours, TokensOf(str(tmp_path / name), 400)).matching is None
        with pytest.raises(ConfigError, match="not both bring a tokenizer"):
            compare_vocabularies(ours, TokensOf(str(tmp_path / name), 401))


def test_tokenizers_that_may_not_be_read_are_not():
    target = TokensOf(TARGET, 4096, is_readable=False)
    assert compare_vocabularies(target, TokensOf("/nope", 4096)).matching is None
    with pytest.raises(ConfigError, match="load no tokenizer, or one in a way of its own"):
        compare_vocabularies(target, TokensOf("/nope", 4095))


def test_vllms_chain_is_told_that_the_draft_has_another_vocabulary(tmp_path):
    other = str(save_other_draft(tmp_path / "other", shared=0.7))
    assert compare_models(TARGET, other).matching.num_shared == 1 + round(0.7 * 4093) + 1
    for draft, told in ((DRAFT, False), (other, True)):
        config = speculative_config(chain(draft, 2), EngineSpec(TARGET, draft))
        assert config.get("use_heterogeneous_vocab", False) == told
        for method in (plain(), sequoia(draft, "4x2")):
            found = speculative_config(method, EngineSpec(TARGET, draft))
            assert found == method.speculative_config
