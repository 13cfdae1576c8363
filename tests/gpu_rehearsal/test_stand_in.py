"""What the rehearsal rests on of its graphs, and `test_mutants.py` does not show."""

from typing import Any

import pytest
import torch

from tests.support.interpreted import call_on_gpu

pytestmark = pytest.mark.slow


def check_all() -> None:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert current_platform.is_cuda()
    results_are_destroyed_by_other_graphs_of_the_pool()
    memory_that_nothing_filled_is_poison()
    waiting_for_the_device_is_refused()


def _captured(work: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool="a pool"):
        work()
    return graph


def _raises(work: Any, text: str) -> None:
    from gpu_stand_in.graphs import CaptureError

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=text), torch.cuda.graph(graph):
        work()


def results_are_destroyed_by_other_graphs_of_the_pool() -> None:
    kept = []
    first = _captured(lambda: kept.append(torch.ones(3) + 1))
    second = _captured(lambda: torch.ones(3) + 5)
    assert kept[0].isnan().all()  # capturing computes nothing
    first.replay()
    assert kept[0].tolist() == [2.0] * 3
    second.replay()
    assert kept[0].isnan().all()


def memory_that_nothing_filled_is_poison() -> None:
    result, integers = torch.zeros(3), torch.zeros(3, dtype=torch.int32)

    def copy_empty() -> None:
        result.copy_(torch.empty(3))
        integers.copy_(torch.empty(3, dtype=torch.int32))

    _captured(copy_empty).replay()
    assert result.isnan().all()
    assert integers.tolist() == [-77] * 3


def waiting_for_the_device_is_refused() -> None:
    values = torch.arange(4)
    _raises(lambda: values[0].item(), "_local_scalar_dense")
    _raises(lambda: int(values.sum()), "_local_scalar_dense")
    _raises(lambda: bool(values[0]), "")
    _raises(lambda: values.nonzero(), "nonzero")
    _raises(lambda: values[values > 1], "")
    _raises(lambda: values.masked_select(values > 1), "masked_select")
    _raises(torch.cuda.synchronize, "cuda.synchronize")
    _raises(lambda: torch.cuda.Event().query(), "Event.query")
    _raises(lambda: torch.cuda.mem_get_info(), "free memory")


def test_stand_in(tmp_path):
    call_on_gpu(check_all, tmp_path, timeout=120)
