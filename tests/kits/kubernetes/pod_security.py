"""The Pod Security Standards, level "restricted", as kubernetes.io writes them down: what a pod breaks of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
}
_SECCOMP = {"RuntimeDefault", "Localhost"}


def violations(pod: dict[str, Any]) -> list[str]:
    """One sentence for each rule that the pod's spec breaks."""
    return [*_of_pod(pod), *(each for container in _containers(pod) for each in _of_container(container, pod))]


def _containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from pod.get(kind, ())


def _of_pod(pod: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is set"
    for volume in pod.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if "hostPath" in kinds:
            yield f"volume {volume['name']} is a hostPath"
        if not kinds <= _VOLUMES:
            yield f"volume {volume['name']}: restricted volume types ({', '.join(kinds)})"
    context = pod.get("securityContext", {})
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in _SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own, of_pod, name = container.get("securityContext", {}), pod.get("securityContext", {}), container["name"]
    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation must be false"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities must drop ALL, and add NET_BIND_SERVICE at most"
    if own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
        yield f"{name}: runAsNonRoot must be true"
    if own.get("runAsUser") == 0:
        yield f"{name}: runAsUser is 0"
    if own.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
        yield f"{name}: seccompProfile must be RuntimeDefault or Localhost"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{name}: hostPort"
