"""Targets whose weights are streamed: times, trees, memory."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import memory_problem, weights_bytes
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify, known_devices
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.roofline import STREAMED_MAX_SIZE, roofline_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.hardware.streaming import UVA_TILE_ROWS, StreamedWeights, streamed_layers
from sequoia_vllm.tree import Acceptance
from sequoia_vllm.tree.optimize import Frontier
from tests.support.chessboard import chessboard
from tests.support.reference_trees import published

STRONG = Acceptance.of(published()["appendix_e"])
PAIR = every_class()["70b-8b"]
L40 = known_devices()["l40"].spec()
ALL = 1e15  # bytes: more than any model has

rows = st.integers(1, 2000)
seconds = st.floats(0, 100)


def streamed(size=ALL, target=PAIR.target, rate=25e9, **more) -> StreamedWeights:
    return streamed_layers(target, size, rate, "a link", **more)


def predicted(weights, device=L40, **more) -> Profile:
    return roofline_profile(device, PAIR.target, PAIR.draft, streamed=weights, **more)


def target_seconds(weights, tokens, batch=1, **more) -> float:
    return float(CostModel(predicted(weights, **more)).target_seconds(tokens, batch))


# -- one pass ----------------------------------------------------------------------


@given(rows, seconds)
def test_a_pass_takes_the_longer_where_reading_overlaps_and_else_both(rows, computing):
    for buffers, together in ((1, sum), (2, max), (3, max)):
        weights = streamed(buffers=buffers)
        assert weights.read_seconds(rows) == weights.bytes_per_pass / 25e9
        expected = together((weights.bytes_per_pass / 25e9, computing))
        assert weights.pass_seconds(rows, computing) == pytest.approx(expected)


@given(rows, seconds)
def test_products_that_read_weights_read_them_for_each_tile(rows, computing):
    weights = streamed(backend="uva")
    tiles = -(-rows // UVA_TILE_ROWS)
    reading = tiles * weights.bytes_per_pass / 25e9
    assert weights.read_seconds(rows) == pytest.approx(reading)
    assert weights.pass_seconds(rows, computing) == pytest.approx(reading + computing)


def test_no_more_is_streamed_than_the_layers():
    layers = PAIR.target.layer_parameters * 2
    assert streamed().bytes_per_pass == layers
    assert streamed(devices=4).bytes_per_pass == layers / 4
    assert streamed(3e9).bytes_per_pass == 3e9
    int4 = every_class()["70b-int4-1b"].target
    assert streamed(target=int4).bytes_per_pass == layers / 4
    # Two layers of buffers, wherever weights are copied.
    assert streamed(3e9).buffer_bytes == pytest.approx(2 * layers / 80)
    assert streamed(3e9, backend="uva").buffer_bytes == 0


@pytest.mark.parametrize("wrong", [{"size": 0.0}, {"rate": -1.0}, {"rate": math.inf}])
def test_sizes_and_rates_are_numbers(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        streamed(**wrong)


# -- profiles ----------------------------------------------------------------------


def test_wide_trees_cost_nothing_more_where_weights_are_prefetched():
    one = target_seconds(streamed(), 1)
    assert one == pytest.approx(streamed().bytes_per_pass / 25e9, rel=1e-5)
    assert target_seconds(streamed(), STREAMED_MAX_SIZE) == one
    # Faster links leave computing to be seen: 768 rows of 70B on 118 TFLOP/s.
    assert target_seconds(streamed(rate=300e9), STREAMED_MAX_SIZE) > 2 * target_seconds(
        streamed(rate=300e9), 1
    )


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_uva_reads_again_for_each_tile(batch):
    """Curves have both sides of each step: interpolation does not smooth it."""
    weights = streamed(backend="uva")
    last = UVA_TILE_ROWS // batch
    read = weights.bytes_per_pass / 25e9
    below, above = (target_seconds(weights, last + more, batch) for more in (0, 1))
    assert above - below == pytest.approx(read, rel=0.01)


def test_what_uva_reads_is_not_read_from_the_devices_memory_too():
    """All but the layers: the output matrix, keys, and launches."""
    in_place, copied = (
        target_seconds(streamed(**how), 1) - streamed().bytes_per_pass / 25e9
        for how in ({"backend": "uva"}, {"buffers": 1})
    )
    whole = target_seconds(None, 1)
    assert copied == pytest.approx(whole, rel=1e-4)
    assert in_place < whole / 10


def test_profiles_say_what_they_took_to_be_streamed(tmp_path):
    profile = predicted(streamed(backend="uva"))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").streamed == streamed(backend="uva")
    assert "streamed" not in predicted(None).to_dict()


# -- memory ------------------------------------------------------------------------


def test_what_is_streamed_leaves_room():
    models = PAIR.target, PAIR.draft
    assert memory_problem(L40, *models, 1) == "does not fit"
    weights = streamed()
    saved = weights.bytes_per_pass - weights.buffer_bytes
    assert weights_bytes(*models) - weights_bytes(*models, streamed=weights) == pytest.approx(saved)
    assert memory_problem(L40, *models, 2048, streamed=weights) is None
    assert memory_problem(L40, *models, 2048, streamed=streamed(60e9)) is not None


def test_the_draft_must_fit():
    with pytest.raises(ValueError, match="smaller or quantized draft, or more devices"):
        predicted(streamed(), identify("t4").spec)
    assert predicted(None, identify("t4").spec)  # with all of it: the memory's own check
    split = streamed(devices=4)
    assert predicted(split, identify("t4").spec, tensor_parallel_size=4)


# -- trees -------------------------------------------------------------------------


def speed(profile, tree) -> float:
    return CostModel(profile).estimate(tree, STRONG, 1).tokens_per_second


def test_the_papers_tree_is_found_where_weights_are_streamed():
    """768 nodes, far deeper than where weights are in memory."""
    profile = predicted(streamed())
    tree = choose_tree(STRONG, profile, max_size=STREAMED_MAX_SIZE)
    assert tree.size == STREAMED_MAX_SIZE
    assert tree.depth > 12
    resident = roofline_profile(L40, PAIR.target, PAIR.draft, tensor_parallel_size=4)
    assert choose_tree(STRONG, resident).size <= 128
    chain = Frontier.of(STRONG, 40, 39, 1).tree(40, 39)
    assert speed(profile, tree) > 1.7 * speed(profile, chain)


@pytest.mark.parametrize(
    ("how", "rate"), chessboard([{}, {"buffers": 1}, {"backend": "uva"}], [25e9, 346e9])
)
def test_no_optimal_tree_is_faster(how, rate):
    profile = predicted(streamed(rate=rate, **how))
    tree = choose_tree(STRONG, profile, max_size=STREAMED_MAX_SIZE)
    frontier = Frontier.of(STRONG, STREAMED_MAX_SIZE, 24)
    others = [
        frontier.tree(size, depth)
        for size in (2, 4, 16, 64, 112, 127, 128, 129, 200, 256, 333, 512, 700, 768)
        for depth in (1, 3, 6, 9, 10, 12, 14, 15, 16, 17, 18, 20, 24)
    ]
    # Above 128 nodes not every size is looked at.
    assert max(speed(profile, other) for other in others) <= 1.001 * speed(profile, tree)


def test_trees_that_products_read_weights_for_end_with_a_tile():
    profile = predicted(streamed(backend="uva"))
    tree = choose_tree(STRONG, profile, max_size=STREAMED_MAX_SIZE)
    assert tree.size == UVA_TILE_ROWS
    prefetched = choose_tree(STRONG, predicted(streamed()), max_size=STREAMED_MAX_SIZE)
    assert speed(predicted(streamed()), prefetched) > 1.2 * speed(profile, tree)
