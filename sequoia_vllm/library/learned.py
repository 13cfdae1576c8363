"""The acceptance that engines counted while they served a pair."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from sequoia_vllm.adaptation import AdaptationState, StateError
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import is_there

logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler


def learned_acceptance(path: Path, pair: PairKey) -> AcceptanceFile | None:
    """What the file of a pair says; None: it is not there, or too little was counted."""
    try:
        found = AdaptationState.load(path).usual_acceptance() if is_there(path) else None
    except (StateError, ValueError, LookupError, OSError) as error:
        logger.warning("Sequoia: what was learned while serving is not used: %s", error)
        return None
    if found is None:
        return None
    workload, acceptance = found
    return AcceptanceFile(
        name="learned",
        description=f"counted while serving {workload} requests ({path})",
        source="measured",
        date=datetime.date.fromtimestamp(path.stat().st_mtime),
        target=pair.target,
        draft=pair.draft,
        temperature=0.0 if workload == "greedy" else None,
        acceptance=acceptance.to_list(),
    )
