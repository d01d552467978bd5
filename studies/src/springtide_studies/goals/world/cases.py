"""The jobs whose goals are looked for: what a profile on one core would say of them, their length, and their goals.

All figures were chosen before any search was played: lengths and budgets so that in each of 30 other worlds (seeds 200
to 229) some configuration meets either goal with a fifth to spare.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import FunctionMeasurement, FunctionSearch, WorkerModel
from springtide.core.functions import MIB, FunctionMenu, FunctionOption, FunctionPlan, FunctionService
from springtide.core.resources import Device, DeviceId, Node, NodeId
from springtide.core.workload import Entrypoint, Goal, TrainingJob, WorkloadId
from springtide.perf.functions.services import aws_lambda
from springtide.perf.functions.workers.model import space_of
from springtide.perf.functions.workers.surface import Surface, WorkSettings

Scenario = Literal["cheapest", "fastest"]
SCENARIOS: tuple[Scenario, ...] = ("cheapest", "fastest")
MAX_WORKERS = 128
NUM_LAYERS = 8
_ENTRYPOINT = Entrypoint(source_path="model.py")


class GoalCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be trained for `num_epochs` over `num_samples`, with a deadline for the one scenario and a budget for
    the other.
    """

    name: str
    model: WorkerModel
    global_batch_size: int
    num_samples: int
    num_epochs: int
    deadline_s: float
    budget_usd: float
    max_workers: int = MAX_WORKERS

    @property
    def num_steps(self) -> int:
        """How many steps that is."""
        return self.num_epochs * -(-self.num_samples // self.global_batch_size)

    def goal(self, scenario: Scenario, *, now_s: float = 0.0) -> Goal:
        """Cheapest within the deadline, or fastest within the budget."""
        if scenario == "cheapest":
            return Goal(deadline_s=now_s + self.deadline_s)
        return Goal(budget_usd=self.budget_usd, is_fastest=True)


# BERT-Medium (41.4 M parameters, 8 layers of 512, 128 tokens): time and activations of a sample are those measured of
# BERT-Large on one core, by parameters and tokens. Its hour and its 50 dollars are those of SMLT's figures 10 and 11.
# ResNet50 on images of 32 x 32 (SMLT, section 5.5) likewise from ResNet101; the small one is a network for tables.
CASES: Mapping[str, GoalCase] = MappingProxyType(
    {
        "bert-medium": GoalCase(
            name="bert-medium",
            model=WorkerModel(
                parameter_bytes=165_600_000,
                sample_s=0.25,
                fixed_s=0.02,
                sample_bytes=42 * MIB,
                micro_batch_size=4,
                base_bytes=395 * MIB,
                source="BERT-Large on one core, scaled",
            ),
            global_batch_size=512,
            num_samples=2048,
            num_epochs=50,
            deadline_s=3600.0,
            budget_usd=50.0,
        ),
        "resnet50": GoalCase(
            name="resnet50",
            model=WorkerModel(
                parameter_bytes=102_400_000,
                sample_s=0.10,
                fixed_s=0.02,
                sample_bytes=25 * MIB,
                micro_batch_size=8,
                base_bytes=455 * MIB,
                source="ResNet101 on one core, scaled",
            ),
            global_batch_size=512,
            num_samples=4096,
            num_epochs=50,
            deadline_s=3600.0,
            budget_usd=6.0,
        ),
        "small": GoalCase(
            name="small",
            model=WorkerModel(
                parameter_bytes=4_000_000,
                sample_s=0.004,
                fixed_s=0.01,
                sample_bytes=MIB // 4,
                micro_batch_size=64,
                base_bytes=300 * MIB,
                source="chosen",
            ),
            global_batch_size=256,
            num_samples=10_240,
            num_epochs=50,
            deadline_s=1500.0,
            budget_usd=0.15,
        ),
    }
)


def case_of(name: str) -> GoalCase:
    """The case of that name. Raises InvalidRequest."""
    if name not in CASES:
        raise InvalidRequest(f"there is no case {name!r}; choose of {', '.join(CASES)}")
    return CASES[name]


def lambda_of_all_sizes(*, concurrency: int = 1000) -> FunctionService:
    """AWS Lambda with every memory size in steps of 128 MB."""
    return aws_lambda(range(128, 10_241, 128), concurrency=concurrency)


def node_of(service: FunctionService, num_places: int = 4) -> Node:
    """The service as it stands in a cluster."""
    devices = tuple(
        Device(device_id=DeviceId(f"functions/{n}"), node_id=NodeId("functions"), index=n, kind="function")
        for n in range(num_places)
    )
    return Node(node_id=NodeId("functions"), devices=devices, functions=service)


def surface_of(case: GoalCase, service: FunctionService, batch: int | None = None) -> Surface:
    """The model's answers over the whole space of a case."""
    space = space_of(service, case.model, case.max_workers)
    return Surface(
        service,
        space,
        case.model,
        WorkSettings(global_batch_size=batch or case.global_batch_size, num_layers=NUM_LAYERS),
    )


def search_of(case: GoalCase, service: FunctionService, **known: object) -> FunctionSearch:
    """What a job of the case is searched with; `known` replaces fields."""
    space = space_of(service, case.model, case.max_workers)
    return msgspec.structs.replace(FunctionSearch(model=case.model, space=space), **known)


def search_job(
    case: GoalCase,
    service: FunctionService,
    goal: Goal,
    *,
    earlier: tuple[FunctionMeasurement, ...] = (),
    **fields: object,
) -> TrainingJob:
    """The case as a job whose functions are searched for, knowing `earlier` runs; `fields` replace others."""
    from springtide.scheduling.functions.goal_search import search_menu

    search = search_of(case, service, earlier=earlier)
    menu = search_menu(search, service, case.global_batch_size, NUM_LAYERS, case.num_steps)
    job = TrainingJob(
        job_id=WorkloadId("job"),
        name=case.name,
        entrypoint=_ENTRYPOINT,
        global_batch_size=case.global_batch_size,
        num_epochs=case.num_epochs,
        num_samples=case.num_samples,
        total_steps=case.num_steps,
        goal=goal,
        menu=menu,
        search=search,
    )
    return msgspec.structs.replace(job, **fields)


def fixed_job(
    case: GoalCase, service: FunctionService, plan: FunctionPlan, goal: Goal | None = None, *, job_id: str = "job"
) -> TrainingJob:
    """The case as a job with one way to run."""
    option = FunctionOption(plan=plan, step_s=1.0, step_usd=1e-9, start_s=service.cold_start_s)
    return TrainingJob(
        job_id=WorkloadId(job_id),
        name=case.name,
        entrypoint=_ENTRYPOINT,
        global_batch_size=case.global_batch_size,
        num_epochs=case.num_epochs,
        num_samples=case.num_samples,
        total_steps=case.num_steps,
        goal=goal or Goal(),
        menu=FunctionMenu(service=service.name, options=(option,), num_layers=NUM_LAYERS),
    )
