"""What the proposer keeps of its requests waits for nothing and mixes no devices."""

import pytest

from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def take_and_fill():
    """One step of the buffers behind growth; what they hold on the device afterwards."""
    from types import SimpleNamespace

    import numpy as np
    import torch
    import vllm.v1.worker.gpu.buffer_utils as buffers

    from sequoia_vllm.drafting.draft_batch import DraftBatch, SlotStates
    from sequoia_vllm.drafting.drafted_trees import DraftedTrees
    from sequoia_vllm.drafting.tree_tables import TreeTables
    from sequoia_vllm.engine.v2.drafting.draft_progress import ModelDraftProgress
    from sequoia_vllm.tree import TokenTree
    from tests.support.device_apart import (
        DEVICE,
        DeviceApartError,
        device_apart,
        on_device,
        setting_up,
    )

    buffers.is_uva_available = lambda: True
    buffers.get_accelerator_view_from_cpu_tensor = on_device
    tree = TokenTree([-1, 0, 0, 1])
    with device_apart():
        with setting_up():
            batch = DraftBatch(4, DEVICE)
            progress = ModelDraftProgress(4, [0, 1, 1, 2], unknown_drafts=3, device=DEVICE)
            progress.use_cache({0: 1})
            levels = TreeTables(tree, DEVICE).levels
            drafted = DraftedTrees.empty(4, 8, 2, tree.size, 9, torch.float32, DEVICE)
            modes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
            most = torch.full((4,), 99, dtype=torch.int32, device=DEVICE)
            temperature = torch.ones(4, device=DEVICE)
            top_k = torch.full((4,), 9, dtype=torch.int32, device=DEVICE)
            top_p, min_p = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
            seeds = torch.arange(4, device=DEVICE)
            requests = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
            computed = torch.tensor([7, 0, 5, 0], dtype=torch.int32, device=DEVICE)
            sampled = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
            logits = torch.zeros(2, 9, device=DEVICE)
            lens = torch.tensor([5, 7], dtype=torch.int32, device=DEVICE)
            first = torch.tensor([0, 2, 9], dtype=torch.int32, device=DEVICE)
        blocks = [list(range(10)), list(range(10, 20))]  # of one token each

        def bounds_after(slots: list[int], cached: list[int], scheduled: list[int]) -> np.ndarray:
            """Rows to read once requests have started and their prompts are in the cache."""
            for slot, tokens_cached in zip(slots, cached, strict=True):
                progress.start(slot, tokens_cached, [blocks[slot // 2]])
            reads = np.ones(len(slots), dtype=bool)
            step = SimpleNamespace(
                idx_mapping_np=np.array(slots), is_prefilling_np=reads,
                num_computed_tokens_np=np.array(cached, dtype=np.int32),
                num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
                num_draft_tokens_per_req=None,
            )  # fmt: skip
            progress.gain(step)
            return progress.take_bounds(np.array(slots), reads, 64)

        bounds_after([2], [0], [3])  # the draft fills three blocks, which slot 2 finds again
        bounds = bounds_after([2, 0], [3, 0], [2, 7])
        states = SlotStates(
            computed, progress.read, modes, most, temperature, top_k, top_p, min_p, seeds,
            drafted.nodes, drafted.rows,
        )  # fmt: skip
        batch.begin(
            requests=requests, num_sampled=sampled,
            bounds=buffers.async_tensor_h2d(bounds, device=DEVICE), states=states,
            seq_lens=lens, query_start_loc=first, levels=levels, longest=99, max_trees=4,
        )  # fmt: skip
        drafted.draw(batch, 2, levels, levels.levels[0], logits)
        refused = []
        for wrong in (lambda: batch.counts.tolist(), lambda: batch.roots[torch.tensor([1, 0])]):
            try:
                wrong()
            except DeviceApartError as error:
                refused.append(str(error))
        with setting_up():
            held = [batch.slots.tolist(), batch.starts.tolist(), batch.roots.tolist()]
            return {
                "held": held,
                "counts": batch.counts.tolist(),
                "nodes": drafted.nodes.tolist(),
                "drawn": drafted.tokens[:2].tolist(),
                "refused": len(refused),
            }


def test_the_proposers_buffers(tmp_path):
    result = call_on_v2(take_and_fill, tmp_path)
    assert result["held"] == [[2, 0, -1, -1], [3, 0, 0, 0], [5, 7, 0, 0]]
    assert result["counts"] == [3, 8, 0, 0]
    assert result["nodes"] == [4, 0, 4, 0]
    assert result["drawn"] == [[0, 0, 1, 0], [0, 0, 1, 0]]
    assert result["refused"] == 2
