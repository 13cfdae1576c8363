"""Plans and trees of engines that are not started."""

from typing import Any

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.frontend.plan import Plan, plan
from sequoia_vllm.engine.frontend.tree_choice import Facts, TreeChoice, look_up
from sequoia_vllm.library.pair_key import PairKey, PairShapes


def planned(
    config: SequoiaConfig,
    pair: PairKey,
    kind: str = "model",
    shapes: PairShapes | None = None,
    **facts: Any,
) -> Plan:
    """The plan for a pair whose draft is of this kind."""
    found = look_up(config, pair, shapes)
    facts = {"file_name": pair.file_name, **facts}
    return plan(config, Facts(pair, drafter(kind), library=found, **facts))


def chosen(
    config: SequoiaConfig, pair: PairKey, shapes: PairShapes | None = None, **limits: Any
) -> TreeChoice:
    """The tree that an engine of this pair takes."""
    return planned(config, pair, shapes=shapes, **limits).choice
