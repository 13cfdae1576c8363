"""Tokens of two vocabularies: texts, matches, ids and logits, and what an engine makes of them."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sequoia_vllm.config import ConfigError
from sequoia_vllm.vocabulary.mapped import MappedVocabulary
from sequoia_vllm.vocabulary.matching import Matching, Segments, match
from sequoia_vllm.vocabulary.tokens import (
    Vocabulary,
    by_merges,
    byte_level_text,
    piece_text,
    read_vocabulary,
    token_texts,
)

pytest.importorskip("vllm")
from sequoia_vllm.bench.engines import speculative_config
from sequoia_vllm.bench.methods import PLAIN, chain, sequoia
from sequoia_vllm.engine.runner.vocabulary import TokensOf, compare_vocabularies, tokens_to_draft
from sequoia_vllm.measuring.engines import EngineSpec, compare_models
from tests.support.models import DRAFT, TARGET
from tests.support.vocabularies import save_other_draft, save_words, train_byte_level

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "Größe und Maß: naïve café, 12 345 €\n\tindented\n",
    "def f(x):\n    return x + 1\n",
] * 8


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_byte_level_texts_are_what_the_tokenizer_writes(text):
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    assert byte_level_text(spelled) == text.encode()
    assert decoders.ByteLevel().decode([spelled]) == text


def test_what_is_of_the_byte_level_alphabet():
    found = {byte_level_text(character) for character in pre_tokenizers.ByteLevel.alphabet()}
    assert found == {bytes([byte]) for byte in range(256)}
    for token in ("a b", "日", "\x7f", "<|end▁of|>"):
        assert byte_level_text(token) is None


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("▁the", b" the"), ("▁▁", b"  "), ("<0x0A>", b"\n"), ("<0xe2>", b"\xe2"),
        ("\n\n", b"\n\n"), ("Maß", "Maß".encode()), ("<0x0A", b"<0x0A"), ("w17", b"w17"),
    ],
)  # fmt: skip
def test_pieces(token, text):
    assert piece_text(token) == text


def test_a_vocabulary_is_byte_level_or_not():
    byte_level = dict(enumerate(["Ġ", "Ġthe", "Ċ", "Ã©", *(f"a{i}" for i in range(200))]))
    assert token_texts({**byte_level, 999: "not one"})[999] == b"not one"
    assert token_texts(byte_level)[3] == "é".encode()
    assert token_texts({0: "▁the", 1: "Ã©"}) == {0: b" the", 1: "Ã©".encode()}
    assert token_texts({0: "w0", 1: "<0x41>"}) == {0: b"w0", 1: b"A"}


def piece_tokenizer():
    """A tokenizer like SentencePiece's with byte fallback."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    # To the trainer's own tokenizer byte pieces are special, too.
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(made.model), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_byte_level_and_pieces_share_their_texts():
    """Most tokens learned from one corpus are common; each is written alike by both."""
    ours, theirs = train_byte_level(CORPUS, 400), piece_tokenizer()
    target, draft = read_vocabulary(ours), read_vocabulary(theirs)
    assert target.end == ours.convert_tokens_to_ids("<end>")
    assert (draft.end, draft.begin, draft.unknown) == (2, 1, 0)
    matching = match(target, draft, len(ours), len(theirs))
    assert matching.num_shared > 300
    assert matching.drawn[target.end] == 2
    pieces = {
        text: (number, int(matching.drawn[number]))
        for number, text in target.texts.items()
        if matching.drawn[number] >= 0
    }
    assert all(draft.texts[of_draft] == text for text, (_, of_draft) in pieces.items())
    longer = [found for text, found in pieces.items() if len(text) > 1]  # whole characters
    assert len(longer) > 40
    for number, of_draft in [*longer, pieces[b" "]]:
        spelled = theirs.convert_ids_to_tokens(of_draft).replace("▁", " ")
        assert ours.decode([number]) == spelled
    assert b"\n" in pieces


