"""A foretold text is followed from its start, and found again after what its writer changed."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.adaptation.told_branches import Survival
from sequoia_vllm.engine.core.eligibility import check_options
from sequoia_vllm.engine.core.followed_predictions import FollowedPredictions
from sequoia_vllm.engine.core.prediction_option import (
    COUNTED,
    MOST_PREDICTED,
    PREDICTION,
    describe_params,
    update_from_tokenizer,
    verify,
)
from sequoia_vllm.engine.v1.foretelling import ForetoldTexts
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification import prediction as following
from sequoia_vllm.verification.prediction import (
    REACH,
    Prediction,
    PredictionCounts,
    scored_of,
)

TEXT = np.random.default_rng(0).integers(0, 500, 400)
OTHER = 501  # not in the text


def steps(prediction: Prediction, written: np.ndarray) -> int:
    """Steps in which all that is told and right is written, and one token more."""
    done = count = 0
    while done < len(written):
        told = prediction.told(len(written) - done)
        differs = np.flatnonzero(told != written[done:])
        hits = int(differs[0]) if len(differs) else len(told)
        done, count = min(done + hits + 1, len(written)), count + 1
        assert prediction.follow(written[:done]) == hits
    return count


def edited(kind: str, places: list[int]) -> np.ndarray:
    text = TEXT.tolist()
    for place in reversed(places):
        if kind != "left out":
            text.insert(place, OTHER)
        if kind != "inserted":
            del text[place + (kind == "replaced")]
    return np.array(text)


@pytest.mark.parametrize(
    ("kind", "each"), [("replaced", 1), ("inserted", 3), ("left out", 2)]
)  # fmt: skip
@pytest.mark.parametrize("places", [[], [7], [0, 3, 9, 200, 202, 390]])
def test_each_edit_costs_a_few_steps(kind, each, places):
    assert 1 <= steps(Prediction(TEXT.tolist()), edited(kind, places)) <= 1 + each * len(places)


def test_the_beginning_is_told_before_anything_is_written():
    prediction = Prediction([5, 6, 7])
    assert not prediction.is_lost
    assert prediction.told(5).tolist() == [5, 6, 7, -1, -1]
    assert prediction.follow(np.array([5, 6])) == 2
    assert (prediction.told(2).tolist(), prediction.run) == ([7, -1], 3)
    prediction.follow(np.array([5, 6, 7]))
    assert prediction.is_lost
    assert prediction.told(2).tolist() == [-1, -1]


def test_runs_are_counted_up_to_the_reach():
    prediction = Prediction(TEXT.tolist())
    prediction.follow(TEXT[:10])
    assert prediction.run == 11
    prediction.follow(TEXT[:90])
    assert prediction.run == REACH
    prediction.follow(np.array([*TEXT[:90], OTHER]))
    assert prediction.run == 0
    assert prediction.told(2).tolist() == TEXT[91:93].tolist()


def test_evidence_outlives_an_edit_and_trust_follows_what_comes_true():
    prediction, done = Prediction(TEXT.tolist()), 10
    assert (prediction.run, prediction.evidence) == (1, 1)
    written, trust = TEXT[:done].tolist(), 1.0
    prediction.follow(np.array(written))
    assert (prediction.run, prediction.evidence, prediction._trust) == (11, 11, trust)
    # Of each step: tokens that are right after one that is replaced, or not; the evidence then.
    for replaced, right, evidence in ((1, 0, 5), (0, 2, 7), (1, 0, 3), (0, 3, 6)):
        written += [OTHER] * replaced + TEXT[done + replaced :][:right].tolist()
        done += replaced + right
        assert prediction.follow(np.array(written)) == right
        assert (prediction.run, prediction.evidence) == (right, evidence)
        trust = 1 - (1 - trust * 0.7**replaced) * 0.9**right
        assert prediction._trust == pytest.approx(trust)
    wrong = Prediction([0, 1])
    wrong.follow(np.array([5]))
    assert wrong._trust == pytest.approx(0.7)


def test_of_equal_places_the_nearest_to_where_it_went_on_is_taken():
    record = TEXT[:40].tolist()
    prediction = Prediction([*record, 1, *record, 2, *record, 3])
    prediction.follow(np.array([*record, 1, *record]))
    assert prediction.told(1).tolist() == [2]


def test_another_text_is_not_followed():
    prediction, written = Prediction(TEXT.tolist()), 600 + TEXT
    said = 0
    for end in range(len(written)):
        said += not prediction.is_lost
        assert prediction.follow(written[: end + 1]) == 0
    assert said <= 5


def test_a_prediction_that_fails_needs_more_in_common():
    """Single tokens that both texts have are no evidence after a few wrong ones."""
    prediction = Prediction([1, 2, 1, 3, 1, 4])
    written = np.array([1, 9] * 20)
    said = [not prediction.is_lost]
    for end in range(1, len(written)):
        prediction.follow(written[:end])
        said.append(not prediction.is_lost)
    assert said[0]
    assert not any(said[12:])


@pytest.mark.parametrize(
    ("most", "needed"),
    [(2, [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2]), (8, [0, 0, 0, 2, 2, 3, 4, 5, 7, 8, 8])],
)  # fmt: skip
def test_the_more_often_it_fails_the_more_it_needs_in_common(most, needed, monkeypatch):
    """Of other places each time: all that it says is wrong."""
    monkeypatch.setattr(following, "MOST_EVIDENCE", most)
    prediction, written, found = Prediction(TEXT.tolist()), [], []
    for failed in range(len(needed)):
        found.append(0)
        while prediction.is_lost:
            written.append(TEXT[30 * (failed + 1) + found[-1]])
            found[-1] += 1
            prediction.follow(np.array(written))
        written.append(OTHER)
        assert prediction.follow(np.array(written)) == 0
    assert found == needed


def tells(prediction: Prediction, written: np.ndarray) -> int:
    """Tokens of a text that are written while it says that another one comes."""
    wrong = 0
    for end in range(len(written)):
        wrong += int(prediction.told(1)[0]) not in (-1, written[end])
        prediction.follow(written[: end + 1])
    return wrong


def test_a_long_wrong_text_is_told_a_few_times(monkeypatch):
    """In 65,536 tokens of few kinds any two come in a row somewhere. A bound of 2 never ends."""
    draw = np.random.default_rng(0)
    text, written = draw.integers(0, 90, MOST_PREDICTED), draw.integers(0, 90, 400)
    assert tells(Prediction(text.tolist()), written) == 6
    monkeypatch.setattr(following, "MOST_EVIDENCE", 2)
    assert tells(Prediction(text.tolist()), written) == 398


@pytest.mark.parametrize("kind", ["replaced", "inserted", "left out"])
def test_a_right_text_needs_no_more_than_before(kind, monkeypatch):
    """One token of twenty is changed, behind words that it does not foretell."""
    draw = np.random.default_rng(1)
    written = np.concatenate([draw.integers(0, 500, 60), edited(kind, list(range(9, 400, 20)))])
    taken = steps(Prediction(TEXT.tolist()), written)
    monkeypatch.setattr(following, "MOST_EVIDENCE", 2)
    assert steps(Prediction(TEXT.tolist()), written) == taken


# The told tokens 5, 6, 7 are nodes 2, 3 and 5; 8 is told, and in no tree on their path.
TREE = [1, 9, 5, 6, 8, 7, 5], [-1, 0, 0, 2, 2, 3, 3]


def test_predictions_of_a_device_are_followed_by_what_steps_emit():
    """A step without drafts has scored nothing; a tree scores what is told down its depth."""
    followed = FollowedPredictions(TokenTree.chain(3), has_branches=False)
    text = [5, 6, 7, 8, 9, 10]
    asked = {PREDICTION: text, COUNTED: True}
    for name, options in {"asks": asked, "not": {PREDICTION: text}, "plain": {}}.items():
        followed.start(name, SamplingParams(extra_args=options))

    def step(drafts: int, emitted: list[int]) -> dict[str, tuple[int, int, int]]:
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=emitted)
            for name in ("plain", "asks", "not")
        ]
        return followed.count({"asks": [-1] * drafts} if drafts else {}, outputs)

    assert step(0, [5]) == {"asks": (1, 0, 1)}
    assert step(3, [6, 7, 8, 9]) == {"asks": (5, 0, 5)}
    assert step(3, [1]) == {"asks": (5, 1, 5)}
    followed.forget({"other"})
    assert step(2, [10]) == {"asks": (5, 1, 5)}
    for _ in range(200):  # more than the first room for its output
        step(0, [5, 1, 1])
    assert step(0, [5, 6]) == {"asks": (5, 1, 5)}
    assert step(0, [7, 8, 9]) == {"asks": (8, 1, 612)}
    followed.forget({"asks"})
    assert step(1, [1]) == {}


@pytest.mark.parametrize(
    ("options", "rejected"),
    [({}, 2), ({"structured_outputs": StructuredOutputsParams(json_object=True)}, 0)],
    ids=["any", "with a grammar"],
)
def test_branches_of_a_device_are_followed_by_what_steps_emit(options, rejected):
    """A tree of seven drafts is two deep: five told tokens are scored in a branch alone."""
    tree = TokenTree((-1, 0, 0, 0, 1, 1, 2, 2))
    followed = FollowedPredictions(tree, has_branches=True)
    asked = {PREDICTION: list(range(100, 130)), COUNTED: True}
    followed.start("a", SamplingParams(extra_args=asked, **options))

    def step(emitted: list[int]) -> tuple[int, int, int]:
        output = SimpleNamespace(request_id="a", new_token_ids=emitted)
        return followed.count({"a": [-1] * 7}, [output])["a"]

    assert step([100, 101, 102]) == (3, 0, 3)
    assert step([103, 104, 105]) == (6, 0, 6)
    assert step([106, 107, 108]) == (9, 0, 9)  # the branch's first, as nothing matched before
    assert step([109, 110, 111, 112, 113, 1]) == (14, rejected, 14)


@pytest.mark.parametrize(
    ("told", "emitted", "tree", "counted"),
    [([5, 6, 7, 8], [5, 6, 7, 8], TREE, (4, 0, 24)), ([5, 6, 7, 8], [5, 6, 7, 4], TREE, (3, 0, 23)),
     ([5, 6, 7, 8], [5, 4], TREE, (1, 2, 21)), ([5, 6, 7, 8], [9, 4], TREE, (0, 3, 0)),
     ([5, 6, 7, 8], [4], TREE, (0, 3, 0)), ([6, 7], [6], TREE, (1, 0, 21)),
     ([5], [5, 6], TREE, (1, 0, 21)), ([], [5], TREE, (0, 0, 0)),
     ([5, 6], [5, 6, 7], TREE, (2, 0, 22)), ([5], [5], ([0], [-1]), (1, 0, 21)),
     # Others drafted 9, or the text told more: the prediction goes on within the step.
     ([5, 6, 7, 8], [9, 6, 7, 4], TREE, (2, 3, 23)), ([5, 6, 7, 8], [5, 9, 7, 8], TREE, (3, 2, 24)),
     ([5, 6, 7, 8], [5, 6, 9, 5, 6, 7, 8, 2], TREE, (5, 1, 27))],
)  # fmt: skip
def test_what_became_of_told_tokens_is_counted(told, emitted, tree, counted):
    written = list(range(100, 120))
    prediction, counts = Prediction([*written, *told]), PredictionCounts()
    prediction.follow(np.array(written))
    scored = scored_of(prediction.told(len(tree[0])), tree)
    counts.add(prediction, np.array([*written, *emitted]), scored)
    assert (counts.accepted, counts.rejected, counts.end) == counted
    assert prediction.seen == 20


@pytest.mark.parametrize("place", [0, 1, 7, 39, 40])
def test_a_long_step_accepts_what_short_ones_do(place):
    """Whoever drafted it: the text goes its own way for a token, in the midst of the step."""
    told, counts = list(range(1, 41)), []
    output = np.array([*told[:place], 0, *told[place:]])
    for ends in ([1, len(output)], range(1, len(output) + 1)):
        prediction, counted = Prediction(told), PredictionCounts()
        for end in ends:
            counted.add(prediction, output[:end], 0)
            prediction.follow(output[:end])
        counts.append((counted.accepted, counted.end))
    assert counts[0] == counts[1]
    assert counts[0][0] >= 38


def test_counts_of_steps_add_up_and_end_where_the_output_does():
    prediction, counts = Prediction([4, 5, 6, 7, 5, 6, 7]), PredictionCounts()
    for written, emitted in (([4], [5, 6, 7]), ([4, 5, 6, 7], [9])):
        prediction.follow(np.array(written))
        counts.add(prediction, np.array([*written, *emitted]), 3)
    assert (counts.accepted, counts.rejected, counts.end) == (3, 3, 4)
    assert [counts.accepted_within(length) for length in (9, 4, 3, 2)] == [3, 3, 2, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "not a int"), (True, "not a bool"), (None, "not a NoneType"), ({}, "not a dict"),
     ([1, 2.5], "not a list with a float"), ([True], "list with a bool"), ("", "is empty"),
     ([], "is empty"), ([1] * (MOST_PREDICTED + 1), "of 65536 at most"),
     ("a" * (8 * MOST_PREDICTED + 1), "characters")],
)  # fmt: skip
def test_what_is_no_prediction_is_refused(value, message):
    with pytest.raises(VLLMValidationError, match=message) as error:
        check_options(SamplingParams(extra_args={PREDICTION: value}))
    assert error.value.parameter == PREDICTION


class Vocabulary:
    @staticmethod
    def get_vocab_size() -> int:
        return 10


class Tokenizer:
    @staticmethod
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def nothing(*given) -> None:
    """In the place of vLLM's own."""


