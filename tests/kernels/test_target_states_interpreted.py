"""The target's states along accepted paths against a plain loop over rows."""

import itertools

import pytest
import torch

from sequoia_vllm.kernels.draft_inputs import gather_target_states

# Three requests with trees of up to seven nodes, then two that read five and two tokens.
QUERY_START_LOC = [0, 7, 10, 17, 22, 24]
ACCEPTED = [[2, 5, 6], [-1, -1, -1], [1, -1, -1]]


@pytest.mark.parametrize("hidden", [3, 1030])
@pytest.mark.parametrize("num_layers", [1, 3, 8])
@pytest.mark.parametrize("accepted", [ACCEPTED, []])
def test_states_along_paths(hidden, num_layers, accepted):
    counts = [5, 0, 5, 5, 2] if accepted else [7, 3, 0, 5, 2]
    expected = []  # the target's row of each token; None: nobody reads it
    for request, count in enumerate(counts):
        first = QUERY_START_LOC[request]
        nodes = [0, *accepted[request], -1] if request < len(accepted) else range(count)
        expected += [first + node if node >= 0 else None for node in nodes[:count]]
    torch.manual_seed(hidden)
    # Wider than what is read, as a graph's outputs are.
    layers = [torch.randn(30, hidden) for _ in range(num_layers)]
    states = torch.full((len(expected) + 2, num_layers * hidden), -99.0)
    # As the verifier keeps them: beside the number of nodes.
    paths = torch.tensor([[7, *path] for path in accepted], dtype=torch.int32).view(-1, 4)[:, 1:]
    gather_target_states(
        layers,
        query_start_loc=torch.tensor(QUERY_START_LOC, dtype=torch.int32),
        accepted=paths if accepted else None,
        first_rows=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        states=states[:-1],
    )
    together = torch.cat(layers, dim=1)
    for found, row in zip(states, expected, strict=False):
        if row is None:
            assert found.isfinite().all()
            assert (found != -99.0).all()
        else:
            assert torch.equal(found, together[row])
    assert expected.count(None) < len(expected) / 2
    assert torch.equal(states[-2], together[0])  # of no request
    assert (states[-1] == -99.0).all()


def gather(layers, rows):
    gather_target_states(
        layers, query_start_loc=torch.tensor([0, 2], dtype=torch.int32), accepted=None,
        first_rows=torch.tensor([0, rows], dtype=torch.int32),
        states=torch.empty(rows, 4 * len(layers)),
    )  # fmt: skip


def test_no_rows():
    gather([torch.ones(2, 4)], rows=0)


@pytest.mark.parametrize(
    "layers",
    [[], [torch.ones(2, 4)] * 9, [torch.ones(2, 4), torch.ones(2, 8)[:, ::2]]],
    ids=["none", "too many", "unlike"],
)
def test_layers_that_cannot_be_gathered(layers):
    with pytest.raises(ValueError, match="layers"):
        gather(layers, rows=1)