def test_the_embedded_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    vocabulary = read_vocabulary(tokenizer)
    assert vocabulary.controls == {0: "<pad>", 1: "<s>", 2: "</s>"}
    assert (vocabulary.end, vocabulary.begin, vocabulary.unknown) == (2, 1, None)
    assert len(vocabulary.texts) == 4093
    numbers = tokenizer.encode("def größe(x):\n    return x", add_special_tokens=False)
    spelled = b"".join(vocabulary.texts[number] for number in numbers)
    assert spelled == "def größe(x):\n    return x".encode()


BYTES = {bytes([byte]): byte for byte in range(4)}
texts = st.binary(max_size=12).map(lambda raw: bytes(byte % 4 for byte in raw))


@given(texts, st.sets(texts.filter(lambda text: len(text) > 1)), st.booleans())
def test_pieces_make_up_the_text_each_as_long_as_can_be(text, longer, lacks_one):
    tokens = {**BYTES, **{piece: 4 + place for place, piece in enumerate(sorted(longer))}}
    if lacks_one:
        del tokens[b"\x00"]
    found = Segments(tokens).split(text)
    spelling = {number: piece for piece, number in tokens.items()}
    if found is None:
        assert lacks_one
        assert b"\x00" in text
        return
    assert b"".join(spelling[number] for number in found) == text
    start = 0
    for number in found:
        end = start + len(spelling[number])
        assert all(text[start:longer] not in tokens for longer in range(end + 1, len(text) + 1))
        start = end


def test_an_outsider_is_read_as_the_last_token_of_its_text():
    target = Vocabulary({0: b"walking", 1: b"walk", 2: b"Q", 3: b"ing"}, controls={4: "<tool>"})
    draft = Vocabulary({5: b"walk", 6: b"in", 7: b"ing"}, controls={8: "<unk>"}, unknown=8)
    matching = match(target, draft, 6, 10)
    assert matching.drawn.tolist() == [-1, 5, -1, 7, -1, -1]
    assert matching.read.tolist() == [7, 5, 8, 7, 8, 8]
    assert matching.also.tolist() == []


def test_of_several_tokens_with_one_text_the_usual_one_counts():
    """A byte piece is not; of others the last, since added tokens are looked for first."""
    target = Vocabulary({0: b"\n", 1: b"\n", 2: b"a", 3: b"a"}, byte_pieces=frozenset({1}))
    draft = Vocabulary({0: b"a", 1: b"\n", 2: b"\n", 3: b"a"}, byte_pieces=frozenset({2}))
    matching = match(target, draft, 4, 4)
    assert matching.drawn.tolist() == [1, -1, -1, 3]
    assert matching.read.tolist() == [1, 1, 3, 3]
    assert sorted(matching.also.tolist()) == [[1, 2], [3, 0]]


def test_ends_of_sequences_are_matched_by_their_role_and_others_by_name():
    target = Vocabulary({0: b"a"}, controls={1: "<s>", 2: "<eot>", 3: "<|im_end|>"}, end=2, begin=1)
    draft = Vocabulary({0: b"<s>"}, controls={5: "<bos>", 6: "<|im_end|>"}, end=6, begin=5)
    matching = match(target, draft, 4, 7)
    assert matching.drawn.tolist() == [-1, 5, 6, -1]  # the draft's end is the target's
    assert matching.read.tolist() == [5, 5, 6, 6]
    both = Vocabulary({0: b"a"}, controls={1: "<|endoftext|>"}, end=1, begin=1)
    assert match(target, both, 4, 2).drawn.tolist() == [0, -1, 1, -1]  # it rather ends them
    assert match(both, draft, 2, 7).drawn.tolist() == [-1, 5]


def test_tokens_that_a_model_has_no_rows_for_are_left_out():
    ours = Vocabulary({0: b"a", 1: b"b", 2: b"c"}, controls={3: "</s>"}, end=3)
    matching = match(ours, ours, 5, 2)
    assert matching.drawn.tolist() == [0, 1, -1, -1, -1]
    assert matching.read.max() < 2


words = st.lists(st.sampled_from([b"a", b"b", b"c", b"ab", b"ca", b"d"]), min_size=1, max_size=9)


def matched(ours: list[bytes], theirs: list[bytes], rows: int | None = None) -> Matching:
    """Of two vocabularies with these texts; the draft has so many rows."""
    target, draft = (Vocabulary(dict(enumerate(texts))) for texts in (ours, theirs))
    return match(target, draft, len(ours), len(theirs) if rows is None else rows)


