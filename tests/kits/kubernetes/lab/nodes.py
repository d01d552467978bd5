"""A lab with two real nodes: two containerds, two kubelets, two bridges, devices in the nodes' status.

Everything has names of its own (bridges, control groups, network namespaces, addresses), so that it stands beside
another lab of this machine; a lock lets only one such lab be at a time.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Lab, binary_folder, command_of, free_ports, has_ended, lab_folder
from kits.kubernetes.lab.remains import CGROUPS, bridge_name, cgroup_name

NODES = ("127.0.0.1", "127.0.0.2")
DEVICE_RESOURCE = "springtide.dev/device"
IMAGE = "localhost/busybox:1"
READY_S = 240.0
# After so many seconds without a word of its kubelet a node counts as silent; kubelets speak six times as often.
SILENT_S = 12
SYSCTLS = ("vm.overcommit_memory", "kernel.panic", "kernel.panic_on_oops", "net.ipv4.ip_forward")
TOOLS = ("containerd", "ctr", "runc", "busybox", "gcc", "ip", "conntrack", "openssl")
CONTAINERD = """
version = 2
root = "{home}/cri/root"
state = "{home}/cri/state"
[grpc]
  address = "{home}/cri/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/cri/opt"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "/usr/sbin/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{home}/cni"
"""


def missing_nodes() -> str:
    """Why no kubelet can run here; "" if one can."""
    if os.geteuid() != 0:
        return "real nodes need root: containers, control groups and network namespaces are made"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"real nodes need {', '.join(absent)}, which this machine does not have" if absent else ""


class NodeLab(Lab):
    """An API server with two nodes. Each has `devices` of the extended resource once `offer` was called."""

    has_nodes = True
    _is_there = False

    def start(self) -> None:
        """Bring all of it up and wait until both nodes are ready. Raises AssertionError."""
        # A second one would wait for the end of the first, which is this process itself, for ever.
        assert not NodeLab._is_there, "this session has a lab with nodes: take it from the fixture `node_lab`"
        NodeLab._is_there = True
        super().start()
        self._kubelets: dict[int, list[str]] = {}
        self.subnets = _free_subnets(len(NODES))
        before = {name: Path("/proc/sys", *name.split(".")).read_text().strip() for name in SYSCTLS}
        bridges = [bridge_name(number) for number in range(len(NODES))]
        (self.folder / "machine.json").write_text(json.dumps({"bridges": bridges, "sysctls": before}))
        images = self._make_images()
        for number in range(len(NODES)):
            self._start_node(number, images)
        for number in range(len(NODES)):
            self._wait_ready(number)

    def _tune_controllers(self) -> None:
        """A kubelet that is silent is found out sooner than usual: tests wait for that."""
        started = wait_for("the controllers", lambda: _begins_with("kube-controller-manager", self.pid("kcm")))
        self._kill("kcm")
        changes = {"--node-monitor-grace-period": f"{SILENT_S}s", "--node-monitor-period": "1s"}
        kept = [word for word in started if word.partition("=")[0] not in changes]
        self._spawn("kcm", [*kept, *(f"{name}={value}" for name, value in changes.items())])

    def stop(self) -> None:
        if self._keeper is not None:
            super().stop()
            NodeLab._is_there = False

    def _wait_ready(self, number: int) -> None:
        """Wait for a node. A kubelet that ends on the way is started again: somebody else took its port, say."""
        daemon = f"kubelet-{number}"

        def is_there() -> bool:
            if has_ended(self.pid(daemon)):
                print(f"{daemon} has ended and is started again: {self._last_words(daemon)}")
                self._spawn(daemon, self._kubelets[number], AWS_EC2_METADATA_DISABLED="true")
            return self.is_ready(NODES[number])

        try:
            wait_for(f"node {NODES[number]}", is_there, READY_S, every_s=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last words of its kubelet: {self._last_words(daemon)}") from None

    def _last_words(self, daemon: str) -> str:
        """Why a daemon ended, if it said so, else the end of its log."""
        log = (self.folder / f"{daemon}.log").read_text(errors="replace")
        fatal = [line for line in log.splitlines() if re.match(r"F\d{4} ", line)]
        return "\n".join(fatal[-3:]) or log[-3000:]

    @property
    def host(self) -> str:
        """The address at which pods of either node reach this machine."""
        return str(self.subnets[0][1])

    def is_ready(self, node: str) -> bool:
        found = self.api.find(f"api/v1/nodes/{node}")
        conditions = found["status"].get("conditions", []) if found else []
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)

    def offer(self, node: str, devices: int, labels: dict[str, str] | None = None) -> None:
        """Give a node this many devices, as a device plugin would, and labels."""
        changes = [
            {"op": "add", "path": f"/status/{place}/{DEVICE_RESOURCE.replace('/', '~1')}", "value": str(devices)}
            for place in ("capacity", "allocatable")
        ]
        self.api.patch(f"api/v1/nodes/{node}/status", changes, "json")
        self.api.patch(f"api/v1/nodes/{node}", {"metadata": {"labels": labels or {}}})

    def kill_kubelet(self, node: str) -> None:
        """Stop a kubelet as a crash would. Its pods run on."""
        self._kill(f"kubelet-{NODES.index(node)}")

    def start_kubelet(self, node: str) -> None:
        self._restart(f"kubelet-{NODES.index(node)}")

    def container_pids(self, pod_uid: str) -> list[int]:
        """The processes of a pod's containers on this machine, the oldest first; the sandbox's own left out."""
        pids: set[int] = set()
        for root in CGROUPS.glob(f"pids/springtide-{self.folder.name}-*"):
            for path in root.rglob(f"pod{pod_uid}/*/cgroup.procs"):
                pids |= {int(pid) for pid in path.read_text().split()}
        return sorted(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() != "pause")

    def end_pod(self, pod: dict[str, Any]) -> None:
        """End a pod that nobody needs any more at once: the kubelet would give it all of its grace."""
        for pid in self.container_pids(pod["metadata"]["uid"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        path = f"api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.api.delete(path, gracePeriodSeconds=0)

    def _make_images(self) -> list[Path]:
        folder = self.folder / "img"
        folder.mkdir()
        here = lab_folder()
        subprocess.run(["gcc", "-Os", "-static", "-s", "-o", folder / "pause", here / "pause.c"], check=True)
        # The first is root in name only: pods run as numbers.
        (folder / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        busybox = shutil.which("busybox")
        names = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
        links = [f"bin/{name}=->busybox" for name in names if name != "busybox"]
        contents = {
            "pause": ('["/pause"]', [f"pause={folder / 'pause'}"]),
            "busybox": ('["/bin/sh"]', [f"bin/busybox={busybox}", f"etc/passwd={folder / 'passwd'}", *links]),
        }
        made = []
        for name, (command, files) in contents.items():
            target = folder / f"{name}.tar"
            make = [sys.executable, str(here / "mkimage.py"), str(target), f"localhost/{name}:1", command, *files]
            subprocess.run(make, check=True)
            made.append(target)
        return made

    def _start_node(self, number: int, images: list[Path]) -> None:
        home = self.folder / f"n{number}"
        for name in ("cri", "cni", "kubelet"):
            (home / name).mkdir(parents=True)
        self._make_network(number, home)
        (home / "containerd.toml").write_text(CONTAINERD.format(home=home))
        self._spawn(f"containerd-{number}", ["containerd", "-c", str(home / "containerd.toml")])
        socket = home / "cri" / "containerd.sock"
        wait_for("containerd", socket.is_socket)
        for image in images:
            load = ["ctr", "-a", str(socket), "-n", "k8s.io", "images", "import", str(image)]
            subprocess.run(load, check=True, capture_output=True)
        self._make_kubelet_files(number, home)
        for hierarchy in [path for path in CGROUPS.iterdir() if path.is_dir() and path.name != "unified"]:
            made = hierarchy / cgroup_name(self.folder, number)
            made.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (made / name).exists():
                    (made / name).write_text((hierarchy / name).read_text())
        command = [
            *(str(binary_folder() / "kubelet"), f"--config={home}/kubelet.yaml", f"--kubeconfig={home}/kubeconfig"),
            *(f"--root-dir={home}/kubelet", f"--hostname-override={NODES[number]}", "--container-runtime=remote"),
            *(f"--container-runtime-endpoint=unix://{socket}", "--pod-infra-container-image=localhost/pause:1"),
            *(f"--cert-dir={home}/kubelet/pki", "--v=1"),
        ]
        self._kubelets[number] = command
        self._spawn(f"kubelet-{number}", command, AWS_EC2_METADATA_DISABLED="true")

    def _make_network(self, number: int, home: Path) -> None:
        # The bridge is made here, not at the first pod: servers for pods can listen on it before there is one.
        subnet, bridge = self.subnets[number], bridge_name(number)
        # An address of its own: else it takes that of one of its ports, and who talks through it falls silent for
        # seconds whenever the pod behind that port ends.
        address = f"02:00:0a:{subnet.network_address.packed[1]:02x}:{subnet.network_address.packed[2]:02x}:01"
        subprocess.run(["ip", "link", "add", bridge, "address", address, "type", "bridge"], check=True)
        subprocess.run(["ip", "addr", "add", f"{subnet[1]}/{subnet.prefixlen}", "dev", bridge], check=True)
        subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
        addresses = {"type": "host-local", "dataDir": f"{home}/addresses", "ranges": [[{"subnet": str(subnet)}]]}
        plugin = {"type": "bridge", "bridge": bridge, "isDefaultGateway": True, "ipMasq": False, "ipam": addresses}
        network = {"cniVersion": "0.4.0", "name": f"{self.folder.name}-{number}", "plugins": [plugin]}
        (home / "cni" / "10-lab.conflist").write_text(json.dumps(network))

    def _make_kubelet_files(self, number: int, home: Path) -> None:
        name, pki = NODES[number], self.folder / "pki"
        request = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/O=system:nodes/CN=system:node:{name}"]
        subprocess.run(
            [*request, "-keyout", home / "kubelet.key", "-out", home / "kubelet.csr"], check=True, capture_output=True
        )
        (home / "extensions").write_text(f"subjectAltName=IP:{name}\nextendedKeyUsage=serverAuth,clientAuth\n")
        sign = ["openssl", "x509", "-req", "-in", home / "kubelet.csr", "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key"]
        rest = ["-CAcreateserial", "-days", "365", "-out", home / "kubelet.crt", "-extfile", home / "extensions"]
        subprocess.run([*sign, *rest], check=True, capture_output=True)
        user = {"client-certificate": f"{home}/kubelet.crt", "client-key": f"{home}/kubelet.key"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "lab", "cluster": {"server": self.api.server, "certificate-authority": f"{pki}/ca.crt"}}
            ],
            "users": [{"name": "kubelet", "user": user}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "kubelet"}}],
            "current-context": "lab",
        }
        (home / "kubeconfig").write_text(json.dumps(config))
        (home / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        port, health = free_ports(2)
        (home / "kubelet.yaml").write_text(json.dumps(_kubelet_settings(home, name, port, health, pki, self.folder)))


def _begins_with(program: str, pid: int) -> list[str]:
    """How a process was started, as soon as it is this program and no more the shell that starts it."""
    command = command_of(pid)
    return command if command[0].endswith(f"/{program}") else []


def _kubelet_settings(home: Path, name: str, port: int, health: int, pki: Path, folder: Path) -> dict[str, object]:
    number = NODES.index(name)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": name,
        "port": port,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": health,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": f"{home}/kubelet.crt",
        "tlsPrivateKeyFile": f"{home}/kubelet.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup_name(folder, number)}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        # The machine's own rules are left alone: there is no kube-proxy that would need them.
        "makeIPTablesUtilChains": False,
        "failSwapOn": False,
        "resolvConf": f"{home}/resolv.conf",
        # There is no DNS here: one that refuses at once is better than one that does not answer.
        "clusterDNS": [],
        "clusterDomain": "cluster.local",
        "runtimeRequestTimeout": "2m",
        "nodeStatusUpdateFrequency": "2s",
        # A quarter of it is how often the node's lease is renewed.
        "nodeLeaseDurationSeconds": 8,
        "imageMinimumGCAge": "24h",
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "serializeImagePulls": False,
        "protectKernelDefaults": False,
        "volumePluginDir": f"{home}/kubelet/plugins",
    }


def _free_subnets(count: int) -> list[ipaddress.IPv4Network]:
    """Networks that no route of this machine speaks of."""
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout.split()
    known = []
    for word in routes:
        try:
            known.append(ipaddress.IPv4Network(word, strict=False))
        except ValueError:
            continue
    candidates = [
        ipaddress.IPv4Network(f"10.{second}.{third}.0/24") for second in (246, 247, 248) for third in range(8)
    ]
    free = [one for one in candidates if not any(one.overlaps(other) for other in known)]
    assert len(free) >= count, "no free network is left for the lab's pods"
    return free[:count]
