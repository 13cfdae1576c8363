"""What processes of a test's own Ray cluster have in their environment."""

import secrets

from tests.support.serving import environment


def ray_environment() -> dict[str, str]:
    """Variables of a cluster that nobody else can join, from the daemons to the drivers."""
    inherited = {name: value for name, value in environment().items() if name[:4] != "RAY_"}
    return inherited | {
        # Of this cluster: without it Ray keeps one for all in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "240",  # 30 otherwise, too few on a busy machine
        "RAY_prestart_worker_first_driver": "0",  # no worker that no actor needs
    }