def mapped_by(matching: Matching) -> MappedVocabulary:
    return MappedVocabulary(matching, torch.device("cpu"))


@given(words, words, st.integers(0, 3), st.integers(0, 99))
def test_a_token_gets_the_probability_of_all_that_mean_it(ours, theirs, rows_more, seed):
    size = len(theirs) + rows_more
    logits = 3 * torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    found = mapped_by(matched(ours, theirs, size)).target_logits(logits).exp()
    assert torch.equal(logits, before)
    assert found.shape == (4, len(ours))
    expected = defaultdict(lambda: torch.zeros(4))
    for number, text in enumerate(theirs):
        expected[text] = expected[text] + before[:, number].exp()
    for text in set(ours):
        numbers = [number for number, one in enumerate(ours) if one == text]
        assert torch.allclose(found[:, numbers].sum(dim=1), expected[text], rtol=1e-5)
        assert (found[0, numbers] > 0).sum() == (text in theirs)


@given(words, words)
def test_ids_are_read_as_tokens_of_the_same_text(ours, theirs):
    mapped = mapped_by(matched(ours, theirs))
    ids = torch.arange(len(ours), dtype=torch.int32).view(1, -1)
    read = mapped.read(ids)
    assert (read.dtype, read.shape) == (torch.int32, ids.shape)
    for text, of_draft in zip(ours, read[0].tolist(), strict=True):
        assert theirs[of_draft] == text or text not in theirs
    assert mapped.read(torch.tensor([-1, 999])).tolist() == [read[0, 0], read[0, -1]]


@given(words, words, st.sets(st.integers(0, 8)), st.integers(0, 99))
def test_a_trimmed_draft_gives_the_same_logits_of_the_tokens_it_keeps(ours, theirs, kept, seed):
    tokens = [token for token in kept if token < len(ours)]
    matching = matched(ours, theirs)
    rows, trimmed = matching.trimmed(tokens)
    assert len(set(rows.tolist())) == len(rows) <= len(theirs)
    logits = torch.randn(4, len(theirs), generator=torch.Generator().manual_seed(seed))
    whole = mapped_by(matching).target_logits(logits)
    found = mapped_by(trimmed).target_logits(logits[:, rows])
    assert torch.equal(found[:, tokens], whole[:, tokens])
    others = [token for token in range(len(ours)) if token not in tokens]
    assert torch.all(found[:, others] == -torch.inf)


def test_a_trimmed_draft_with_the_same_tokens_reads_them_as_they_are():
    rows, matching = Matching.of_same_numbers(5).trimmed([4, 1])
    assert rows.tolist() == [1, 4]
    mapped, ids, inf = mapped_by(matching), torch.arange(5), -torch.inf
    assert mapped.read(ids) is ids
    found = mapped.target_logits(torch.tensor([[0.5, 2.0]]))
    assert found.tolist() == [[inf, 0.5, inf, inf, 2.0]]


