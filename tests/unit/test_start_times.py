"""What engines time when they start: which steps, where it is kept, and whose tree is by it."""

import pickle
from types import SimpleNamespace

import pytest

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.resolve import resolve
from sequoia_vllm.engine.worker.start.dummy_requests import Layout
from sequoia_vllm.engine.worker.start.points import Point, points_to_time
from sequoia_vllm.engine.worker.start.timing import is_sound, is_steady, profile_of
from sequoia_vllm.hardware.models import PairShapes, model_classes
from sequoia_vllm.hardware.step_curves import BatchTimes, StepTimes, TimedStep
from sequoia_vllm.hardware.step_profile import Curve, Profile
from sequoia_vllm.library import user_files
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.start_times import (
    ToTime,
    load_start_times,
    save_start_times,
    start_times_path,
)
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.user_files import adaptation_path
from tests.unit.test_computed_trees import learned

L40S, H100, CPU = "NVIDIA L40S", "NVIDIA H100 80GB HBM3", "AMD EPYC"
CLASS = model_classes()["7b-68m"]
SHAPES = PairShapes(CLASS.target, CLASS.draft)
RUNS = {"vllm": "0.32.0", "eager": False}


# -- which steps -------------------------------------------------------------------


def test_steps_around_the_tree_come_first():
    found = points_to_time([15] * 64, 4096)
    assert found[:4] == [Point(1, 1), Point(1, 16), Point(1, 8), Point(2, 16)]
    assert sorted(point.tokens for point in found) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_larger_batches_stand_for_larger_trees_though_they_draft_less():
    found = points_to_time([5, 5, 0, 0], 4096)
    assert sorted(point.tokens for point in found) == [1, 2, 4, 6, 12, 24]


def test_with_graphs_only_what_they_are_for():
    found = points_to_time([63, 63, 31, 31, 0, 0, 0, 0], 4096, [])
    assert found == [Point(1, 1), Point(1, 64), Point(2, 64)]  # 4 of 32 are as many tokens
    found = points_to_time([15, 7, 7, 7], 4096, [15, 7, 3, 1])
    sizes = [(point.requests, point.nodes) for point in found]
    assert sizes == [(1, 1), (1, 16), (1, 8), (1, 4), (4, 8), (1, 2)]


def test_no_pass_exceeds_the_engines():
    assert max(p.tokens for p in points_to_time([15] * 64, 70)) == 64
    assert max(p.tokens for p in points_to_time([15] * 64, 64)) == 32
    assert points_to_time([0, 0], 64, []) == [Point(1, 1)]


def test_requests_share_the_blocks_that_they_begin_with():
    layout = Layout(context=128, max_length=1024, block_sizes=(64, 128), num_blocks=16)
    first, second = layout.block_ids(2, length=200)
    assert [ids[:2] for ids in (first[0], second[0])] == [[1, 2], [1, 2]]
    assert first[1][0] == second[1][0] == 3
    own = [*first[0][2:], *first[1][1:], *second[0][2:], *second[1][1:]]
    assert own == [4, 5, 6, 7, 8, 9]
    assert layout.block_ids(5, length=200) is None  # 3 + 5 * 3 of 15


# -- what is made of them ----------------------------------------------------------


def timed(tokens: int, target: float, widths: tuple[int, ...], seconds: float) -> list[TimedStep]:
    passes = [(width, 0.001) for width in widths]
    step = StepTimes(
        start=0.0, requests=1, fewest=tokens, most=tokens, target=target,
        drafting=0.001 * len(widths), passes=passes,
    )  # fmt: skip
    return [TimedStep(step, seconds)]


def to_time(pair: PairKey, runs=RUNS) -> ToTime:
    return ToTime(pair, runs, CLASS.target.parameters, CLASS.draft.parameters)


def key(device: str = L40S, **more) -> PairKey:
    return PairKey(device, "/m/timed", "some/draft", **{"dtype": "float16", **more})


def measured(pair: PairKey, slope: float = 1e-5, runs=RUNS) -> Profile:
    """A plain step takes 11 ms, a tree's 2 ms for the draft and ``slope`` a node."""
    trees = {
        nodes: [timed(nodes, 0.01 + slope * nodes, (1, 1), 0.014 + slope * nodes)]
        for nodes in (2, 4, 8, 16, 32)
    }
    return profile_of(
        to_time(pair, runs),
        BatchTimes(1, 128, [timed(1, 0.01, (), 0.011)], trees),
        waits_for_core=False,
    )


