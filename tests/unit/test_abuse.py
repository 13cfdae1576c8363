"""Configurations and files that nobody should write: an error of ours, or nothing; never a crash.

Ten thousand of them altogether. What is read is bounded (`json_input`), so that none can
take much memory.
"""

import json
import math
import os
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.tree_library import find_tree
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.token_tree import TokenTree

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "tree": {"schema": "sequoia-vllm/token-tree/v1", "size": 4, "depth": 2,
             "parents": [-1, 0, 0, 1], "acceptance": [0.5, 0.25]},
    "acceptance": json.loads((ROOT / "trees" / "acceptance" / "shipped.json").read_text()),
    "profile": json.loads(sorted((ROOT / "trees" / "profiles").glob("*.json"))[0].read_text()),
}  # fmt: skip

SPECIAL = st.sampled_from(
    [None, True, -1, 0, 1, 2, 1.5, -0.0, 1e308, -1e308, math.inf, -math.inf, math.nan, 2**31,
     2**63, -(2**64), 10**400, "", "x", "0.5", "NaN", "1e999", "\0", "\ud800", "~", "/",
     "a" * 5000, [], {}, [[]], [[[]]], [{}], {"": None}]
)  # fmt: skip
VALUES = st.recursive(
    SPECIAL | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from([*SequoiaConfig.model_fields, "num-speculative-tokens", "tre", ""])
LIKELY = st.one_of(
    st.lists(st.tuples(*[st.integers(-1, 9)] * 3).map(list), max_size=4),  # schedules
    st.lists(st.floats(0, 1), max_size=4),  # vectors
    st.fixed_dictionaries({"parents": st.lists(st.integers(-1, 4), max_size=6)}),
    st.fixed_dictionaries({"size": st.integers(-1, 40)}, optional={"depth": st.integers(-1, 9)}),
)
_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# The same cases each time; with SEQUOIA_VLLM_FUZZ=1 others, for a search by hand.
HARD = settings(
    deadline=None, database=None, suppress_health_check=_FIXTURES, max_examples=300,
    derandomize="SEQUOIA_VLLM_FUZZ" not in os.environ,
)  # fmt: skip


@given(st.dictionaries(KEYS, LIKELY | VALUES, max_size=4))
@example({"acceptance": [10**400]})
@example({"num_speculative_tokens_per_batch_size": [[1, 10**400, 10**400]]})
@example({"draft_load_config": {"": math.nan}})
@settings(HARD, max_examples=600)
def test_configurations(request_):
    try:
        config = SequoiaConfig.parse({**request_, "method": "sequoia"})
    except ConfigError as error:
        _check_message(str(error))
    else:
        config.draft_keys()


def _check_message(message: str, *names: str) -> None:
    """A line that somebody can read."""
    assert "\n" not in message
    assert len(message) < 4000
    assert all(name in message for name in names)


@st.composite
def mangled(draw, kind: str) -> str:
    """Text of a file of this kind, with something wrong in it, or of no kind at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(
            st.text(max_size=40) | st.sampled_from(["[" * 99_999, '{"a":' * 9_999, "9" * 5000])
        )
    if draw(st.integers(0, 9)) == 0:
        return json.dumps(draw(VALUES))
    data = json.loads(json.dumps(EXAMPLES[kind]))
    for _ in range(draw(st.integers(1, 2))):
        _spoil(draw, data)
    text = json.dumps(data)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def _spoil(draw, data) -> None:
    """Puts any value in the place of one of these, however deep."""
    while places := list(data) if isinstance(data, dict) else range(len(data)):
        place = draw(st.sampled_from(places))
        if not isinstance(data[place], (dict, list)) or not draw(st.booleans()):
            data[place] = deepcopy(draw(VALUES))  # samples are shared
            return
        data = data[place]


READERS = {
    "tree": (TokenTree.load, lambda path: find_tree(str(path))),
    "acceptance": (Acceptance.load, AcceptanceFile.load),
    "profile": (Profile.load,),
}


@pytest.mark.parametrize("kind", READERS)
@given(st.data())
@HARD
def test_files(tmp_path, kind, data):
    path = tmp_path / "any.json"
    text = data.draw(mangled(kind))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in READERS[kind]:
        try:
            read(path)
        except SequoiaError as error:
            _check_message(str(error).replace("\n  ", " "), str(path))


@given(st.data())
@HARD
def test_trees_and_vectors_that_are_read_can_be_used(data):
    """Whatever passes the checks of a configuration is a tree, and has values."""
    parents = data.draw(st.lists(st.integers(-1, 12), max_size=12).map(lambda rest: [-1, *rest]))
    vector = data.draw(LIKELY | VALUES)
    try:
        tree, acceptance = TokenTree.from_dict({"parents": parents}), Acceptance.of(vector)
    except SequoiaError:
        return
    assert tree.depth < tree.size
    assert 1 <= tree.expected_tokens(acceptance) <= tree.size
    assert tree.sorted_by_value(acceptance).size == tree.size