@pytest.mark.parametrize(
    ("value", "tokenizer", "message"),
    [([3, 10], None, "id 10, of a vocabulary of 10"), ([-1], None, "id -1"),
     ("text", None, "must be token ids"), ("text", Tokenizer, None), ([0, 9], None, None)],
)  # fmt: skip
def test_tokens_are_compared_with_the_vocabulary(value, tokenizer, message):
    given = SamplingParams(extra_args={PREDICTION: value}), Vocabulary, None, None, tokenizer
    if message is None:
        verify(nothing, *given)
    else:
        with pytest.raises(VLLMValidationError, match=message):
            verify(nothing, *given)


def test_a_text_becomes_tokens_of_the_request_alone():
    users = {PREDICTION: "ab", "other": 1}
    params = SamplingParams(extra_args=users)
    update_from_tokenizer(nothing, params, Tokenizer)
    assert params.extra_args == {PREDICTION: [97, 98], "other": 1}
    assert users == {PREDICTION: "ab", "other": 1}


def test_a_prediction_is_not_logged():
    params = SamplingParams(extra_args={PREDICTION: "a secret", "other": 1}, top_p=0.5)
    shown = describe_params(lambda self: f"{self.top_p} {self.extra_args}", params)
    assert shown == "0.5 {'sequoia_prediction': '<8 long>', 'other': 1}"
    assert params.extra_args[PREDICTION] == "a secret"


