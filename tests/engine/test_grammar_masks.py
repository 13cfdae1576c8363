"""Which row of logits each mask of a grammar is for, however masks are laid out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from sequoia_vllm.engine.v2.verification.grammar_masks import MasksOfNodes, place_masks
from sequoia_vllm.engine.worker.worker_gpu import warm_up

LARGEST = 5
# Of four requests in a batch; the second and the fourth have no grammar.
NODES = [3, 5, 1, 2]
FIRST_ROWS = np.array([0, 3, 8, 9, 11], dtype=np.int32)
MASKED = [2, 0]  # as the engine core has them in order
ROWS = [8, 0, 1, 2]


@pytest.mark.parametrize(
    ("num_masks", "used"),
    [(4, [0, 1, 2, 3]), (2 * LARGEST, [0, LARGEST, LARGEST + 1, LARGEST + 2])],
    ids=["of scored nodes", "of largest trees"],
)
def test_masks_find_their_nodes_in_either_layout(num_masks, used):
    masks, rows = place_masks(num_masks, MASKED, FIRST_ROWS, LARGEST)
    assert masks.tolist() == used
    assert rows.tolist() == ROWS


def test_both_layouts_are_one_where_all_trees_are_whole():
    masks, rows = place_masks(LARGEST, [1], FIRST_ROWS, LARGEST)
    assert (masks.tolist(), rows.tolist()) == ([0, 1, 2, 3, 4], [3, 4, 5, 6, 7])


@pytest.mark.parametrize("num_masks", [2, 3, 5, 9, 11, 4 * LARGEST])
def test_another_layout_is_refused(num_masks):
    with pytest.raises(
        ValueError, match=f"{num_masks} masks of grammars for 2 requests of which 4"
    ):
        place_masks(num_masks, MASKED, FIRST_ROWS, LARGEST)


@pytest.fixture
def applied(monkeypatch):
    """What vLLM's worker is made with, and the row of logits and the mask of each that it applies.

    It gets one position of each request, of a batch where a request is a row.
    """
    found = {"options": {}, "turns": []}

    def create(self, **options):
        self.device = torch.device("cpu")
        found["options"] = options

    def apply(self, logits, batch, names, masks):
        assert batch.num_draft_tokens_per_req is None
        assert batch.cu_num_logits.tolist() == batch.cu_num_logits_np.tolist()
        assert len(batch.req_ids) == len(batch.cu_num_logits) - 1 == len(logits)
        places = {name: place for place, name in enumerate(batch.req_ids)}
        rows = [int(batch.cu_num_logits[places[name]]) for name in names]
        found["turns"].append(list(zip(rows, masks[:, 0].tolist(), strict=True)))

    monkeypatch.setattr(StructuredOutputsWorker, "__init__", create)
    monkeypatch.setattr(StructuredOutputsWorker, "apply_grammar_bitmask", apply)
    return found


@pytest.mark.parametrize("added", [{"num_bonus_tokens": 1}, {}], ids=["0.32", "0.33"])
def test_vllms_worker_gets_a_request_for_each_row_and_room_for_what_is_scored(applied, added):
    sizes = {"max_num_logits": 1024 * LARGEST, "mask_stride": LARGEST, "vocab_size": 64}
    worker = MasksOfNodes(3, **sizes, **added)
    assert applied["options"] == {"max_num_logits": 3, "mask_stride": 1, "vocab_size": 64, **added}
    batch = SimpleNamespace(req_ids=list("abcd"), cu_num_logits_np=FIRST_ROWS)
    logits = torch.zeros(sum(NODES), 64)
    worker.apply_grammar_bitmask(logits, batch, ["c", "a"], np.arange(8).reshape(4, 2))
    assert applied["turns"] == [[(8, 0), (0, 2), (1, 4)], [(2, 6)]]
    applied["turns"].clear()
    blocks = np.arange(4 * LARGEST).reshape(2 * LARGEST, 2)
    worker.apply_grammar_bitmask(logits, batch, ["c", "a"], blocks)
    assert applied["turns"] == [[(8, 0), (0, 10), (1, 12)], [(2, 14)]]
    applied["turns"].clear()
    worker.apply_grammar_bitmask(logits, batch, [], blocks[:0])
    assert applied["turns"] == []


def test_a_warm_up_of_smaller_trees_may_send_masks_for_each_of_their_nodes(applied):
    """vLLM 0.33's does; it warms up a prefix of the tree, of whose nodes prompts score one."""
    sizes = {"max_num_logits": 1024 * LARGEST, "mask_stride": LARGEST, "vocab_size": 64}
    worker = MasksOfNodes(8, **sizes)
    runner = SimpleNamespace(
        structured_outputs_worker=worker, tree=SimpleNamespace(size=LARGEST),
        speculator=SimpleNamespace(most_scored=64),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float16)),
    )  # fmt: skip
    rows = np.arange(3, dtype=np.int32)
    own = torch.from_numpy(rows)  # what vLLM's worker gets: nothing is launched for it
    batch = SimpleNamespace(req_ids=["a", "b"], cu_num_logits=own, cu_num_logits_np=rows)

    def warm_up_kernels(with_size):
        nodes = with_size.decode_query_len
        masks = np.arange(2 * nodes, dtype=np.int32)[:, None]
        worker.apply_grammar_bitmask(torch.zeros(2, 64), batch, ["a", "b"], masks)

    warm_up(warm_up_kernels, runner)
    assert applied["turns"] == [[(0, 0), (1, nodes)] for nodes in (LARGEST, 2, 4)]
    assert worker.largest == LARGEST
