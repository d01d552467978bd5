"""`springtide apply`: create or change training and inference functions from files of objects, as kubectl does."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from springtide.cli.session import Session, common_options
from springtide.core.errors import InvalidRequest


@click.command()
@click.option(
    "-f", "--file", "files", multiple=True, required=True, metavar="FILE", help="YAML or JSON; - reads standard input."
)
@click.option("--namespace", metavar="NAME", help="For objects that name none. [default: the kubeconfig's]")
@common_options
@click.pass_obj
def apply(session: Session, files: tuple[str, ...], namespace: str | None) -> None:
    """Make the objects in FILE, or change them to what it says.

    Takes TrainingFunction, InferenceFunction and ConfigMap, and refuses unknown fields.
    """
    from springtide.backends.kubernetes.client.yaml_text import read_yaml
    from springtide.client.kubernetes import ClusterClient, check_object

    objects = []
    for file in files:
        place = "standard input" if file == "-" else file
        for number, document in enumerate(read_yaml(_text_of(file), place), 1):
            # A List object stands for its items.
            is_list = isinstance(document, dict) and str(document.get("kind", "")).endswith("List")
            items = document.get("items") or () if is_list else [document]
            objects += [check_object(item, f"{place}, document {number}") for item in items]
    if not objects:
        raise InvalidRequest(
            "there is no object in it; a TrainingFunction begins with apiVersion: springtide.dev/v1alpha1"
        )
    done = []
    with ClusterClient() as cluster:
        # ConfigMaps first, because other objects name them as their source.
        for obj in sorted(objects, key=lambda obj: obj["kind"] != "ConfigMap"):
            if namespace:
                obj["metadata"].setdefault("namespace", namespace)
            applied = cluster.apply(obj)
            session.note(f"{obj['kind'].lower()}/{obj['metadata']['name']} {applied.verb}")
            done.append(applied.object)
    if session.as_json:
        session.print_json(done)
    else:
        session.hint("watch them: kubectl get springtide" + (f" -n {namespace}" if namespace else ""))


def _text_of(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror or error}") from None