def test_a_branch_has_at_most_twice_as_many_tokens_as_came_true():
    """Lately: each other token leaves half. What the target cannot read ends it."""
    texts = ForetoldTexts(requests=1, depth=4, retrieves=False, vocabulary=150)
    told = list(range(100, 200))
    texts.start("a", SamplingParams(extra_args={PREDICTION: told}))

    def length(output: list[int]) -> int:
        text, ends = np.array([[1, 2, *output]], dtype=np.int32), np.array([2 + len(output)])
        texts.look_back(np.array([0]), ["a"], text, np.array([2]), ends)
        return int(texts.branch_lengths(["a"], [63], 4, 4)[0])

    assert length(told[:1]) == 0  # none of what was told has come true
    assert 4 < length(told[:6]) <= 10
    assert texts.told_of(np.array([0]), 3).tolist() == [told[6:9]]
    assert 10 < length(told[:16]) <= 30
    assert length(told[:46]) == 0  # four can be read: as many as the tree has levels
    assert length(told[:40] + [7] * 6) == 0
    texts.forget("a")
    assert texts._told == {}


def test_a_text_that_repeats_itself_gets_branches_as_well():
    """Like a prediction, once what it told has come true; `retrieval` switches them off."""
    said = list(range(100, 200))

    def length(texts: ForetoldTexts, output: list[int]) -> int:
        prompt = [1, *said, 2]
        text, ends = np.array([[*prompt, *output]], dtype=np.int32), np.array([102 + len(output)])
        texts.look_back(np.array([0]), ["a"], text, np.array([102]), ends)
        if not texts.may_branch(["a"], 4):
            return 0
        return int(texts.branch_lengths(["a"], [63], 4, 4)[0])

    texts = ForetoldTexts(requests=1, depth=4, retrieves=True, vocabulary=190)
    assert length(texts, said[:2]) == 0  # none of what was told has come true
    assert 4 < length(texts, said[:6]) <= 8
    assert texts.told_of(np.array([0]), 6).tolist() == [said[6:12]]
    assert 8 < length(texts, said[:16]) <= 28
    assert length(texts, said[:86]) == 0  # four can be read: as many as the tree has levels
    assert length(texts, [*said[:40], 3, 4]) == 0  # nothing matches
    assert texts.branches.predictions.chances(8, 1) == Survival().chances(8, 1)
    texts.forget("a")
    assert texts._told == {}
    without = ForetoldTexts(requests=1, depth=4, retrieves=False, vocabulary=190)
    assert [length(without, said[:count]) for count in (2, 6, 16, 40)] == [0] * 4
    assert without._told == {}


