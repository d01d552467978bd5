"""`springtide k8s serve`: run the control plane of a platform on Kubernetes in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from springtide.cli.session import Session


@click.command()
@click.option(
    "--settings",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The platform's settings, as YAML.",
)
@click.option("--state", "state_dir", type=click.Path(path_type=Path), metavar="DIR", help="Where copies may be kept.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), metavar="FILE", help="How to reach the cluster.")
@click.option("--host", default="0.0.0.0", show_default=True, help="The address to listen at.")
@click.pass_obj
def serve(session: Session, /, path: Path, state_dir: Path | None, kubeconfig: Path | None, host: str) -> None:
    """Run the control plane: wait for the lease, then decide, and serve API, gateway and dashboard.

    Exit codes: 0 ended in order (workers train on), 1 failed, 2 wrong use, 3 another control plane has taken over.
    """
    from springtide.backends.kubernetes.install.settings_file import read_settings
    from springtide.service.assembly.kubernetes import ClusterOptions, serve_on_kubernetes
    from springtide.service.server import configure_logging

    settings = read_settings(path)
    configure_logging()
    options = ClusterOptions(
        settings=settings,
        state_dir=(state_dir or session.state_dir).absolute(),
        kubeconfig=kubeconfig,
        host=host,
    )
    sys.exit(serve_on_kubernetes(options))
