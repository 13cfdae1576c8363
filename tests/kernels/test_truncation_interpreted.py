"""Where the draft's nucleus ends, and draws that lean into it, run by Triton's interpreter."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.kernels.truncation import RANGE, RESOLUTION, lowest_inside, workspace_size
from sequoia_vllm.verification.sampling import LOWERED_BY, Truncation, lower_outside
from tests.support.chessboard import chessboard
from tests.support.drawing import draft_distribution, draw, sampled_reference
from tests.support.truncations import TRUNCATIONS

NEAR = 1.01 * RESOLUTION
VALUES = {"top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0}


def parameters(requests, *settings):
    own = [VALUES | settings[index % len(settings)] for index in range(requests)]
    return {
        name: torch.tensor([values[name] for values in own], dtype=dtype)
        for name, dtype in (
            ("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32),
        )
    }  # fmt: skip


def ends(logits, temperature, modes, settings):
    requests = len(temperature)
    found = torch.full((len(logits),), torch.nan)
    modes = torch.zeros(requests, dtype=torch.int32) + torch.as_tensor(modes, dtype=torch.int32)
    own = parameters(requests, *settings)
    batch = SimpleNamespace(temperature=temperature, modes=modes, **own)
    workspace = torch.empty(workspace_size(*logits.shape), dtype=torch.int32)
    lowest_inside(logits, batch, len(logits) // requests, found, workspace)
    return found


# -- where it ends -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mode"), chessboard([torch.float32, torch.bfloat16], [SAMPLED, SEEDED])
)
def test_it_ends_where_the_readable_form_ends(dtype, mode):
    """To a bin of scaled logits; of top-p to 5 %, as a bin's tokens all count as its middle."""
    torch.manual_seed(0)
    # A share of the k best is another one where equal tokens make them more than k.
    settings = [one for one in TRUNCATIONS if dtype == torch.float32 or len(one) == 1]
    requests, width, vocabulary = len(settings), 2, 2100
    logits = (3 * torch.randn(requests * width, vocabulary)).to(dtype)
    temperature = torch.linspace(0.3, 1.3, requests)
    found = ends(logits, temperature, mode, settings)
    rows = torch.arange(requests).repeat_interleave(width)
    scaled = logits.float() / temperature[rows, None]

    def end(factor):
        """float32 ``[rows, 1]``: the lowest inside, with another top-p."""
        own = parameters(requests, *settings)
        cut = own["top_p"] < 1
        own["top_p"] = torch.where(cut, (own["top_p"] * factor).clamp(max=0.9999), own["top_p"])
        truncation = Truncation(**own).of(rows)
        inside = lower_outside(scaled, truncation) == scaled
        return scaled.masked_fill(~inside, torch.inf).amin(dim=1, keepdim=True)

    taken_in = logits.float() >= found[:, None]
    assert not taken_in.all(dim=1).any()
    assert (taken_in | (scaled < end(0.95) + NEAR)).all()
    assert (~taken_in | (scaled > end(1.05) - NEAR)).all()
    assert (taken_in | (scaled < scaled.amax(dim=1, keepdim=True))).all()


@pytest.mark.parametrize("mode", [GREEDY, SKIP, SAMPLED])
def test_a_request_that_cuts_nothing_off_has_no_end(mode):
    """Nor does one that is not drawn by Q or under its noise, whatever its parameters."""
    torch.manual_seed(1)
    logits = torch.randn(4, 300)
    settings = [{}] if mode == SAMPLED else [{"top_k": 1, "top_p": 0.1, "min_p": 0.9}]
    assert (ends(logits, torch.ones(4), mode, settings) == -torch.inf).all()


def test_each_row_has_the_parameters_of_its_request():
    torch.manual_seed(2)
    logits = torch.stack([torch.randperm(1200), torch.randperm(1200)]) * 0.2  # bins of their own
    logits = logits.repeat_interleave(3, dim=0)[[0, 3, 1, 4, 2, 5]]
    found = ends(
        logits, torch.ones(3), [SAMPLED, GREEDY, SAMPLED], [{"top_k": 5}, {}, {"top_k": 9}]
    )
    kept = [int((row >= end).sum()) for row, end in zip(logits, found, strict=True)]
    assert kept == [5, 5, 1200, 1200, 9, 9]