def test_a_prediction_is_followed_where_it_matches_as_well_as_the_text():
    texts = ForetoldTexts(requests=1, depth=4, retrieves=True, vocabulary=190)
    texts.start("a", SamplingParams(extra_args={PREDICTION: [5, 6, 7, 8, 9]}))

    def told(output: list[int]) -> list[int]:
        text, ends = (
            np.array([[5, 6, 50, 51, *output]], dtype=np.int32),
            np.array([4 + len(output)]),
        )
        texts.look_back(np.array([0]), ["a"], text, np.array([4]), ends)
        return texts.told_of(np.array([0]), 3).tolist()[0]

    assert told([5, 6]) == [7, 8, 9]
    assert texts._told["a"].source is texts.branches.predictions
    assert told([5, 6, 50]) == [51, 5, 6]
    assert texts._told["a"].source is texts.branches.texts


def test_a_text_makes_no_branch_where_a_prediction_says_something_else():
    """It may match better, and then tells the tree."""
    said, before = list(range(100, 150)), [60, 61, 62]

    def longest(foretold: list[int]) -> tuple[int, int]:
        """The token that is told next, and most tokens of a branch."""
        texts = ForetoldTexts(requests=1, depth=4, retrieves=True, vocabulary=190)
        texts.start("a", SamplingParams(extra_args={PREDICTION: foretold}))
        prompt = [*before, *said, 2]
        for output in ([*before, *said[:count]] for count in (0, 4, 12)):
            text, ends = np.array([[*prompt, *output]], dtype=np.int32), len(prompt) + len(output)
            texts.look_back(np.array([0]), ["a"], text, np.array([54]), np.array([ends]))
        return int(texts.told[0, 0]), texts._told["a"].longest

    assert longest([7]) == (said[12], 24)  # it is lost
    assert longest([said[11], 7, 8, 9, 10]) == (said[12], 0)
