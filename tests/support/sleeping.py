"""Engines of the rehearsal that sleep without their weights, and what would be lost with these."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.engines import runner_of


def sleep_without_weights(llm: Any) -> None:
    """The second level of sleep, after which both models get their weights again."""
    models = [runner_of(llm).get_model(), runner_of(llm).get_draft_model()]
    weights = [(one, one.detach().clone()) for model in models for one in model.parameters()]
    llm.sleep(level=2)
    assert all(bool(one.isnan().all()) for one, _ in weights if one.is_floating_point())
    llm.wake_up()
    with torch.no_grad():
        for one, loaded in weights:
            one.copy_(loaded)


def lost_of_ours(llm: Any, allocator: Any) -> list[str]:
    """Tensors of our objects, by where they are, that sleep throws away but no loader makes."""
    from gpu_stand_in.graphs import address_of

    runner = runner_of(llm)
    models = [runner.get_model(), runner.get_draft_model()]
    loaded = {
        address_of(one) for model in models for one in (*model.parameters(), *model.buffers())
    }
    roots = {
        "speculator": runner.speculator, "verifier": runner.rejection_sampler,
        "backend": runner.tree_backend, "scoring": runner._scoring,
        "processors": runner.sampler.logits_processors,
    }  # fmt: skip
    return sorted(
        place
        for place, tensor in _tensors("", roots, set())
        if address_of(tensor) not in loaded and allocator.holds(tensor, "weights")
    )


def _tensors(place: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """All that can be reached through containers and objects of the plugin's classes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _tensors(f"{place}.{name}", part, seen)
    elif isinstance(value, list | tuple | set):
        for number, part in enumerate(value):
            yield from _tensors(f"{place}[{number}]", part, seen)
    elif type(value).__module__.startswith("sequoia_vllm"):
        yield from _tensors(place, vars(value), seen)
