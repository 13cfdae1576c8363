"""The cost model's limits, the choice of trees, and schedules."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.hardware.choose import _ranges, choose_schedule, choose_tree
from sequoia_vllm.hardware.cost import CostModel, Prefixes
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.roofline import Assumptions, roofline_profile
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile
from sequoia_vllm.library.tree_library import shipped_directory
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from tests.support.chessboard import chessboard
from tests.support.reference_trees import acceptances, drafts_at, published, trees

SHIPPED = Acceptance.of(published()["shipped"])


def profile(target, draft, overhead=(0.0, 0.0), batches=(1,), tokens=(1, 2, 4, 16, 64, 256)):
    """A made-up measurement: ``target`` and ``draft`` map (tokens, batch size) to seconds."""

    def curves(seconds):
        return [
            Curve(batch_size=batch, context_length=100, tokens=list(tokens),
                  seconds=[seconds(n, batch) for n in tokens])
            for batch in batches
        ]  # fmt: skip

    plain, tree = overhead
    return Profile(
        source="measured", date="2026-01-31", device="made up", target="t", draft="d",
        target_parameters=1e9, draft_parameters=1e7,
        target_forward=curves(target), draft_level=curves(draft),
        overhead=[Overhead(batch_size=1, plain_seconds=plain, tree_seconds=tree)],
    )  # fmt: skip


def flat(n, batch):
    return 1.0


def free(n, batch):
    return 1e-9


class TestLimitsOfTheChoice:
    def test_the_largest_tree_within_the_limits(self):
        tree = choose_tree(SHIPPED, profile(flat, free), max_size=128)
        assert tree.size == 128
        assert tree.expected_tokens(SHIPPED) == pytest.approx(4.2021, abs=1e-4)
        tree = choose_tree(SHIPPED, profile(flat, free), max_size=40, max_depth=3, max_branch=4)
        assert (tree.size, tree.depth, tree.max_branch) == (40, 3, 4)
        short = profile(flat, free, tokens=(1, 2, 12))  # never larger than what was timed
        assert choose_tree(SHIPPED, short, max_size=1000).size == 12
        walk = Curve(batch_size=1, context_length=100, tokens=[1, 40, 41], seconds=[1e-9, 1e-9, 9])
        slow = profile(flat, free).model_copy(update={"verification": [walk]})
        assert choose_tree(SHIPPED, slow).size == 40

    @given(
        acceptances(max_branches=4), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0.0, 0.2)
    )
    @settings(max_examples=25, deadline=None)
    def test_is_the_best_of_all_sizes_and_depths(self, acceptance, per_token, level, per_row):
        times = profile(
            lambda n, b: 1 + per_token * (n - 1),
            lambda n, b: 0.001 + level + per_row * n,
            tokens=(1, 2, 3, 5, 12),
        )
        cost = CostModel(times)

        def speedup(tree):
            return cost.estimate(tree, acceptance, 1).speedup

        best = max(
            speedup(optimize_tree(acceptance, size, depth))
            for size in range(2, 13)
            for depth in range(1, 7)
        )
        chosen = choose_tree(acceptance, times, max_size=12, max_depth=6)
        assert speedup(chosen) == pytest.approx(max(best, 1.0), rel=1e-6)


class TestTimes:
    def test_interpolation_and_extrapolation(self):
        batches, tokens = (2, 4), (1, 4, 8)
        cost = CostModel(
            profile(lambda n, b: n * b / 100, lambda n, b: 0.01, batches=batches, tokens=tokens)
        )
        assert cost.target_seconds(4, 2) == pytest.approx(0.08)
        assert cost.target_seconds(6, 2) == pytest.approx(0.12)
        assert cost.target_seconds(6, 3) == pytest.approx(0.18)
        assert cost.target_seconds([1, 8], 4) == pytest.approx([0.04, 0.32])
        assert not cost.extrapolates(8, 3)
        assert cost.target_seconds(16, 2) == pytest.approx(0.32)  # last slope
        assert cost.target_seconds(4, 8) == pytest.approx(0.32)  # same tokens in all
        assert cost.target_seconds(8, 1) == pytest.approx(0.08)
        assert cost.target_seconds(1, 1) == pytest.approx(0.02)  # never less than a token of each
        for beyond in ((9, 2), (1, 1), (1, 5), (2, 2, 9)):
            assert cost.extrapolates(*beyond)
        assert cost.estimate(TokenTree.chain(3), SHIPPED, 8).extrapolated
        assert not cost.estimate(TokenTree.chain(3), SHIPPED, 4).extrapolated
        assert cost.max_tokens(3) == 8

    def test_noise_cannot_make_more_tokens_faster(self):
        measured = {1: 1.0, 2: 1.3, 4: 1.1, 16: 1.2, 64: 2.0, 256: 8.0}
        cost = CostModel(profile(lambda n, b: measured[n], free))
        seconds = cost.target_seconds(np.arange(1, 257), 1)
        assert (np.diff(seconds) >= 0).all()
        assert cost.target_seconds(4, 1) == pytest.approx(1.3)

    def test_contexts(self):
        short = profile(flat, free)
        [curve] = short.target_forward
        longer = curve.model_copy(update={"context_length": 8000, "seconds": [3.0] * 6})
        both = short.model_copy(update={"target_forward": [curve, longer]})
        assert CostModel(both).plain_seconds(1) == CostModel(both, 200).plain_seconds(1) == 1.0
        assert CostModel(both, 6000).plain_seconds(1) == 3.0

    @given(trees(), acceptances())
    @settings(max_examples=60, deadline=None)
    def test_a_step_is_the_sum_of_its_parts(self, tree, acceptance):
        times = profile(lambda n, b: 1 + 0.1 * n, lambda n, b: 0.2 + 0.01 * n, overhead=(0.05, 0.3))
        estimate = CostModel(times).estimate(tree, acceptance, 1)
        plain, tokens = 1.1 + 0.05, tree.expected_tokens(acceptance)
        seconds = plain
        if tree.size > 1:
            seconds = 1 + 0.1 * tree.size + 0.3
            seconds += 0.2 + 0.01 * tokens  # the first pass: what the last step committed
            for nodes in tree.levels[1:-1]:
                seconds += 0.2 + 0.01 * sum(1 for node in nodes if tree.children[node])
        assert estimate.seconds == pytest.approx(seconds)
        assert estimate.speedup == pytest.approx(tokens / seconds * plain)
        assert estimate.tokens_per_second == pytest.approx(tokens / seconds)

    @given(trees(), acceptances())
    @settings(max_examples=60, deadline=None)
    def test_prefixes(self, tree, acceptance):
        prefixes = Prefixes.of(tree, acceptance)
        for size in range(1, tree.size + 1):
            prefix = tree.trim(size)
            assert prefixes.expected_tokens[size - 1] == pytest.approx(
                prefix.expected_tokens(acceptance)
            )
            for depth in range(1, tree.depth + 1):
                nodes = np.flatnonzero(prefix.depths == depth)
                inner = sum(1 for node in nodes if prefix.children[node])
                assert prefixes.widths[size - 1, depth - 1] == inner


def gpu(device: str, name: str = "7b-68m", **options):
    shapes = model_classes()[name]
    return roofline_profile(identify(device).spec, shapes.target, shapes.draft, **options)


class TestSchedule:
    def test_table_covers_all_batch_sizes(self):
        schedule = choose_schedule(SHIPPED, gpu("NVIDIA H200", "8b-0.6b"))
        ranges = schedule.ranges
        assert (ranges[0][0], ranges[-1][1]) == (1, 256)
        assert all(first == last + 1 for (_, last, _), (first, _, _) in pairwise(ranges))
        drafts = [k for _, _, k in ranges]
        assert drafts == sorted(drafts, reverse=True)
        assert max(drafts) == schedule.tree.num_speculative_tokens
        assert drafts[-1] == 0

    def test_every_choice_is_within_tolerance_and_never_slower_than_plain(self):
        times = gpu("NVIDIA L4", "32b-0.6b", tensor_parallel_size=4)
        cost = CostModel(times)
        schedule = choose_schedule(SHIPPED, times)
        prefixes = Prefixes.of(schedule.tree, SHIPPED)
        for batch in range(1, 257):
            drafts = drafts_at(schedule.ranges, batch)
            trimmed = schedule.tree.trim(drafts + 1)
            assert cost.estimate(trimmed, SHIPPED, batch).speedup >= 1.0 - 1e-9
            if batch in (1, 3, 10, 50, 200):
                speeds = prefixes.expected_tokens / cost.prefix_seconds(prefixes, batch)
                assert speeds[drafts] >= speeds.max() * 0.99 * (1 - 1e-9)

    @pytest.mark.parametrize(
        ("device", "name", "vector"),
        chessboard(
            ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA L4"],
            ["7b-68m", "8b-1b", "32b-0.6b"],
            ["shipped", "appendix_e"],
        ),
    )
    def test_prefixes_are_near_the_best_tree_of_each_batch_size(self, device, name, vector):
        """What drafting prefixes of one tree costs, against a tree for each batch size.

        Measured over these 18 cases and batch sizes 1..256, the tolerance of the
        ranges included: 0.2 % to 1.0 % on average, and 5 % at the worst batch
        size (a slow draft at batch 1, where a deeper tree would be best).
        """
        times = gpu(device, name, tensor_parallel_size=4 if device.endswith("L4") else 1)
        schedule = choose_schedule(published()[vector], times)
        ratios = np.array([entry.speedup / entry.optimum for entry in schedule.estimates])
        assert 1 - np.exp(np.log(ratios).mean()) < 0.02
        assert ratios.min() > 0.919

    def test_extrapolated_batch_sizes_are_marked(self, caplog):
        times = profile(flat, lambda n, b: 0.1, batches=(1, 8), tokens=(1, 2, 4, 16))
        schedule = choose_schedule(SHIPPED, times, batch_sizes=[1, 2, 4, 8, 16, 32])
        marked = [entry.batch_size for entry in schedule.estimates if entry.extrapolated]
        assert len(schedule.estimates) == 6
        assert marked == [16, 32]
        assert "outside what its profile measured" in caplog.text

    def test_a_single_batch_size_gets_the_fastest_tree(self):
        """Though almost as fast ones are shorter."""
        schedule = choose_schedule(SHIPPED, profile(flat, free), batch_sizes=[1])
        assert schedule.ranges == [(1, 1, 127)]
        assert schedule.estimates[0].expected_tokens == 4.2021

    def test_a_range_gets_what_is_fastest_at_its_own_batch_sizes(self):
        speedups = [[1.0, 2.0, 2.01, 0.0], [1.0, 1.9, 1.0, 5.0]]
        assert _ranges(np.array(speedups), [1, 2]) == [(1, 1, 2), (2, 2, 3)]

    def test_accepted_by_vllm(self):
        utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
        schedule = choose_schedule(SHIPPED, gpu("NVIDIA H200", "8b-1b"))
        lookup = utils.build_dynamic_sd_schedule_lookup(
            schedule.ranges, 300, schedule.tree.num_speculative_tokens
        )
        assert lookup[1:] == [drafts_at(schedule.ranges, batch) for batch in range(1, 301)]


class TestRoofline:
    def test_carries_what_it_used(self):
        times = gpu("NVIDIA A100-SXM4-80GB", tensor_parallel_size=2)
        assert times.source == "roofline"
        assert times.datasheet.bandwidth_gb_s == 2039
        assert times.date == times.datasheet.date
        assert times.assumptions["bandwidth_efficiency"] == 0.85
        assert times.target_shape.name == "meta-llama/Llama-2-7b-hf"
        assert Profile.model_validate(times.to_dict()) == times

    def test_near_the_published_choice(self):
        # The paper: (128, 10) in its counting, with an unpublished vector, on this GPU and pair.
        tree = choose_tree(published()["appendix_e"], gpu("NVIDIA A100-SXM4-40GB"))
        assert 64 <= tree.size <= 128
        assert 7 <= tree.depth <= 13

    def test_no_corner_where_arithmetic_takes_as_long_as_reading(self):
        """At the device's operations per byte a pass takes 1.41 times the longer of both."""
        bare = Assumptions(
            bandwidth_efficiency=1, compute_efficiency=1, layer_seconds=0, forward_seconds=0,
            logits_passes=0, small_kernel_seconds=0,
        )  # fmt: skip
        device = identify("NVIDIA H200").spec
        rows = round(device.ridge)  # two bytes of a weight, two operations with it
        cost = CostModel(
            gpu("NVIDIA H200", assumptions=bare, context_length=1, tokens=(1, rows, 100 * rows))
        )
        one, even, many = (float(cost.target_seconds(n, 1)) for n in (1, rows, 100 * rows))
        assert even == pytest.approx(2**0.5 * one, rel=0.05)
        assert many > 100 * one

    def test_kernels_of_ours_cost_each_draft_level_and_each_merge(self):
        """With 32 key heads contexts are split for up to 3 requests, and merged in each layer."""
        device = "NVIDIA A100-SXM4-80GB"
        without, with_ones = (
            CostModel(gpu(device, assumptions=Assumptions(small_kernel_seconds=seconds)))
            for seconds in (0.0, 1e-6)
        )

        def added(part: str, tokens: int, batch: int) -> float:
            before, after = (getattr(cost, part)(tokens, batch) for cost in (without, with_ones))
            return float(after - before) * 1e6

        assert added("target_seconds", 1, 1) == pytest.approx(0)
        assert added("target_seconds", 16, 1) == pytest.approx(32, abs=0.1)
        assert added("target_seconds", 16, 4) == pytest.approx(0)
        assert added("draft_seconds", 1, 1) == pytest.approx(4, abs=0.01)
        assert added("draft_seconds", 8, 1) == pytest.approx(4 + 2, abs=0.01)

    def test_smaller_types_move_fewer_bytes(self):
        bf16 = CostModel(gpu("NVIDIA H200", "8b-1b")).plain_seconds(1)
        fp8 = CostModel(gpu("NVIDIA H200", "8b-1b", dtype="fp8")).plain_seconds(1)
        assert fp8 < 0.75 * bf16
        with pytest.raises(ValueError, match="dtype 'int3'"):
            gpu("NVIDIA H200", dtype="int3")


