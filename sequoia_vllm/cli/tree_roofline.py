"""``sequoia-vllm tree roofline``: a predicted profile, and how it looks."""

from __future__ import annotations

from pydantic import ValidationError
from rich.table import Table

from sequoia_vllm.hardware import CostModel, DeviceError, Profile, identify, roofline_profile
from sequoia_vllm.hardware.device import known_devices
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.profile import ProfileError


def predict(
    device_name: str, class_name: str, dtype: str, tensor_parallel_size: int, context_length: int
) -> Profile:
    """The roofline profile of a device and model class, both by name.

    Raises:
        DeviceError: If the device has no datasheet values here.
        ProfileError: If the class, dtype or a number is wrong.
    """
    spec = identify(device_name).spec
    if spec is None:
        raise DeviceError(
            f"no datasheet values for {device_name!r}; there are for {', '.join(known_devices())}"
        )
    classes = model_classes()
    if class_name not in classes:
        raise ProfileError(f"no model class {class_name!r}; there are {', '.join(classes)}")
    if tensor_parallel_size < 1:
        raise ProfileError(f"tensor parallel size {tensor_parallel_size}: at least 1 device")
    chosen = classes[class_name]
    try:
        return roofline_profile(
            spec, chosen.target, chosen.draft, dtype, tensor_parallel_size, context_length
        )
    except ValidationError as error:
        raise ProfileError(f"context length {context_length}: must be at least 1") from error
    except ValueError as error:
        raise ProfileError(str(error)) from error


def times_table(profile: Profile) -> Table:
    """Times by tokens per request, for a few batch sizes."""
    cost = CostModel(profile)
    batches = (1, 8, 64)
    table = Table(
        title=f"{profile.device}: {profile.target} with {profile.draft}, TP "
        f"{profile.tensor_parallel_size} ({profile.source}; target / draft level, ms)",
        box=None, pad_edge=False, header_style="bold", title_justify="left",
    )  # fmt: skip
    table.add_column("tokens", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        cells = [
            f"{1e3 * float(cost.target_seconds(tokens, batch)):.2f} / "
            f"{1e3 * float(cost.draft_seconds(tokens, batch)):.2f}"
            for batch in batches
        ]
        table.add_row(str(tokens), *cells)
    return table
