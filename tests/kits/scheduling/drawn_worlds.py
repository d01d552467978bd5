"""Small clusters with jobs and services of every kind that come, slow down and ask for more: each decision is carried
out, and looked at for promises that were given up although weaker claims kept devices."""

from __future__ import annotations

import random

from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.sharing_views import job, service
from springtide.control.controller import check_plan
from springtide.core.decision import Allocation, JobView, Plan, ServiceView, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Goal, JobState, WorkloadId
from springtide.scheduling.registry import make_live_policy

SHARES = tuple(Share(request=part, limit=part + 0.2) for part in (0.3, 0.5, 0.7))
BATCH = 32


class DrawnWorld:
    """Whole devices and parts; each job runs at its own multiple of the speed that it was profiled with."""

    def __init__(self, seed: int) -> None:
        self._seed, self._draws = seed, random.Random(seed)
        self._policy = make_live_policy("springtide")
        sizes = [self._draws.choice([2, 2, 4]) for _ in range(self._draws.choice([1, 1, 2, 3]))]
        self._cluster = Topology(nodes=tuple(make_node(f"n{at}", size) for at, size in enumerate(sizes)))
        self._now_s = 0.0
        self._jobs: dict[WorkloadId, JobView] = {}
        self._services: dict[WorkloadId, ServiceView] = {}
        self._held: dict[WorkloadId, Allocation] = {}
        self._speed: dict[WorkloadId, float] = {}
        self._memory = None

    def play(self, num_decisions: int) -> int:
        """Play so many decisions and check each; returns how many promises were given up rightly."""
        num_lost = 0
        for _ in range(num_decisions):
            what = self._draws.random()
            if what < 0.45:
                self._submit()
            elif what < 0.65 and len(self._services) < 3:
                self._deploy()
            self._advance(self._draws.choice([1.0, 5.0, 20.0, 60.0, 200.0]))
            snapshot = self._snapshot(self._jobs, self._services, self._held)
            plan = self._policy.decide(snapshot)
            check_plan(snapshot, plan)
            for who in self._held.keys() & plan.allocations.keys() & self._jobs.keys():
                is_same = plan.allocations[who].num_devices == self._held[who].num_devices
                assert is_same or self._jobs[who].job.elastic, f"{who} cannot be resized"
            given_up = self._given_up(plan)
            # Some no number of devices would keep.
            lost = {who for who in given_up if not plan.claims[who].is_certain}
            if lost:
                alone = self._given_up(make_live_policy("springtide").decide(self._without_weaker()))
                vain = lost - alone if alone <= given_up else set()
                if vain:
                    # What was asked in vain a moment ago is not asked again yet (decision 74).
                    vain &= self._given_up(make_live_policy("springtide").decide(self._without_answer(snapshot)))
                where = f"DrawnWorld({self._seed}) at {self._now_s:g} s"
                assert not vain, f"{vain} in {where} beside {plan.allocations}"
                num_lost += len(lost)
            self._carry_out(plan)
        return num_lost

    def _given_up(self, plan: Plan) -> set[WorkloadId]:
        late = {who for who, claim in plan.claims.items() if claim.code == "given_up"}
        return {who for who in late if self._jobs[who].promise.admitted_at_s is not None}

    def _snapshot(self, jobs, services, held) -> Snapshot:
        return Snapshot(
            now_s=self._now_s,
            cluster=self._cluster,
            jobs=tuple(jobs.values()),
            services=tuple(services.values()),
            allocations=held,
            memory=self._memory,
        )

    def _without_answer(self, snapshot: Snapshot) -> Snapshot:
        memory = {key: value for key, value in (self._memory or {}).items() if key != "answer"}
        return replace(snapshot, memory=memory or None)

    def _without_weaker(self) -> Snapshot:
        """The same moment without best effort and without replicas beyond guaranteed minimums."""
        jobs = {who: view for who, view in self._jobs.items() if view.job.goal.is_hard}
        least = {who: view.min_replicas for who, view in self._services.items()}
        services = {
            who: replace(
                view,
                wanted_replicas=least[who],
                max_replicas=max(1, least[who]),
                num_ready=min(view.num_ready, least[who]),
            )
            for who, view in self._services.items()
        }
        held = {
            who: replace(given, device_ids=given.device_ids[: least.get(who, len(given.device_ids))])
            for who, given in self._held.items()
            if who in jobs or least.get(who)
        }
        return self._snapshot(jobs, services, held)

    def _submit(self) -> None:
        draw = self._draws
        name = f"j{len(self._speed)}"
        most = draw.choice([1, 2, 2, 4])
        rates = {count: 10.0 * count**0.9 for count in range(1, most + 1)}
        share = draw.choice([None, None, draw.choice(SHARES)])
        steps = draw.randint(1000, 20_000)
        alone_s = steps / rates[most] / (share.request if share else 1.0)
        is_hard = draw.random() < 0.67
        self._jobs[WorkloadId(name)] = job(
            name,
            share,
            workers=(draw.choice([1, 1, most]), most),
            submitted_at_s=self._now_s,
            goal=Goal(deadline_s=self._now_s + 10.0 + alone_s * draw.choice([1.1, 1.3, 2, 3])) if is_hard else Goal(),
            total_steps=steps,
            profile_steps_per_s=rates,
            num_virtual_shards=4,
            global_batch_size=BATCH,
            elastic=draw.random() < 0.85,
        )
        self._speed[WorkloadId(name)] = draw.choice([1.0, 1.0, 0.9, 0.7, 1.2])

    def _deploy(self) -> None:
        least = self._draws.choice([0, 0, 1])
        share = self._draws.choice([None, self._draws.choice(SHARES), self._draws.choice(SHARES)])
        wanted = max(least, self._draws.choice([0, 1, 1, 2]))
        name = f"s{len(self._services)}"
        self._services[WorkloadId(name)] = service(name, share, wanted=wanted, min_replicas=least)

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds
        for who, view in list(self._jobs.items()):
            given = self._held.get(who)
            if given is None or view.state is not JobState.RUNNING:
                continue
            count, part = given.num_devices, given.share.request if given.share else 1.0
            rate = 10.0 * count**0.9 * self._speed[who] * part
            done = view.equivalent_steps + rate * seconds
            if done >= view.total_steps:
                del self._jobs[who], self._held[who]
                continue
            speeds = {**view.learnt.throughput_samples_per_s, count: rate * BATCH}
            self._jobs[who] = with_fields(
                view, step=int(done), equivalent_steps=done, progress_at_s=self._now_s, throughput_samples_per_s=speeds
            )
        for who, served in self._services.items():
            if self._draws.random() < 0.4:
                wanted = max(served.min_replicas, self._draws.choice([0, 0, 1, 1, 2, 3]))
                self._services[who] = replace(served, wanted_replicas=wanted)

    def _carry_out(self, plan: Plan) -> None:
        for who in plan.rejected:
            self._jobs.pop(who, None)
        self._held, self._memory = dict(plan.allocations), plan.memory
        for who, view in self._jobs.items():
            given, fields = self._held.get(who), {}
            if who in plan.admitted and view.promise.admitted_at_s is None:
                fields["admitted_at_s"] = self._now_s
            if given is not None:
                fields["num_replicas"] = given.num_devices
                if view.state is not JobState.RUNNING:
                    started_at_s = view.started_at_s if view.started_at_s is not None else self._now_s
                    fields |= {"state": JobState.RUNNING, "started_at_s": started_at_s, "progress_at_s": self._now_s}
            elif view.state is JobState.RUNNING:
                fields |= {"state": JobState.PENDING, "num_replicas": 0}
            self._jobs[who] = with_fields(view, **fields)
        for who, served in self._services.items():
            given = self._held.get(who)
            self._services[who] = replace(served, num_ready=0 if given is None else given.num_devices)
