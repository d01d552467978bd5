"""Models of users in plain NumPy for tests, and replicas of one at work as threads over one store."""

import threading
import time

import numpy as np

from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.collectives.communicator import Communicator
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import Keys, Place
from springtide.runtime.data.samples import array_samples
from springtide.runtime.functions.data_parallel.worker import ReplicaWorker
from springtide.storage.stores.open import memory_store

KEYS = Keys("job")
NUM_SAMPLES = 44


class Softmax:
    """Softmax regression with momentum."""

    def __init__(self, num_features=6, num_classes=3, dtype=np.float32, rate=0.3):
        draws = np.random.default_rng(5)
        self.weights = draws.normal(size=(num_features, num_classes)).astype(dtype) * 0.1
        self.biases = np.zeros(num_classes, dtype)
        self.velocity = np.zeros_like(self.weights)
        self.rate = rate

    def gradients(self, x, y):
        scores = x @ self.weights + self.biases
        scores = scores - scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(y)), y]).mean()
        chances[np.arange(len(y)), y] -= 1
        return loss, {"weights": x.T @ chances / len(y), "biases": chances.mean(axis=0)}

    def apply(self, gradients):
        self.velocity = 0.9 * self.velocity + gradients["weights"]
        self.weights = self.weights - self.rate * self.velocity
        self.biases = self.biases - self.rate * gradients["biases"]

    def state(self):
        return {"weights": self.weights, "biases": self.biases, "optimizer/velocity": self.velocity}

    def load(self, state):
        self.weights, self.biases = state["weights"], state["biases"]
        self.velocity = state["optimizer/velocity"]


class Growing(Softmax):
    """Takes one more feature into account with each epoch."""

    def __init__(self):
        super().__init__(num_features=2)
        self.epochs = []

    def begin_epoch(self, epoch):
        self.epochs.append(epoch)
        if epoch:
            new = np.random.default_rng(epoch).normal(size=(1, 3)).astype(np.float32) * 0.1
            self.weights = np.concatenate([self.weights, new])
            self.velocity = np.concatenate([self.velocity, np.zeros_like(new)])

    def gradients(self, x, y):
        return super().gradients(x[:, : len(self.weights)], y)


def points(dtype=np.float32, num_samples=NUM_SAMPLES):
    """Points in three heaps, and their heaps."""
    draws = np.random.default_rng(11)
    y = draws.integers(0, 3, num_samples)
    x = draws.normal(size=(num_samples, 6)) + np.eye(3, 6)[y]
    return x.astype(dtype), y


def whole_plan(num_replicas, *, micro_batch_size=2, **fields):
    return FunctionPlan(
        stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=512),),
        num_replicas=num_replicas,
        micro_batch_size=micro_batch_size,
        **fields,
    )


class Replicas:
    """All replicas of a plan as threads over one store; the plan may change between two runs."""

    def __init__(self, make_model, num_replicas, *, job=None, samples=None, **fields):
        self.store = memory_store()
        self.job = job or job_of()
        self.make_model = make_model
        self.samples = samples or (lambda: array_samples(points()))
        self.error = None
        self.attempt = 0
        self.workers = []
        self.outcomes = []
        self.change(num_replicas, **fields)

    def check(self):
        if self.error is not None:
            raise RuntimeError("another replica failed") from self.error

    def change(self, num_replicas, *, step=None, **fields):
        """Go on as so many: whoever stays keeps its model, whoever joins loads what is saved."""
        plan = whole_plan(num_replicas, **fields)
        self.attempt += 1
        stayers, leavers = tuple(self.workers[:num_replicas]), self.workers[num_replicas:]
        for worker in leavers:
            worker.close()
        if stayers:
            stayers[0].save_state(self.store, KEYS)
        self.workers = list(stayers)
        for worker in stayers:
            worker.set_plan(plan)
        for replica in range(len(stayers), num_replicas):
            worker = self.build(plan, replica)
            if stayers:
                worker.load_state(self.store, KEYS, stayers[0].position.step)
            self.workers.append(worker)
        for worker in self.workers:
            worker.exchange = self.communicator(plan, worker.place.replica)

    def build(self, plan, replica):
        return ReplicaWorker(
            make_model=self.make_model,
            samples=self.samples(),
            job=self.job,
            plan=plan,
            place=Place(0, replica),
            check=self.check,
        )

    def communicator(self, plan, replica):
        if plan.num_replicas == 1:
            return None
        return Communicator(
            self.store, replica, plan.num_replicas, now_s=time.monotonic, collective=plan.collective, check_s=0.05
        )

    def run(self, num_steps, *, ends_at=None):
        """So many more steps; returns the mean loss of each over the whole batch."""
        found = [[] for _ in self.workers]

        def work(worker, outcomes):
            try:
                for _ in range(num_steps):
                    step = worker.position.step
                    prefix = KEYS.wire(1, self.attempt, step)
                    outcomes.append(
                        worker.run_step(prefix, ends_here=ends_at == step + 1 and worker.place.replica == 0)
                    )
                    if outcomes[-1].is_last:
                        return
            except BaseException as error:
                self.error = self.error or error

        threads = [threading.Thread(target=work, args=item) for item in zip(self.workers, found, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.outcomes += found[0]
        return [
            sum(each.loss * each.num_samples for each in step if each.num_samples)
            / sum(each.num_samples for each in step)
            for step in zip(*found, strict=True)
        ]
