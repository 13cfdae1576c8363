"""Options of predictions for targets that are offloaded."""

from __future__ import annotations

from typing import Annotated

import typer

from sequoia_vllm.cli.common import fail
from sequoia_vllm.hardware.offloading import Offload, OffloadBackend
from sequoia_vllm.hardware.streaming import LinkName

OffloadOption = Annotated[
    float | None,
    typer.Option(
        "--offload-gb",
        help="GiB of the target's layers on each device that lie in the host's memory, counted as "
        "by vLLM's --cpu-offload-gb; more than there are: all.",
    ),
]
LinkOption = Annotated[
    LinkName | None,
    typer.Option("--link", help="What they are read over; default: the device's own link."),
]
LinkRateOption = Annotated[
    float | None,
    typer.Option(
        "--link-gb-s",
        help="The rate that is achieved, 10^9 bytes/s, where it was measured: of copies from the "
        "host, or of a disk.",
    ),
]
BackendOption = Annotated[
    OffloadBackend,
    typer.Option(
        "--offload-backend",
        help="prefetch: layers are copied while others compute; uva: products read weights over "
        "the link, once for each 128 rows.",
    ),
]


def offload_of(
    gib: float | None, link: LinkName | None, gb_s: float | None, backend: OffloadBackend
) -> Offload | None:
    """What the options say; None: nothing is offloaded. Fails where they do not fit together."""
    if gib is None:
        if link is not None or gb_s is not None or backend != "prefetch":
            fail("--link, --link-gb-s and --offload-backend are of offloading: give --offload-gb")
        return None
    if link is not None and gb_s is not None:
        fail("--link has a rate of its own: give it or --link-gb-s")
    return Offload(gib, backend, link, gb_s)