def test_few_tokens_in_reach_are_all_inside():
    """The others are so unlikely that lowering them would change nothing."""
    logits = torch.full((1, 50), -RANGE - 1)
    logits[0, :3] = torch.tensor([0.0, -1.0, -2.0])
    assert ends(logits, torch.ones(1), SAMPLED, [{"top_k": 10}]).item() == -torch.inf


@pytest.mark.parametrize(
    "row",
    [[torch.nan] * 4, [torch.nan, 1.0, 2.0, 3.0], [torch.inf, 0.0, 1.0, 2.0], [-torch.inf] * 4],
)
def test_garbage_rows_come_to_an_end(row):
    for setting in TRUNCATIONS:
        ends(torch.tensor([row]), torch.ones(1), SAMPLED, [setting])


def test_a_very_low_temperature_keeps_the_best():
    logits = torch.tensor([[31.0, 30.0, 31.0, 29.0]])
    found = ends(logits, torch.tensor([1e-5]), SAMPLED, [{"top_p": 0.5}])
    assert (logits >= found).tolist() == [[True, False, True, False]]


# -- drawn and kept --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_children_are_drawn_from_the_q_that_is_kept(dtype):
    """By the reference's race over it; it is the draft's own, leaning into the nucleus."""
    torch.manual_seed(3)
    requests, counts, vocabulary, depth = 3, [5, 4], 1500, 2
    logits = (2 * torch.randn(requests * 2, vocabulary)).to(dtype)
    temperature = torch.tensor([1.0, 0.5, 1.4])
    own = parameters(requests, {"top_p": 0.5}, {}, {"top_k": 3})
    drawn = draw(logits, SAMPLED, counts, temperature=temperature, depth=depth, **own)
    for request, place in itertools.product(range(requests), range(2)):
        raw = logits[2 * request + place]
        kept = drawn.draft_logits[request, place, :vocabulary]
        lowered = kept < raw
        assert torch.equal(kept[~lowered], raw[~lowered])
        expected = raw.float() - LOWERED_BY * temperature[request]
        near = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(kept[lowered].float(), expected[lowered], rtol=near, atol=1e-6)
        assert bool(lowered.any()) == (request != 1)
        stats = drawn.draft_stats[request, place]
        scaled = kept.float() / temperature[request]
        torch.testing.assert_close(stats[0], scaled.max(), rtol=1e-6, atol=0)
        torch.testing.assert_close(stats[1], (scaled - scaled.max()).exp().sum(), rtol=1e-5, atol=0)
        reference = sampled_reference(
            kept, temperature[request], request, request + depth, 3 + place, counts[place]
        )
        assert drawn.children(request, place) == reference
        if request != 1:  # the plain Q is another one: a verifier that took it would be wrong
            plain = draft_distribution(raw, temperature[request])
            assert (draft_distribution(kept, temperature[request]) - plain).abs().max() > 0.01


def test_seeded_requests_look_outside_the_nucleus_last():
    torch.manual_seed(4)
    logits = torch.randn(64, 400).mul_(0.3)
    own = parameters(64, {"top_k": 8})
    inside = logits >= logits.topk(8, dim=1).values[:, -1:]
    cut, plain = (draw(logits, SEEDED, [4], **more) for more in (own, {}))

    def share(drawn):
        return inside.gather(1, drawn.tokens[:, 1:-1]).float().mean()

    assert share(cut) > 0.4 > 0.1 > share(plain)


def test_greedy_children_are_the_same_whatever_the_parameters():
    torch.manual_seed(5)
    logits = torch.randn(4, 500)
    cut, plain = (draw(logits, GREEDY, [6], **more) for more in (parameters(4, {"top_k": 1}), {}))
    assert torch.equal(cut.tokens, plain.tokens)
