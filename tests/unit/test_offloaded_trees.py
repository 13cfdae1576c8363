"""Trees with and without offloading are kept apart."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.streaming import streamed_layers
from sequoia_vllm.library import user_files
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.user_files import adaptation_path
from tests.support.plans import chosen, planned
from tests.unit.test_computed_trees import learned

L40, CPU = "NVIDIA L40", "AMD EPYC"
PAIR = every_class()["70b-8b"]
NAMED = PairKey(L40, PAIR.target.name, PAIR.draft.name, "bfloat16")
OFFLOADED = replace(NAMED, offloading="prefetch-72-of-80-2-ahead")
WEIGHTS = streamed_layers(PAIR.target, 100e9, 25e9, "PCIe")
SHAPES = PairShapes(PAIR.target, PAIR.draft, streamed=WEIGHTS)
IN_MEMORY = replace(SHAPES, streamed=None)


@pytest.fixture
def library(tmp_path, monkeypatch) -> TreeLibrary:
    """The shipped trees, and no trees of the user's own, for engines too."""
    monkeypatch.setenv(user_files.USER_DIRECTORY_VARIABLE, str(tmp_path / "user"))
    return TreeLibrary()


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


def test_the_nearest_class_is_one_of_them_too(library):
    """Shapes cannot be read here: a mixture of experts, say."""
    pair = replace(OFFLOADED, target="some/target", draft="some/draft")
    shapes = PairShapes(None, None, "a mixture of experts")
    assert library.select(pair, shapes=shapes).entry.streamed is not None
    assert library.select(replace(pair, offloading=None), shapes=shapes).entry.streamed is None


@pytest.mark.slow
def test_where_shapes_are_known_the_tree_is_of_these_bytes(library):
    found = library.select(OFFLOADED, shapes=SHAPES)
    assert found.entry.name.startswith("computed/l40/70.6b-8.03b-offloaded/")
    assert found.entry.streamed == WEIGHTS
    assert "100.0 GB of weights read in each pass: PCIe, prefetch, 2 buffers" in found.reason
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


def test_a_draft_that_does_not_fit_is_said(library):
    pair = replace(OFFLOADED, device="Tesla T4")
    with pytest.raises(LibraryError, match="smaller or quantized draft"):
        library.select(pair, shapes=SHAPES)


def test_targets_on_a_disk_have_the_default_tree_before_they_are_tuned(library):
    """On CPUs; it is as large as pays where a pass waits for the disk."""
    small = every_class()["8b-1b"]
    pair = PairKey(CPU, "/m/t", "/m/d", "bfloat16", offloading="disk-0gib")
    shapes = PairShapes(small.target, small.draft)
    config = SequoiaConfig(model="/m/d", tree="auto")
    from_disk = chosen(config, pair, shapes)
    in_memory = chosen(config, replace(pair, offloading=None), shapes)
    assert (from_disk.tree.size, in_memory.tree.size) == (64, 16)
    assert from_disk.device is in_memory.device is None
    short = chosen(config, pair, shapes, max_model_len=64)
    assert short.tree == from_disk.tree.trim(16)


# -- what was tuned and learned ---------------------------------------------------


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
    for pair in (in_memory, offloaded):
        state = learned([[0.9, 0.0]], greedy_trees=1000.0)
        path = adaptation_path(library.user, pair.file_name)
        state.save(path)
        for other in (in_memory, offloaded):
            found = resolved(other)
            assert found.settings.adapts_as == other.file_name
            assert ("counted while serving" in found.choice.source) == (other == pair)
        path.unlink()


def resolved(pair: PairKey):
    shapes = IN_MEMORY if pair.offloading is None else SHAPES
    config = SequoiaConfig(model=pair.draft, tree="auto")
    return planned(config, pair, shapes=shapes)


# -- trees that users name ---------------------------------------------------------


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