class TestAgainstAnH100:
    """What a GPU check measured (benchmarks/gpu/h100.json): Llama-2-7B's shape, context 1,024.

    With the longer of reading weights and multiplying in place of the root of summed squares,
    every test here fails: passes up to 28 % too quick, 24 % in passes over one token, and 8 % of
    the speed lost.
    """

    @pytest.fixture
    def measured(self) -> Profile:
        return Profile.load(shipped_directory() / "profiles" / "h100-7b-68m.json")

    @pytest.fixture
    def ratios(self, measured) -> dict[int, np.ndarray]:
        """Predicted over measured target passes of each batch size, from one token on."""
        return {
            curve.batch_size: np.divide(
                gpu(
                    measured.device, context_length=curve.context_length, tokens=curve.tokens,
                    batch_sizes=(curve.batch_size,),
                ).target_forward[0].seconds,
                curve.seconds,
            )
            for curve in measured.target_forward
        }  # fmt: skip

    def test_passes(self, ratios):
        """From 12 % too quick to 3 % too slow, over 1 to 2,048 rows.

        In passes over one token, which trees are chosen by: from 6 % too little to 10 % too much.
        """
        assert sum(len(found) for found in ratios.values()) == 47
        for found in ratios.values():
            assert found.min() > 0.87
            assert found.max() < 1.05
            assert found / found[0] == pytest.approx(1, abs=0.11)

    @pytest.mark.parametrize("vector", ["shipped", "appendix_e"])
    def test_trees_chosen_by_it_are_near_the_best_by_measured_times(self, measured, vector):
        """They lose 1.6 % at most."""
        acceptance = Acceptance.of(published()[vector])
        cost, predicted = CostModel(measured), gpu(measured.device)

        def speed(times, batch):
            tree = choose_tree(acceptance, times, batch, max_size=128)
            return cost.estimate(tree, acceptance, batch).speedup

        for batch in (1, 2, 4, 8, 16, 32):
            assert speed(predicted, batch) > 0.98 * speed(measured, batch)
