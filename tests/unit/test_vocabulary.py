"""Tokens of two vocabularies: their text, what is matched, and what becomes of ids and logits."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
from tests.support.models import TARGET
from tests.support.vocabularies import train_byte_level

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "Größe und Maß: naïve café, 12 345 €\n\tindented\n",
    "def f(x):\n    return x + 1\n",
] * 8


# -- texts -------------------------------------------------------------------------------


def test_every_character_of_the_byte_level_alphabet_is_its_byte():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert {byte_level_text(character) for character in alphabet} == {
        bytes([byte]) for byte in range(256)
    }


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_byte_level_texts_are_what_the_tokenizer_writes(text):
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    assert byte_level_text(spelled) == text.encode()
    assert decoders.ByteLevel().decode([spelled]) == text


@pytest.mark.parametrize("token", ["a b", "日", "\x7f", "<|end▁of|>"])
def test_what_is_not_of_the_byte_level_alphabet_is_no_such_text(token):
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


# -- real tokenizers ---------------------------------------------------------------------


def piece_tokenizer(size):
    """A tokenizer like SentencePiece's with byte fallback."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special + pieces, show_progress=False),
    )
    # The trainer takes byte pieces for special; in real ones only what follows is.
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def pieces_as_ordinary(vocabulary):
    """Byte pieces as SentencePiece's own files have them."""
    pieces = {number: name for number, name in vocabulary.controls.items() if "0x" in name}
    return Vocabulary(
        {**vocabulary.texts, **token_texts(pieces)},
        frozenset(pieces),
        {n: name for n, name in vocabulary.controls.items() if n not in pieces},
        vocabulary.end, vocabulary.begin, vocabulary.unknown,
    )  # fmt: skip


def test_byte_level_and_pieces_share_their_texts():
    """Most tokens learned from one corpus are common; each is written alike by both."""
    ours, theirs = train_byte_level(CORPUS, 400), piece_tokenizer(420)
    target, draft = read_vocabulary(ours), pieces_as_ordinary(read_vocabulary(theirs))
    assert target.end == ours.convert_tokens_to_ids("<end>")
    assert (draft.end, draft.begin, draft.unknown) == (2, 1, 0)
    matching = match(target, draft, len(ours), len(theirs))
    assert matching.num_shared > 300
    assert matching.drawn[target.end] == 2
    longer = 0
    for number, text in target.texts.items():
        of_draft = matching.drawn[number]
        if of_draft < 0:
            continue
        assert draft.texts[of_draft] == text
        if len(text) > 1:  # whole characters
            longer += 1
            assert ours.decode([number]) == theirs.convert_ids_to_tokens(int(of_draft)).replace(
                "▁", " "
            )
    assert longer > 40
    newline, space = (
        next(n for n, text in target.texts.items() if text == wanted) for wanted in (b"\n", b" ")
    )
    assert theirs.convert_ids_to_tokens(int(matching.drawn[space])) == "▁"
    assert draft.texts[matching.drawn[newline]] == b"\n"


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


# -- splitting ---------------------------------------------------------------------------

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


# -- matching ----------------------------------------------------------------------------


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


# -- ids and logits ----------------------------------------------------------------------

words = st.lists(st.sampled_from([b"a", b"b", b"c", b"ab", b"ca", b"d"]), min_size=1, max_size=9)


@given(words, words, st.integers(0, 3), st.integers(0, 99))
def test_a_token_gets_the_probability_of_all_that_mean_it(ours, theirs, rows_more, seed):
    target, draft = (Vocabulary(dict(enumerate(texts))) for texts in (ours, theirs))
    size = len(theirs) + rows_more
    matching = match(target, draft, len(ours), size)
    mapped = MappedVocabulary(matching, torch.device("cpu"))
    logits = 3 * torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    found = mapped.target_logits(logits).exp()
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
    target, draft = (Vocabulary(dict(enumerate(texts))) for texts in (ours, theirs))
    mapped = MappedVocabulary(match(target, draft, len(ours), len(theirs)), torch.device("cpu"))
    ids = torch.arange(len(ours), dtype=torch.int32).view(1, -1)
    read = mapped.read(ids)
    assert (read.dtype, read.shape) == (torch.int32, ids.shape)
    for number, of_draft in enumerate(read[0].tolist()):
        text = ours[number]
        assert theirs[of_draft] == text or text not in theirs
    assert mapped.read(torch.tensor([-1, 999])).tolist() == [read[0, 0], read[0, -1]]


@given(words, words, st.sets(st.integers(0, 8)), st.integers(0, 99))
def test_a_trimmed_draft_gives_the_same_logits_of_the_tokens_it_keeps(ours, theirs, kept, seed):
    tokens = [token for token in kept if token < len(ours)]
    target, draft = (Vocabulary(dict(enumerate(texts))) for texts in (ours, theirs))
    matching = match(target, draft, len(ours), len(theirs))
    rows, trimmed = matching.trimmed(tokens)
    assert len(set(rows.tolist())) == len(rows) <= len(theirs)
    logits = torch.randn(4, len(theirs), generator=torch.Generator().manual_seed(seed))
    whole = MappedVocabulary(matching, torch.device("cpu")).target_logits(logits)
    found = MappedVocabulary(trimmed, torch.device("cpu")).target_logits(logits[:, rows])
    assert torch.equal(found[:, tokens], whole[:, tokens])
    others = [token for token in range(len(ours)) if token not in tokens]
    assert torch.all(found[:, others] == -torch.inf)


def test_a_trimmed_draft_with_the_same_tokens_reads_them_as_they_are():
    rows, matching = Matching.of_same_numbers(5).trimmed([4, 1])
    assert rows.tolist() == [1, 4]
    mapped = MappedVocabulary(matching, torch.device("cpu"))
    ids = torch.arange(5)
    assert mapped.read(ids) is ids
    logits = torch.tensor([[0.5, 2.0]])
    inf = -torch.inf
    assert mapped.target_logits(logits).tolist() == [[inf, 0.5, inf, inf, 2.0]]


def test_merges_rank_tokens_after_those_that_are_added_and_single_characters():
    tokenizer = piece_tokenizer(420)
    tokenizer.add_tokens(["<think>"])
    order = by_merges(tokenizer)
    assert sorted(order) == list(range(len(tokenizer)))
    names = [tokenizer.convert_ids_to_tokens(number) for number in order]
    added = len(tokenizer.added_tokens_decoder)
    assert "<think>" in names[:added]
    assert "</s>" in names[:added]
    first = next(place for place in range(added, len(names)) if len(names[place]) > 1)
    assert all(len(name) == 1 for name in names[added:first])
    assert order[first:] == sorted(order[first:])


def test_half_precision_stays_as_it_is():
    target, draft = Vocabulary({0: b"a", 1: b"x"}), Vocabulary({0: b"a", 1: b"a"})
    mapped = MappedVocabulary(match(target, draft, 2, 2), torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float16):
        found = mapped.target_logits(torch.zeros(1, 2, dtype=dtype))
        assert found.dtype == dtype
        assert found[0].tolist() == [pytest.approx(0.693, abs=0.003), -torch.inf]
