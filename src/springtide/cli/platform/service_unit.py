"""The systemd unit that starts the platform with the machine, or with its user."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from springtide.core.errors import BackendError

UNIT = "springtide.service"


def unit_text(command: Sequence[str], *, is_of_user: bool) -> str:
    """The unit that runs the command, and starts it again a second after it has died, five times in ten minutes."""
    target = "default.target" if is_of_user else "multi-user.target"
    return f"""[Unit]
Description=Springtide: elastic training and serving
After=network.target
# Five deaths within ten minutes are not mended by a sixth start.
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
ExecStart={shlex.join(command)}
Restart=on-failure
RestartSec=1
# Workers outlive the control plane: only its own process is ended, and it ends them in order.
KillMode=process
TimeoutStopSec=90
UMask=0077

[Install]
WantedBy={target}
"""


def unit_path(*, is_of_user: bool) -> Path:
    """Where systemd looks for units of this user, or of the machine."""
    if not is_of_user:
        return Path("/etc/systemd/system") / UNIT
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user" / UNIT


def install_unit(command: Sequence[str]) -> tuple[Path, str]:
    """Write the unit: root's for the machine, anybody else's for the user. Returns its path and what starts it.

    Raises BackendError.
    """
    is_of_user = os.geteuid() != 0
    path = unit_path(is_of_user=is_of_user)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit_text(command, is_of_user=is_of_user), encoding="utf-8")
    except OSError as error:
        raise BackendError(f"the unit {path} cannot be written: {error.strerror}") from error
    manager = "systemctl --user" if is_of_user else "systemctl"
    lingers = f" && loginctl enable-linger {os.environ.get('USER', '')}".rstrip() if is_of_user else ""
    return path, f"{manager} daemon-reload && {manager} enable --now springtide{lingers}"
