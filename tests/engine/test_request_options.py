"""What a request may ask of speculation, and how wrong options are refused."""

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from sequoia_vllm.engine.common.request_options import MOST_DRAFTS, check_options, most_drafts


@pytest.mark.parametrize("drafts", [0, 1, 700])
def test_a_number_of_drafts(drafts):
    params = SamplingParams(extra_args={MOST_DRAFTS: drafts, "other": "x"})
    check_options(params)
    assert most_drafts(params) == drafts


@pytest.mark.parametrize("extra", [None, {}, {"other": 3}])
def test_the_engine_decides_where_nothing_is_asked(extra):
    params = SamplingParams(extra_args=extra)
    check_options(params)
    assert most_drafts(params) is None
    assert most_drafts(None) is None


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None, [1]])
def test_wrong_values_are_refused_by_name(value):
    with pytest.raises(VLLMValidationError, match=f"{MOST_DRAFTS} is a number of drafts, 0 or"):
        check_options(SamplingParams(extra_args={MOST_DRAFTS: value}))


@pytest.mark.parametrize("name", ["sequoia_max_draft", "sequoia_tree", "Sequoia_max_drafts"])
def test_misspelt_options_are_refused_with_the_right_one(name):
    with pytest.raises(VLLMValidationError, match=f"no option '{name}'.*there is: {MOST_DRAFTS}"):
        check_options(SamplingParams(extra_args={name: 1}))
