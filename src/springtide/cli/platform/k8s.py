"""`springtide k8s`: print the platform's manifests, check a cluster, and run the control plane."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from springtide.cli.session import Session, common_options, json_option, refuse, state_option

if TYPE_CHECKING:
    from springtide.backends.kubernetes.install.settings_file import SettingsFile

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_CHANGES = (
    ("namespace", "namespace", "Where the platform itself lives.", "NAME"),
    ("registry", "install.registry", "Where the images are, like registry.example.com/ml.", "PLACE"),
    ("store", "store_url", "The object store, like s3://bucket/springtide.", "URL"),
    ("journal", "journal_url", "A journal in PostgreSQL, like postgresql://springtide@host/springtide.", "URL"),
    ("policy", "policy", "The scheduling policy.", "NAME"),
)


class _Commands(click.Group):
    """Imports `serve` only when it is called, because printing manifests needs no server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), "serve"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module("springtide.cli.platform.k8s_serve").serve
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands)
@json_option
@state_option
def k8s() -> None:
    """Run the platform on Kubernetes: render | kubectl apply, then check."""


def _settings_options(command: CommandT) -> CommandT:
    """A decorator that adds the settings file and the options that override single settings."""
    for flag, key, help_line, metavar in reversed(_CHANGES):
        command = click.option(f"--{flag}", key.replace(".", "_"), metavar=metavar, help=help_line)(command)
    command = click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any setting, like install.replicas=2 or namespaces=[ml,web]; may be given several times.",
    )(command)
    return click.option(
        "--settings",
        "path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The settings, as YAML. [default: every setting as documented]",
    )(command)


def _settings_of(path: Path | None, changes: tuple[str, ...], flags: dict[str, str | None]) -> SettingsFile:
    """The settings of the file with the command line's overrides, checked. Raises InvalidRequest."""
    from springtide.backends.kubernetes.client.yaml_text import read_yaml
    from springtide.backends.kubernetes.install.settings_file import read_values, settings_from

    values = {} if path is None else read_values(path)
    named = [(key, flags[key.replace(".", "_")]) for _, key, _, _ in _CHANGES]
    given: list[tuple[str, Any]] = [(key, value) for key, value in named if value is not None]
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator or not key:
            refuse(f"--set takes KEY=VALUE, like install.replicas=2, not {change!r}")
        documents = read_yaml(text, f"--set {key}")
        given.append((key, documents[0] if documents else ""))
    for key, value in given:
        table = values
        *parents, last = key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                refuse(f"--set {key}: {parent} is no table of settings")
        table[last] = value
    return settings_from(values, "the settings" if path is None else str(path))


@k8s.command()
@_settings_options
@click.option(
    "--kubernetes",
    "version",
    default="1.30",
    show_default=True,
    metavar="VERSION",
    help="The cluster's version: what is written depends on what it knows.",
)
@click.option(
    "--crds/--no-crds", default=True, show_default=True, help="With the definitions of the platform's objects."
)
@common_options
@click.pass_obj
def render(
    session: Session, /, path: Path | None, changes: tuple[str, ...], version: str, crds: bool, **flags: str | None
) -> None:
    """Print every manifest: springtide k8s render --settings FILE | kubectl apply -f -"""
    from springtide.backends.kubernetes.client.yaml_text import write_yaml
    from springtide.backends.kubernetes.install.manifests import render as render_manifests

    settings = _settings_of(path, changes, flags)
    objects = [*(_definitions() if crds else ()), *render_manifests(settings, _version_of(version))]
    session.answer(objects, write_yaml(objects).rstrip("\n"))


@k8s.command()
@common_options
@click.pass_obj
def crds(session: Session) -> None:
    """Print the definitions of TrainingFunction and InferenceFunction."""
    from springtide.backends.kubernetes.client.yaml_text import write_yaml

    objects = _definitions()
    session.answer(objects, write_yaml(objects).rstrip("\n"))


@k8s.command()
@_settings_options
@click.option(
    "--kubeconfig", type=click.Path(path_type=Path), metavar="FILE", help="[default: $KUBECONFIG, as kubectl]"
)
@click.option("--context", default="", metavar="NAME", help="A context of the kubeconfig. [default: its current one]")
@common_options
@click.pass_obj
def check(
    session: Session,
    /,
    path: Path | None,
    changes: tuple[str, ...],
    kubeconfig: Path | None,
    context: str,
    **flags: str | None,
) -> None:
    """Compare a cluster with what the platform needs there. Exit code 1 if something must be mended."""
    import asyncio

    from springtide.backends.kubernetes.client.api import KubeApi
    from springtide.backends.kubernetes.install.cluster_check import ClusterFinding, check_cluster
    from springtide.service.assembly.function_cluster_check import check_functions

    settings = _settings_of(path, changes, flags)

    async def look() -> list[ClusterFinding]:
        api = KubeApi.connect(kubeconfig, context=context)
        try:
            return await check_cluster(api, settings, check_functions)
        finally:
            await api.close()

    findings = asyncio.run(look())
    failed = [finding for finding in findings if finding.verdict == "fail"]
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict]
        verdict = click.style(f"{finding.verdict:<4}", fg=colour)
        lines.append(f"{verdict}  {finding.name.ljust(width)}  {finding.text}")
        if finding.mend:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.mend}")
    hint = "mend the lines marked fail, then run it again" if failed else ""
    session.answer({"checks": findings, "passed": not failed}, "\n".join(lines), hint)
    if failed:
        raise click.exceptions.Exit(1)


def _definitions() -> list[dict[str, Any]]:
    from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions

    return list(custom_resource_definitions())


def _version_of(text: str) -> tuple[int, int]:
    """ "v1.30.2" -> (1, 30). Raises InvalidRequest."""
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        refuse(f"--kubernetes takes a version like 1.30, not {text!r}; `kubectl version` prints the server's")
    return int(parts[0]), int(parts[1])
