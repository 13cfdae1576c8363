"""Host memory touched too early is found; memory touched in time is not."""

import numpy as np
import pytest
import torch

from tests.gpu_rehearsal.host_copies import HostMemoryError, installed, watch_pools


@pytest.fixture
def copies():
    with installed() as account:
        yield account


def test_a_source_that_changes_before_its_copy_is_done(copies):
    host, device = torch.zeros(4, pin_memory=True), torch.empty(4)
    device.copy_(host, non_blocking=True)
    host.numpy()[2] = 1
    with pytest.raises(HostMemoryError, match=r"test_host_copies.py:\d+: host memory changed"):
        copies.wait()


def test_a_source_that_changes_after_the_event(copies):
    host, device = torch.zeros(4, pin_memory=True), torch.empty(4)
    for value in range(3):
        host.fill_(value)
        device.copy_(host, non_blocking=True)
        copies.wait(copies.mark())
        assert device.tolist() == [value] * 4
    host.fill_(9)
    copies.wait()


def test_an_event_recorded_before_the_copy_says_nothing_of_it(copies):
    host, device = torch.zeros(4, pin_memory=True), torch.empty(4)
    early = copies.mark()
    device.copy_(host, non_blocking=True)
    copies.wait(early)
    host.fill_(1)
    with pytest.raises(HostMemoryError):
        copies.wait()


def test_a_part_that_nobody_copies_may_change(copies):
    host, device = torch.zeros(4, pin_memory=True), torch.empty(2)
    device.copy_(host[:2], non_blocking=True)
    host[3] = 1
    copies.wait()
    device.copy_(host[:2], non_blocking=True)
    host[1] = float("nan")
    with pytest.raises(HostMemoryError):
        copies.wait()


@pytest.mark.parametrize("pageable", [torch.zeros(4), torch.from_numpy(np.zeros(4))])
def test_memory_that_is_not_pinned_is_copied_at_once(copies, pageable):
    device = torch.empty(4, dtype=pageable.dtype)
    device.copy_(pageable, non_blocking=True)
    pageable.fill_(3)
    copies.wait()
    assert device.tolist() == [0] * 4
    pageable.zero_()


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


def test_pinned_memory_moves_to_the_device(copies):
    host = torch.arange(3).pin_memory()
    assert host.is_pinned()
    assert host[1:].is_pinned()
    device = host.to(torch.device("cpu"), non_blocking=True)
    assert not device.is_pinned()
    assert device.tolist() == [0, 1, 2]
    host[0] = 5
    with pytest.raises(HostMemoryError):
        copies.wait()


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


def test_a_buffer_that_nobody_looks_at_may_be_handed_out_again(copies):
    pool = object()
    with copies.buffers_unwatched():
        with copies.buffers_unwatched():
            copies.hand_out(pool, 0)
        copies.hand_out(pool, 0)
    copies.hand_out(pool, 0)
    with pytest.raises(HostMemoryError):
        copies.hand_out(pool, 0)


class Pool:
    """A pool like vLLM's `UvaBufferPool`: two buffers that take turns."""

    def __init__(self):
        self.buffers, self._curr, self.max_concurrency = torch.zeros(2, 3), 0, 2

    def copy_to_uva(self, values):
        self._curr = (self._curr + 1) % self.max_concurrency
        self.buffers[self._curr] = values
        return self.buffers[self._curr]


def test_pools_written_more_often_than_steps_are_waited_for(copies):
    class Watched(Pool):
        pass

    watch_pools(Watched, copies)
    pool, events = Watched(), []
    for step in range(5):  # one under way while the next is prepared
        assert pool.copy_to_uva(torch.full((3,), step)).tolist() == [step] * 3
        events.append(copies.mark())
        if step > 0:
            copies.wait(events[step - 1])
    pool.copy_to_uva(torch.zeros(3))
    with pytest.raises(HostMemoryError):
        pool.copy_to_uva(torch.zeros(3))


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


def test_torch_is_as_it_was_afterwards():
    before = torch.zeros, torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.pin_memory
    with installed():
        assert torch.zeros is not before[0]
    assert (torch.zeros, torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.pin_memory) == before