def test_a_pass_counts_as_no_slower_than_a_longer_one():
    times = BatchTimes(1, 128, [timed(1, 0.015, (), 0.016)], {
        2: [timed(2, 0.012, (1, 1), 0.016)], 4: [timed(4, 0.013, (1, 2), 0.017)],
    })  # fmt: skip
    [target] = profile_of(to_time(key()), times, waits_for_core=False).target_forward
    assert target.tokens == [1, 2, 4]
    assert target.seconds == [0.012, 0.012, 0.013]


def test_steps_of_a_busy_machine_are_unsteady():
    quiet, busy = (
        [timed(1, 0.01, (), seconds)[0] for seconds in several]
        for several in ((0.011, 0.012, 0.011, 0.012, 0.1), (0.011, 0.03, 0.011, 0.1))
    )
    assert is_steady(quiet)
    assert not is_steady(busy)
    assert is_steady(busy[:3])


def test_times_that_leave_the_target_less_than_its_pass_are_not_sound():
    curve = Curve(batch_size=1, context_length=128, tokens=[1, 8], seconds=[0.01, 0.012])
    curves = SimpleNamespace(target=curve, forward_seconds={1: 0.0105, 8: 0.0125})
    assert is_sound(curves)
    curves.forward_seconds[8] = 0.02
    assert not is_sound(curves)


def test_the_engine_cores_part_is_assumed_where_steps_wait_for_it():
    times = BatchTimes(1, 128, [timed(1, 0.01, (), 0.011)], {2: [timed(2, 0.01, (1, 1), 0.014)]})
    alone, waiting = (
        profile_of(to_time(key()), times, waits_for_core=waits) for waits in (False, True)
    )
    assert alone.overhead[0].plain_seconds == pytest.approx(0.001)
    assert alone.overhead[0].tree_seconds == pytest.approx(0.002)
    assert alone.assumptions == {"plain_core_seconds": 0.0, "tree_core_seconds": 0.0}
    for part in ("plain", "tree"):
        more = waiting.assumptions[f"{part}_core_seconds"]
        both = (getattr(p.overhead[0], f"{part}_seconds") for p in (alone, waiting))
        assert next(both) + more == pytest.approx(next(both))
        assert more > 0


def test_trees_without_a_second_level_have_draft_times_too():
    times = BatchTimes(1, 128, [timed(1, 0.01, (), 0.011)], {2: [timed(2, 0.01, (1,), 0.013)]})
    [draft] = profile_of(to_time(key()), times, waits_for_core=False).draft_level
    assert (draft.tokens, draft.seconds) == ([1], [0.001])


# -- whose tree is by it -----------------------------------------------------------


@pytest.fixture
def library(tmp_path) -> TreeLibrary:
    return TreeLibrary(user=tmp_path / "user")


def select(library, pair, runs=RUNS, shapes=SHAPES):
    return library.select(pair, shapes=shapes, runs=runs)


def test_times_of_the_pair_come_before_datasheets(library):
    pair = key()
    before = select(library, pair)
    assert (before.source, before.is_timed) == ("roofline", False)
    path = save_start_times(library.user, to_time(pair), measured(pair, slope=0.002))
    steep = select(library, pair)
    assert (steep.source, steep.is_timed) == ("warm-up", True)
    assert f"timed when this pair started here ({path})" in steep.reason
    assert "measured in an earlier start's warm-up" in steep.reason
    save_start_times(library.user, to_time(pair), measured(pair, slope=1e-6))
    assert steep.tree.size < select(library, pair).tree.size <= 32


def test_on_cpus_they_come_before_what_was_shipped(library):
    """Also for the pair itself: a CPU's name does not say how many cores there are."""
    pair = key(CPU, dtype="bfloat16")
    runs = {**RUNS, "cores": 64}
    assert not select(library, pair, runs).is_timed
    path = save_start_times(library.user, to_time(pair, runs), measured(pair, runs=runs))
    assert path.name.endswith("--64-cores.json")
    assert select(library, pair, runs).source == "warm-up"
    assert select(library, pair, {**RUNS, "cores": 2}).source != "warm-up"


def test_devices_that_nobody_knows_have_times_too(library, tmp_path):
    pair = key("Neoverse-N1")
    save_start_times(library.user, to_time(pair), measured(pair))
    assert select(library, pair).source == "warm-up"


