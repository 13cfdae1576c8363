"""Several devices: reductions, what they do to times and trees, and memory."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling import memory_problem, weights_bytes, with_interconnect
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.interconnect import Assumptions, Interconnect
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.tree import Acceptance
from tests.support.reference_trees import published

SHIPPED = Acceptance.of(published()["shipped"])
MIB = 2**20
# Nothing but what a device moves and computes, on links that cost nothing but bytes.
BARE = Assumptions(
    layer_seconds=0, forward_seconds=0, logits_passes=0, small_kernel_seconds=0,
    one_shot_seconds=0, two_shot_seconds=0, ring_seconds=0, ring_step_seconds=0,
)  # fmt: skip

rates = st.floats(1, 2000)
kinds = st.sampled_from(["switch", "mesh", "bus", "host"])
groups = st.sampled_from([2, 4, 8])


def h100(gb_s=None, kind=None):
    return with_interconnect(identify("h100-sxm").spec, gb_s, kind)


def endless():
    """Links that carry any number of bytes in no time."""
    return h100().model_copy(update={"interconnect_gb_s": math.inf})


def links(devices, gb_s=450.0, kind="switch", assumed=None):
    return Interconnect(h100(gb_s, kind), devices, assumed or Assumptions())


def predicted(device, name="70b-1b", **options):
    pair = model_classes()[name]
    return roofline_profile(device, pair.target, pair.draft, **options)


class TestReductions:
    def test_one_device_has_nothing_to_add_up(self):
        assert links(1).all_reduce(MIB) == links(1).all_gather(MIB) == 0
        assert links(1, kind="mesh").all_reduce(MIB) == 0

    @pytest.mark.parametrize(
        ("devices", "kind", "size", "seconds"),
        [
            # One-shot: 6 us, and 7 tensors at 0.8 * 450 GB/s.
            (8, "switch", 16384, 6e-6 + 7 * 16384 / 360e9),
            # Two-shot: 12 us, and 2 * 7/8 tensors.
            (8, "switch", 4 * MIB, 12e-6 + 1.75 * 4 * MIB / 360e9),
            # A ring: 10 us, 14 steps of 1 us, and the same bytes.
            (8, "bus", 16384, 24e-6 + 1.75 * 16384 / 360e9),
            (4, "bus", 16384, 16e-6 + 1.5 * 16384 / 360e9),
            # Two devices on PCIe read each other's memory, but not those of GeForce drivers.
            (2, "bus", 16384, 6e-6 + 16384 / 360e9),
            (2, "host", 16384, 12e-6 + 16384 / 360e9),
            # A mesh of eight gives 3/7 of its links to a group of four.
            (4, "mesh", 16384, 6e-6 + 3 * 16384 / (360e9 * 3 / 7)),
            (8, "mesh", 16384, 6e-6 + 7 * 16384 / 360e9),
        ],
    )
    def test_the_cheapest_way(self, devices, kind, size, seconds):
        assert links(devices, kind=kind).all_reduce(size) == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("devices", "mib", "microseconds"),
        [(2, 0.5, 7), (4, 0.5, 10), (4, 1, 14), (4, 2, 23), (6, 0.5, 13), (6, 1, 17), (6, 4, 37)],
    )
    def test_near_published_measurements(self, devices, mib, microseconds):
        """H100, bfloat16 rows of 8,192: the faster of vLLM's one-shot and two-shot kernels.

        From vllm-project/vllm#24111 (2 and 6 devices) and #24532 (4).
        """
        assert 1e6 * links(devices).all_reduce(mib * MIB) == pytest.approx(microseconds, rel=0.2)

    def test_logits_are_gathered_in_a_ring(self):
        row = 128256 * 2
        assert links(4).all_gather(row) == pytest.approx(13e-6 + 0.75 * row / 360e9)

    @given(groups, kinds, rates, st.floats(0, 1e9), st.floats(1, 10), st.floats(1, 10))
    def test_more_bytes_or_a_slower_link_are_never_faster(
        self, devices, kind, rate, size, more, faster
    ):
        one, quick = links(devices, rate, kind), links(devices, rate * faster, kind)
        for name in ("all_reduce", "all_gather"):
            seconds = getattr(one, name)(size)
            assert getattr(one, name)(size * more) >= seconds
            assert getattr(quick, name)(size) <= seconds
            assert seconds > 0


class TestForward:
    @pytest.mark.parametrize("name", ["70b-1b", "70b-8b", "8b-1b", "32b-0.6b"])
    @pytest.mark.parametrize("devices", [2, 4, 8])
    def test_links_that_cost_nothing_divide_everything(self, name, devices):
        one = CostModel(predicted(endless(), name, assumptions=BARE))
        many = CostModel(predicted(endless(), name, tensor_parallel_size=devices, assumptions=BARE))
        for tokens, batch in ((1, 1), (16, 1), (128, 4)):
            for part in ("target_seconds", "draft_seconds"):
                whole = float(getattr(one, part)(tokens, batch))
                # Profiles hold six digits.
                assert float(getattr(many, part)(tokens, batch)) == pytest.approx(
                    whole / devices, rel=1e-5
                )

    def test_reductions_then_cost_their_latency_only(self):
        start = 1e-3
        slow_start = replace(
            BARE, one_shot_seconds=start, two_shot_seconds=start, ring_seconds=start
        )
        quick, slow = (
            CostModel(predicted(endless(), tensor_parallel_size=8, assumptions=assumed))
            for assumed in (BARE, slow_start)
        )
        # Two for each layer, one after the embedding, and the gathered logits.
        for part, layers in (("target_seconds", 80), ("draft_seconds", 16)):
            extra = float(getattr(slow, part)(1, 1) - getattr(quick, part)(1, 1))
            assert extra == pytest.approx((2 * layers + 2) * start, rel=1e-4)

    @pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("fp8", 2)])
    def test_what_is_reduced_is_never_quantized(self, dtype, width):
        slow, quick = (
            CostModel(predicted(link, tensor_parallel_size=2, dtype=dtype, assumptions=BARE))
            for link in (h100(1, "host"), endless())
        )
        extra = float(slow.target_seconds(8, 1) - quick.target_seconds(8, 1))
        # Two devices: as many bytes each way as the sums have, and half of the logits.
        moved = 8 * width * (161 * 8192 + 128256 / 2)
        assert extra == pytest.approx(moved / 0.8e9, rel=1e-4)

    def test_key_heads_are_copied_where_there_are_too_few(self):
        # 8 key/value heads: 16 devices each read as many keys as 8 do.
        pair = model_classes()["70b-1b"]
        assert [pair.target.kv_copies(n) for n in (1, 2, 8, 16, 32)] == [1, 1, 1, 2, 4]

        def context_seconds(devices):
            long, short = (
                CostModel(
                    predicted(endless(), tensor_parallel_size=devices, context_length=context,
                        assumptions=BARE,
                    )
                )
                for context in (100_001, 1)
            )  # fmt: skip
            return float(long.target_seconds(1, 1) - short.target_seconds(1, 1))

        assert context_seconds(16) == pytest.approx(context_seconds(8), rel=1e-3)
        assert context_seconds(8) == pytest.approx(context_seconds(1) / 8, rel=1e-3)

    @pytest.mark.parametrize(
        ("name", "devices", "message"),
        [
            ("7b-68m", 8, "llama-68m cannot be split over 8 devices.*12 heads.*use 1, 2, 4"),
            ("70b-1b", 3, "Llama-3.1-70B cannot be split over 3 .*use 1, 2, 4, 8, 16"),
            ("33b-1.3b", 8, "vicuna-33b-v1.3 cannot be split over 8 .*use 1, 2, 4$"),
            ("70b-1b", 0, "tensor parallel size 0: at least 1 device"),
        ],
    )
    def test_what_vllm_cannot_split(self, name, devices, message):
        with pytest.raises(ValueError, match=message):
            predicted(h100(), name, tensor_parallel_size=devices)


class TestChoice:
    @given(kinds, groups, st.floats(8, 900), st.floats(1.1, 20), st.sampled_from([1, 4, 16]))
    @settings(deadline=None, max_examples=25)
    def test_a_slower_link_never_gives_more_tokens_per_second(
        self, kind, devices, rate, factor, batch
    ):
        def best(gb_s):
            times = predicted(h100(gb_s, kind), tensor_parallel_size=devices, batch_sizes=(batch,))
            tree = choose_tree(SHIPPED, times, batch, max_size=64, max_depth=12)
            return CostModel(times).estimate(tree, SHIPPED, batch).tokens_per_second

        assert best(rate) <= best(rate * factor) * (1 + 1e-6)


class TestMemory:
    @pytest.mark.parametrize(
        ("device", "devices", "problem"),
        [
            # 133.7 GiB of weights: more than 80, and all but 7 of 141, of which vLLM takes 92 %.
            ("h100-sxm", 1, "does not fit"),
            ("h200", 1, "no room for a KV cache"),
            ("h100-sxm", 2, None),
            ("h200", 2, None),
            ("mi300x", 1, None),
        ],
    )
    def test_a_70b_pair(self, device, devices, problem):
        pair = model_classes()["70b-1b"]
        spec = identify(device).spec
        assert memory_problem(spec, pair.target, pair.draft, 1, devices) == problem

    def test_by_hand(self):
        pair, spec = model_classes()["70b-1b"], identify("h100-sxm").spec
        models = pair.target, pair.draft
        weights = weights_bytes(*models, devices=2)
        assert weights == pytest.approx(70_553_174_016 + 1_235_746_816, rel=1e-3)
        # 8 heads of 128 in 80 layers, and of 64 in 16, keys and values, two bytes, halved.
        per_token = 2 * 8 * (80 * 128 + 16 * 64)
        room = int((0.92 * 80 * 2**30 - 3 * 2**30 - weights) // per_token)
        assert memory_problem(spec, *models, room, 2) is None
        assert memory_problem(spec, *models, room + 1, 2) == f"KV cache for {room} tokens only"
