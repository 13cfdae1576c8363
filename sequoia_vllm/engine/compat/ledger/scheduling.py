"""What we override of vLLM's scheduling on every device: slots for drafts, and requests at once."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

_SLOTS = "vLLM's look-ahead slots follow its schedule by batch size"

SCHEDULING: tuple[Expected | Override, ...] = (
    # draft_slots.py
    Override(
        f"{_SCHEDULER}.schedule", ("self", "throttle_prefills"),
        kind="patch",
        why="allocates look-ahead slots for the largest number of drafts at any batch size, and "
        "looks the batch's up afterwards; ours sets both for the time of a step's scheduling",
        until=_SLOTS,
    ),
    Override(
        f"{_SCHEDULER}.num_lookahead_tokens",
        kind="instance",
        why="slots for the drafts of a step's batch, while it is scheduled",
        until=_SLOTS,
    ),
    Override(
        f"{_SCHEDULER}.dynamic_sd_lookup",
        kind="instance",
        why="cut to the drafts that there are slots for, while a step is scheduled",
        until=_SLOTS,
    ),
    Expected(f"{_SCHEDULER}.get_request_counts", ("self",)),
    # batch_limits.py
    Override(
        "vllm.config:VllmConfig._set_max_num_scheduled_tokens", ("self",),
        kind="patch",
        why="from 0.33 on sets max_num_active_seqs to the requests that a pass with a row for each "
        "draft has room for, where a head drafts blocks; trees' passes have one for each level, "
        "and take part of a batch",
        until="vLLM asks the speculative method how many requests it drafts for",
    ),
    Override(
        "vllm.config:SpeculativeConfig.max_num_new_slots_for_drafting",
        kind="patch",
        why="in 0.32 counts such rows among those of the target's batch, which fewer requests fit",
        until="0.32 is no longer supported: 0.33 counts none",
    ),
    Expected("vllm.config:SchedulerConfig.max_num_active_seqs"),
    Expected("vllm.config:SpeculativeConfig.use_dflash", ("self",)),
    Expected("vllm.config:SpeculativeConfig.use_dspark", ("self",)),
)  # fmt: skip
