"""KV connectors: those of vLLM that take committed tokens only, and why others are refused.

A tree's nodes lie in the slots behind a request's committed tokens. A connector may run beside
trees if it takes the committed ones only, after the step that wrote them.
"""

from typing import Any

_COMMITTED_ONLY = frozenset(
    {
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
_REASONS = {
    "ExampleConnector": "saves each layer within the target's forward, before a path is accepted",
    "LMCacheConnectorV1": "may save each layer within the target's forward, before a path is "
    "accepted, and does not count a draft model's layers",
    "ExampleHiddenStatesConnector": "takes hidden states of nodes that may be rejected",
}


def fault_of_connectors(transfer: Any) -> str | None:
    """Says why a connector must not run beside trees; None: it may.

    Args:
        transfer: vLLM's `KVTransferConfig`.
    """
    one = {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    several = transfer.kv_connector_extra_config.get("connectors", ())
    faults = map(_fault, several if transfer.kv_connector == "MultiConnector" else [one])
    return next((fault for fault in faults if fault is not None), None)


def _fault(connector: dict[str, Any]) -> str | None:
    name = connector["kv_connector"]
    if connector.get("kv_connector_module_path") or name not in _COMMITTED_ONLY:
        return f"{name} {_REASONS.get(name, 'was not read')}"
    options = connector.get("kv_connector_extra_config", {})
    if name.startswith("Nixl") and options.get("bidirectional_kv_xfer"):
        return (
            f"{name} with bidirectional_kv_xfer hands on what was accepted behind an answer's end"
        )
    return None