def test_merges_rank_tokens_after_those_that_are_added_and_single_characters():
    tokenizer = piece_tokenizer()
    tokenizer.add_tokens(["<think>"])
    order = by_merges(tokenizer)
    assert sorted(order) == list(range(len(tokenizer)))
    names = [tokenizer.convert_ids_to_tokens(number) for number in order]
    added = len(tokenizer.added_tokens_decoder)
    assert {"<think>", "</s>"} <= set(names[:added])
    first = next(place for place in range(added, len(names)) if len(names[place]) > 1)
    assert all(len(name) == 1 for name in names[added:first])
    assert order[first:] == sorted(order[first:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_as_it_is(dtype):
    found = mapped_by(matched([b"a", b"x"], [b"a", b"a"])).target_logits(
        torch.zeros(1, 2, dtype=dtype)
    )
    assert found.dtype == dtype
    assert found[0].tolist() == [pytest.approx(0.693, abs=0.003), -torch.inf]


WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def tokenizer(tmp_path):
    """Saves a tokenizer of these words."""

    def save(words, special=()):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        numbers = {word: number for number, word in enumerate([*words, *special])}
        controls = {name: numbers.pop(name) for name in special}
        save_words(folder, numbers, controls)
        return TokensOf(str(folder), 400)

    return save


def test_the_same_tokens_are_left_as_they_are(tokenizer):
    ours, theirs = tokenizer(WORDS, ["<one>"]), tokenizer(WORDS, ["<other>", "<more>"])
    for one, other in ((ours, theirs), (TokensOf(TARGET, 4096), TokensOf(DRAFT, 4096))):
        found = compare_vocabularies(one, other)
        assert (found.matching, found.in_words) == (None, "")
    found = compare_vocabularies(tokenizer(WORDS), tokenizer([*WORDS[:-1], "renamed"]))
    assert found.matching is None
    assert "1 of 400 tokens differ, the first is number 399" in found.in_words
    assert "'w399' of the target, 'renamed' of the draft" in found.in_words


def test_the_same_tokens_with_other_numbers_are_matched(tokenizer):
    found = compare_vocabularies(tokenizer(WORDS), tokenizer(WORDS[:200] + WORDS[:199:-1]))
    assert found.matching.drawn.tolist() == [*range(200), *range(399, 199, -1)]
    assert "400 of the target's 400 (100%)" in found.in_words


def test_the_same_tokens_and_another_number_of_rows_are_matched():
    """Models of one family are so, padded to different sizes."""
    found = compare_vocabularies(TokensOf(TARGET, 4160), TokensOf(DRAFT, 4096))
    assert found.matching.read[:4096].tolist() == list(range(4096))
    assert np.flatnonzero(found.matching.drawn < 0).tolist() == list(range(4096, 4160))
    assert "of which 100% of ordinary text is made" in found.in_words


def test_hardly_any_shared_token_is_refused(tokenizer):
    theirs = tokenizer([*WORDS[:19], *(f"v{number}" for number in range(381))])
    with pytest.raises(ConfigError) as error:
        compare_vocabularies(tokenizer(WORDS), theirs)
    for said in (
        f"{theirs.tokenizer!r} has another vocabulary than the target",
        "of its 400 tokens only 19 are also the target's",
        'give "model" a draft of the target\'s family',
    ):
        assert said in str(error.value)


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
    target = TokensOf(str(tmp_path), 400)
    with pytest.raises(ConfigError, match="give a file of token ids"):
        tokens_to_draft(100, target)
    said = "the draft computes logits of 1 of the target's 400 tokens"
    assert tokens_to_draft([5], target) == ([5], said)


def test_models_without_tokenizers_cannot_be_compared(tokenizer, tmp_path):
    ours = tokenizer(WORDS)
    none, nonsense = tmp_path / "none", tmp_path / "nonsense"
    for folder in (none, nonsense):
        folder.mkdir()
    (nonsense / "tokenizer.json").write_text('"nonsense"')
    for folder in map(str, (none, nonsense)):
        assert compare_vocabularies(ours, TokensOf(folder, 400)).matching is None
        with pytest.raises(ConfigError, match="not both bring a tokenizer"):
            compare_vocabularies(ours, TokensOf(folder, 401))
    unreadable = TokensOf(TARGET, 4096, is_readable=False)
    assert compare_vocabularies(unreadable, TokensOf("/nope", 4096)).matching is None
    with pytest.raises(ConfigError, match="load no tokenizer, or one in a way of its own"):
        compare_vocabularies(unreadable, TokensOf("/nope", 4095))


def test_vllms_chain_is_told_that_the_draft_has_another_vocabulary(tmp_path):
    other = str(save_other_draft(tmp_path / "other", shared=0.7))
    assert compare_models(TARGET, other).matching.num_shared == 1 + round(0.7 * 4093) + 1
    for draft, told in ((DRAFT, False), (other, True)):
        config = speculative_config(chain(draft, 2), EngineSpec(TARGET, draft))
        assert config.get("use_heterogeneous_vocab", False) == told
        for method in (PLAIN, sequoia(draft, "4x2")):
            found = speculative_config(method, EngineSpec(TARGET, draft))
            assert found == method.speculative_config
