"""Host memory touched too early is found; memory touched in time is not."""

import numpy as np
import pytest
import torch

from tests.gpu_rehearsal.host_copies import HostCopies, HostMemoryError, install, watch_pools


@pytest.fixture
def copies():
    account = HostCopies()
    patch = install(account)
    yield account
    patch.undo()


def test_a_source_that_changes_before_its_copy_is_done(copies):
    host, device = torch.zeros(4, pin_memory=True), torch.empty(4)
    device.copy_(host, non_blocking=True)
    host.numpy()[2] = 1
    with pytest.raises(HostMemoryError, match=r"test_host_copies.py:\d+: host memory changed"):
        copies.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.bool])
def test_the_host_reads_nothing_before_it_has_waited(copies, dtype):
    device = torch.ones(3, dtype=dtype)
    host = torch.zeros(3, dtype=dtype, pin_memory=True)
    host.copy_(device, non_blocking=True)
    moved = device.to("cpu", non_blocking=True)
    device.zero_()  # later work of the device, after the copy
    for arriving in (host, moved):
        assert not torch.equal(arriving, torch.ones(3, dtype=dtype))
    copies.wait()
    for arrived in (host, moved):
        assert torch.equal(arrived, torch.ones(3, dtype=dtype))


def test_a_buffer_read_in_place_is_handed_out_again(copies):
    pool = object()
    copies.hand_out(pool, 0)
    copies.hand_out(pool, 1)
    with pytest.raises(HostMemoryError, match="buffer 0 is written while the device reads"):
        copies.hand_out(pool, 0)
    first = copies.mark()
    copies.wait(first)
    copies.hand_out(pool, 0)
    copies.hand_out(pool, 1)
    with pytest.raises(HostMemoryError):
        copies.hand_out(pool, 1)


def test_drafting_may_follow_the_event_that_the_host_waits_for(copies, monkeypatch):
    """Requests that start in each of several steps, of which the host is one ahead."""
    from vllm.v1.worker.gpu import buffer_utils

    from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress

    pools = buffer_utils.UvaBufferPool
    monkeypatch.setattr(pools, "copy_to_uva", pools.copy_to_uva)  # to be undone
    watch_pools(pools, copies)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(buffer_utils, "async_tensor_h2d", lambda values, **_: values)
    launches = []
    kernel = {(1,): lambda *arguments, **_: launches.append(arguments[2].tolist())}
    monkeypatch.setattr(buffer_utils, "_apply_write_kernel", kernel)
    progress = DraftProgress(4, [0, 1], torch.device("cpu"))
    events = []
    for step in range(8):
        progress.start(step % 4, 0, [])
        events.append(copies.mark())  # of the step's tokens, which are there before it drafts
        progress.take_bounds(np.array([step % 4]), np.array([True]), 8)
        if step > 0:
            copies.wait(events[step - 1])
    assert launches == [[step % 4] for step in range(8)]
