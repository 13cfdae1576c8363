"""Targets whose weights are streamed: times, memory, and trees of their own."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import memory_problem, weights_bytes
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.hardware.choose import Schedule, choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify, known_devices
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.roofline import STREAMED_MAX_SIZE, roofline_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.hardware.streaming import UVA_TILE_ROWS, StreamedWeights, streamed_layers
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.user_files import adaptation_path
from sequoia_vllm.tree import Acceptance
from sequoia_vllm.tree.optimize import Frontier
from tests.support.chessboard import chessboard
from tests.support.plans import chosen, planned
from tests.support.reference_trees import published
from tests.unit.test_computed_trees import learned

pytest.importorskip("torch")

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


@given(rows, seconds)
def test_a_pass_takes_the_longer_where_reading_overlaps_and_else_both(rows, computing):
    for buffers, together in ((1, sum), (2, max), (3, max)):
        weights = streamed(buffers=buffers)
        assert weights.pass_seconds(rows, 0.0) == weights.bytes_per_pass / 25e9
        expected = together((weights.bytes_per_pass / 25e9, computing))
        assert weights.pass_seconds(rows, computing) == pytest.approx(expected)


@given(rows, seconds)
def test_products_that_read_weights_read_them_for_each_tile(rows, computing):
    weights = streamed(backend="uva")
    tiles = -(-rows // UVA_TILE_ROWS)
    reading = tiles * weights.bytes_per_pass / 25e9
    assert weights.pass_seconds(rows, 0.0) == pytest.approx(reading)
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
    assert streamed(1.0).source == "a link, prefetch, 2 buffers"
    assert streamed(1.0, backend="uva").source == "a link, uva"
    for wrong in ({"size": 0.0}, {"rate": -1.0}, {"rate": math.inf}):
        with pytest.raises(ValueError, match="must be above 0"):
            streamed(**wrong)


def test_wide_trees_cost_nothing_more_where_weights_are_prefetched():
    one = target_seconds(streamed(), 1)
    assert one == pytest.approx(streamed().bytes_per_pass / 25e9, rel=1e-5)
    assert target_seconds(streamed(), STREAMED_MAX_SIZE) == one
    # Faster links leave computing to be seen: 768 rows of 70B on 118 TFLOP/s.
    few, many = (target_seconds(streamed(rate=300e9), n) for n in (1, STREAMED_MAX_SIZE))
    assert many > 2 * few


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


def speed(profile, tree) -> float:
    return CostModel(profile).estimate(tree, STRONG, 1).tokens_per_second


def largest(profile):
    return choose_tree(STRONG, profile, max_size=STREAMED_MAX_SIZE)


def test_the_papers_tree_is_found_where_weights_are_streamed():
    """768 nodes, far deeper than where weights are in memory."""
    profile = predicted(streamed())
    tree = largest(profile)
    assert tree.size == STREAMED_MAX_SIZE
    assert tree.depth > 12
    resident = roofline_profile(L40, PAIR.target, PAIR.draft, tensor_parallel_size=4)
    assert choose_tree(STRONG, resident).size <= 128
    chain = Frontier.of(STRONG, 40, 39, 1).tree(40, 39)
    assert speed(profile, tree) > 1.7 * speed(profile, chain)
    # Where products read the weights, it ends with a tile.
    in_place = predicted(streamed(backend="uva"))
    assert largest(in_place).size == UVA_TILE_ROWS
    assert speed(profile, tree) > 1.2 * speed(in_place, largest(in_place))


@pytest.mark.parametrize(
    ("how", "rate"), chessboard([{}, {"buffers": 1}, {"backend": "uva"}], [25e9, 346e9])
)
def test_no_optimal_tree_is_faster(how, rate):
    profile = predicted(streamed(rate=rate, **how))
    tree = largest(profile)
    frontier = Frontier.of(STRONG, STREAMED_MAX_SIZE, 24)
    others = [
        frontier.tree(size, depth)
        for size in (2, 4, 16, 64, 112, 127, 128, 129, 200, 256, 333, 512, 700, 768)
        for depth in (1, 3, 6, 9, 10, 12, 14, 15, 16, 17, 18, 20, 24)
    ]
    # Above 128 nodes not every size is looked at.
    assert max(speed(profile, other) for other in others) <= 1.001 * speed(profile, tree)


NAMED = PairKey("NVIDIA L40", PAIR.target.name, PAIR.draft.name, "bfloat16")
OFFLOADED = replace(NAMED, offloading="prefetch-72-of-80-2-ahead")
WEIGHTS = streamed_layers(PAIR.target, 100e9, 25e9, "PCIe")
SHAPES = PairShapes(PAIR.target, PAIR.draft, streamed=WEIGHTS)
IN_MEMORY = replace(SHAPES, streamed=None)


def test_files_of_targets_in_memory_keep_their_names():
    assert NAMED.file_name == replace(OFFLOADED, offloading=None).file_name
    assert "--tp1--" in NAMED.file_name
    others = ("uva-60gib", "uva-61gib", "prefetch-1-of-4-1-ahead")
    names = {replace(NAMED, offloading=name).file_name for name in (None, *others)}
    assert len(names) == 4


def test_the_library_has_trees_of_each_for_the_same_pair(library):
    in_memory, offloaded = library.select(NAMED), library.select(OFFLOADED)
    assert in_memory.entry.name == "l40/70b-8b/shipped"
    assert offloaded.entry.name == "l40/70b-8b-offloaded/shipped"
    assert in_memory.entry.tree.size <= 128 < offloaded.entry.tree.size
    assert "roofline, not measured" in offloaded.reason
    # The nearest class is one of them too. Shapes cannot be read here: of experts, say.
    shapes = PairShapes(None, None, "a mixture of experts")
    for key in (NAMED, OFFLOADED):
        pair = replace(key, target="some/target", draft="some/draft")
        entry = library.select(pair, shapes=shapes).entry
        assert (entry.streamed is not None) == (key == OFFLOADED)


def test_computed_entries_say_what_is_read(library, monkeypatch):
    stored = library.entry("l40/70b-8b-offloaded/shipped")
    schedule = Schedule(stored.tree, stored.schedule, stored.estimates)
    monkeypatch.setattr("sequoia_vllm.library.selection.fastest_schedule", lambda *_: schedule)
    found = library.select(OFFLOADED, shapes=SHAPES)
    assert found.entry.name.startswith("computed/l40/70.6b-8.03b-offloaded/")
    assert found.entry.streamed == WEIGHTS
    assert "100.0 GB of weights read in each pass: PCIe, prefetch, 2 buffers" in found.reason


@pytest.mark.slow
def test_where_shapes_are_known_the_tree_is_of_these_bytes(library):
    found = library.select(OFFLOADED, shapes=SHAPES)
    uva = streamed_layers(PAIR.target, 100e9, 25e9, "PCIe", backend="uva")
    narrow = library.select(OFFLOADED, shapes=replace(SHAPES, streamed=uva))
    assert narrow.entry.tree.size <= 128 < found.entry.tree.size
    # The same pair in memory has the library's own, or one computed so.
    assert library.select(NAMED, shapes=IN_MEMORY).entry.streamed is None


def test_no_tree_is_made_up_where_it_is_not_known_what_is_read(library):
    """A device without trees for offloaded targets, and an offloader of some parameters."""
    pair = replace(OFFLOADED, device="NVIDIA H100 80GB HBM3", offloading="uva-60gib-experts")
    with pytest.raises(LibraryError, match=r"how much.*give a tree size"):
        library.select(pair, shapes=replace(IN_MEMORY, problem="how much is not known"))
    choice = chosen(SequoiaConfig(model="some/draft"), pair, IN_MEMORY)
    assert (choice.tree.size, choice.tree.depth) == (64, 8)
    with pytest.raises(LibraryError, match="smaller or quantized draft"):  # it does not fit
        library.select(replace(OFFLOADED, device="Tesla T4"), shapes=SHAPES)


def test_targets_on_a_disk_have_the_default_tree_before_they_are_tuned(library):
    """On CPUs; it is as large as pays where a pass waits for the disk."""
    small = every_class()["8b-1b"]
    pair = PairKey("AMD EPYC", "/m/t", "/m/d", "bfloat16", offloading="disk-0gib")
    shapes = PairShapes(small.target, small.draft)
    config = SequoiaConfig(model="/m/d", tree="auto")
    from_disk = chosen(config, pair, shapes)
    in_memory = chosen(config, replace(pair, offloading=None), shapes)
    assert (from_disk.tree.size, in_memory.tree.size) == (64, 16)
    assert from_disk.device is in_memory.device is None
    short = chosen(config, pair, shapes, max_model_len=64)
    assert short.tree == from_disk.tree.trim(16)


@pytest.mark.parametrize("tuned", [NAMED, OFFLOADED])
def test_tuned_trees_serve_what_they_were_tuned_for(library, tuned):
    library.save_user_tree(tuned, library.entry("l40/70b-8b/shipped"))
    for pair in (NAMED, OFFLOADED, replace(OFFLOADED, offloading="uva-60gib")):
        shapes = IN_MEMORY if pair.offloading is None else SHAPES
        assert library.select(pair, shapes=shapes).entry.name.startswith("user/") == (pair == tuned)


def test_what_was_learned_serves_engines_like_it(library):
    """Half of it is times; acceptance goes with them."""
    in_memory = replace(NAMED, target="some/target", draft="some/draft")
    offloaded = replace(in_memory, offloading=OFFLOADED.offloading)
    config = SequoiaConfig(model="some/draft", tree="auto")
    for pair in (in_memory, offloaded):
        path = adaptation_path(library.user, pair.file_name)
        learned([[0.9, 0.0]], greedy_trees=1000.0).save(path)
        for other, shapes in ((in_memory, IN_MEMORY), (offloaded, SHAPES)):
            found = planned(config, other, shapes=shapes)
            assert found.settings.adapts_as == other.file_name
            assert ("counted while serving" in found.choice.source) == (other == pair)
        path.unlink()


def test_named_trees_say_what_they_were_made_for():
    def gain(pair: PairKey, name: str):
        config = SequoiaConfig(model=pair.draft, tree=name).loaded()
        return chosen(config, pair).gain

    in_memory, offloaded = "l40/70b-8b/shipped", "l40/70b-8b-offloaded/shipped"
    assert gain(NAMED, in_memory).speedup < 4 < gain(OFFLOADED, offloaded).speedup
    assert gain(NAMED, offloaded).made_for == "targets that are offloaded"
    # It pays all the more, by nobody knows how much.
    pays = gain(OFFLOADED, in_memory)
    assert (pays.speedup, pays.made_for) == (None, None)
    assert pays.tokens > 2