def test_learned_acceptance_goes_with_them(library):
    pair = key()
    save_start_times(library.user, to_time(pair), measured(pair))
    learned([[0.9, 0.0]], greedy_trees=1000.0).save(adaptation_path(library.user, pair.file_name))
    found = select(library, pair)
    assert found.source == "warm-up"
    assert "acceptance counted while serving" in found.reason
    assert found.tree.max_branch == 1


def test_the_users_tree_is_timed_already(library):
    pair = key()
    library.save_user_tree(pair, library.entry("h200/8b-1b/shipped"))
    save_start_times(library.user, to_time(pair), measured(pair))
    found = select(library, pair)
    assert (found.source, found.is_timed) == ("user", True)


def test_what_was_shipped_for_exactly_this_is_timed_already(library):
    pair = PairKey(H100, CLASS.target.name, CLASS.draft.name, "float16")
    entry = library.entry("h100-sxm/7b-68m/shipped")
    assert entry.profile.source == "measured"
    same = {"dtype": entry.dtype, "device": entry.profile.device}
    exactly = PairKey(target=pair.target, draft=pair.draft, **same)
    assert select(library, exactly).is_timed
    assert not select(library, key(H100, dtype=entry.dtype)).is_timed  # of the same size only


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "sequoia-vllm/profile/v1"}'])
def test_a_file_that_is_no_profile_is_passed_over(library, content, caplog):
    pair = key()
    before = select(library, pair)
    path = save_start_times(library.user, to_time(pair), measured(pair))
    path.write_text(content)
    found = select(library, pair)
    assert (found.tree, found.is_timed) == (before.tree, False)
    [line] = [line for line in caplog.messages if "are not used" in line]
    assert str(path) in line


@pytest.mark.parametrize(
    "other", [{"runs": {**RUNS, "vllm": "0.33.0"}}, {"runs": {**RUNS, "eager": True}}, {"size": 2}]
)
def test_other_engines_times_do_not_count(library, other):
    pair = key()
    save_start_times(library.user, to_time(pair), measured(pair))
    layers = CLASS.target.layers + other.get("size", 0)
    shapes = PairShapes(CLASS.target.model_copy(update={"layers": layers}), CLASS.draft)
    runs = other.get("runs", RUNS)
    assert load_start_times(library.user, pair, shapes, runs) is None
    assert not select(library, pair, runs, shapes).is_timed


def test_writing_leaves_one_file(library):
    pair = key()
    for slope in (1e-5, 1e-6):
        save_start_times(library.user, to_time(pair), measured(pair, slope=slope))
    path = start_times_path(library.user, pair, RUNS)
    assert list(path.parent.iterdir()) == [path]


# -- what engines are told ---------------------------------------------------------


@pytest.fixture
def told(library, monkeypatch):
    """The settings of an engine of the pair on a device with a datasheet alone."""
    monkeypatch.setenv(user_files.USER_DIRECTORY_VARIABLE, str(library.user))

    def settings(runs=RUNS, shapes=SHAPES, **keys) -> SequoiaSettings:
        config = SequoiaConfig.parse({"method": "sequoia", "model": "some/draft", **keys})
        return resolve(
            config, device=L40S, target="/m/timed", dtype="float16", tensor_parallel_size=1,
            read_shapes=lambda draft, drafter: shapes, runs=runs,
        ).settings  # fmt: skip

    return settings


def test_engines_time_what_nobody_did(told):
    found = told()
    assert found.to_time == to_time(key())
    config = SimpleNamespace(speculative_config=SimpleNamespace())
    found.store(config.speculative_config)
    assert SequoiaSettings.of(pickle.loads(pickle.dumps(config))) == found
    assert found.to_time.runs == RUNS


@pytest.mark.parametrize(
    "keys",
    [
        {"tune_at_start": False},
        {"tree": {"size": 8}},
        {"tree": "h200/8b-1b/shipped"},
        {"acceptance": [0.8]},
        {"shapes": PairShapes(None, CLASS.draft, "a mixture of experts")},
    ],
)
def test_engines_time_nothing_that_serves_nobody(told, keys):
    assert told(**keys).to_time is None


def test_engines_time_nothing_twice(told, library):
    save_start_times(library.user, to_time(key()), measured(key()))
    assert told().to_time is None
    assert told(runs={**RUNS, "vllm": "0.33.0"}).to_time is not None


def test_engines_time_nothing_where_the_user_tuned(told, library):
    library.save_user_tree(key(), library.entry("h200/8b-1b/shipped"))
    assert told().to_time is None
