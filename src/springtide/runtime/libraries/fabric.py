"""Programs with a loop of their own over what Lightning Fabric has set up: patched when its module is imported.

Tested with Lightning 2.6. As with Accelerate, Fabric believes that it is the only process, and a worker that joins runs
the program from its top, with one batch of each loader in epochs that are over. What is a step is the program's: the
batches up to the update of an optimizer.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from springtide.runtime.libraries.epoch_range import num_rounds
from springtide.runtime.libraries.import_hook import around
from springtide.runtime.libraries.loop import Exchanged, LibraryLoop, LibraryState, NotDivisible
from springtide.runtime.libraries.loop_state import LoopState, schedulers_of
from springtide.runtime.libraries.loop_variables import LoopVariables, program_frames
from springtide.runtime.libraries.part_loader import PartLoader
from springtide.runtime.libraries.quiet import QuietOutput
from springtide.runtime.libraries.turns import OptimizerTurns, StepAgain
from springtide.runtime.script_reports import MAX_METRICS, MAX_NAME_CHARS


def patch_fabric(module: Any, loop: LibraryLoop) -> None:
    """Have training loops over what the Fabric of this module (`lightning.fabric.fabric`) sets up run by `loop`."""
    package = module.__name__.rpartition(".")[0]
    fit = FabricFit(loop, package)
    wrappers = importlib.import_module(f"{package}.wrappers")
    wrapped: list[tuple[type, str, Callable[..., Any]]] = [
        (module.Fabric, "launch", fit.launch),
        (module.Fabric, "setup", fit.set_up),
        (module.Fabric, "setup_module", fit.set_up),
        (module.Fabric, "setup_optimizers", fit.set_up),
        (module.Fabric, "_setup_dataloader", fit.set_up),
        (module.Fabric, "backward", fit.backward),
        (module.Fabric, "log_dict", fit.log),
        (wrappers._FabricOptimizer, "step", fit.update),
        (wrappers._FabricDataLoader, "__iter__", fit.iterate),
    ]
    for owner, name, method in wrapped:
        setattr(owner, name, around(getattr(owner, name), method))


class FabricFit:
    """The one training loop of a program that uses Fabric, in an elastic job."""

    def __init__(self, loop: LibraryLoop, package: str) -> None:
        """`package` is `lightning.fabric` or `lightning_fabric`."""
        self._loop = loop
        self._package = package
        self._fabric: Any = None
        # What was set up, in its order: modules, optimizers, loaders.
        self._made: list[Any] = []
        # The training loader: Fabric's, and that which reads the parts of its batches.
        self._trained: Any = None
        self._loader: PartLoader | None = None
        self._turns: OptimizerTurns | None = None
        self._state: LoopState | None = None
        self._kept = LibraryState(loop, dict, lambda state: None)
        # The iterations over the training loader that began, and those that the program makes, if that is known.
        self._num_iterations = 0
        self._num_rounds: int | None = None
        # The place in its epoch of the batch that the program has, and whether it has one.
        self._position = 0
        self._is_in_pass = False
        # Of the present pass: whether a loss has gone backward. Of the step: whether it is to be done again.
        self._is_backward = False
        self._is_again = False
        self._output = QuietOutput()

    @property
    def _is_void(self) -> bool:
        """Whether the program is where others are already, or were before a restart."""
        return self._state is not None and self._state.loaded is not None

    # --- before the first step --------------------------------------------------------------------------------------

    def launch(self, launch: Callable[..., Any], fabric: Any, *arguments: Any, **keywords: Any) -> Any:
        """Begin, unless Fabric would start processes of its own."""
        self._check(fabric)
        return launch(*arguments, **keywords)

    def _check(self, fabric: Any) -> None:
        strategy = type(fabric.strategy).__name__
        if strategy not in ("SingleDeviceStrategy", "SpringtideStrategy"):
            raise NotDivisible(
                f"Fabric uses {strategy}, and the platform divides the work itself; leave out strategy and devices"
            )
        if getattr(fabric._precision, "scaler", None) is not None:
            raise NotDivisible('precision="16-mixed" scales its loss, which cannot move; use "bf16-mixed"')

    def set_up(self, set_up: Callable[..., Any], fabric: Any, *arguments: Any, **keywords: Any) -> Any:
        """Set something up, and note what that has made."""
        made = set_up(*arguments, **keywords)
        self._fabric = fabric
        self._made += made if isinstance(made, tuple | list) else [made]
        for frame in program_frames():
            # The program counts the batches of an epoch under way from where it goes on, not from 0.
            frame.f_globals.setdefault("enumerate", self._enumerate)
        return made

    def _made_as(self, name: str) -> list[Any]:
        wanted = getattr(importlib.import_module(f"{self._package}.wrappers"), name)
        return [one for one in self._made if issubclass(type(one), wanted)]

    def _enumerate(self, iterable: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
        # A progress bar has what it goes through under this name.
        if self._trains_on(getattr(iterable, "iterable", iterable)):
            return ((start + self._position, batch) for batch in iterable)
        return enumerate(iterable, start)

    def _trains_on(self, loader: Any) -> bool:
        """Whether it is the loader to train on: the first one set up that is read when a model is to be trained."""
        if self._trained is not None:
            return loader is self._trained
        if not torch.is_grad_enabled() or not any(loader is one for one in self._made):
            return False
        return any(model.training for model in self._made_as("_FabricModule"))

    def _attach(self, trained: Any) -> None:
        self._check(self._fabric)
        models = [module.module for module in self._made_as("_FabricModule")]
        wrappers = self._made_as("_FabricOptimizer")
        optimizers = [wrapper.optimizer for wrapper in wrappers]
        if not optimizers:
            raise NotDivisible("the program has set up no optimizer by fabric.setup()")
        self._trained = trained
        self._loader = PartLoader(trained._dataloader, self._loop, self._fabric.device)
        self._num_rounds = num_rounds(program_frames())
        known = {id(thing) for thing in [*self._made, *models]}
        self._state = LoopState(optimizers, schedulers_of([], optimizers, wrappers), LoopVariables(known))
        self._kept = LibraryState(self._loop, self._state.read, self._state.take)
        self._turns = OptimizerTurns(self._loop, optimizers, "fabric.backward(loss)")
        self._loop.on_group, self._loop.before_clip = self._show_rank, self._before_clip
        self._loop.ends_by_program = True
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        self._loop.attach(model, optimizers, self._kept, takes_turns=True)

    def _show_rank(self) -> None:
        """Have Fabric's checks for the rank follow the group's leader. Where all is over, none is it."""
        strategy, rank = self._fabric.strategy, max(self._loop.rank, int(self._is_void))
        if type(strategy).__name__ != "SpringtideStrategy":
            is_first = property(lambda strategy: strategy.global_rank == 0)
            strategy.__class__ = type("SpringtideStrategy", (type(strategy),), {"is_global_zero": is_first})
        strategy.global_rank = strategy.local_rank = rank
        importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = rank
        self._output.set(self._is_void)

    # --- loaders ----------------------------------------------------------------------------------------------------

    def iterate(self, iterate: Callable[[], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Go through a loader; of the one to train on, through this worker's parts of its batches."""
        if self._trains_on(loader):
            return self._train(iterate, loader)
        return itertools.islice(iterate(), 1) if self._is_void else iterate()

    def _train(self, iterate: Callable[[], Iterator[Any]], trained: Any) -> Iterator[Any]:
        if self._loader is None:
            self._attach(trained)
        if trained is not self._trained:
            # Both were asked for, as by zip, before one was read.
            yield from iterate()
            return
        assert self._loader is not None
        assert self._state is not None
        epoch, position = self._num_iterations, 0
        self._num_iterations += 1
        data = importlib.import_module(f"{self._package}.utilities.data")
        data._set_sampler_epoch(trained._dataloader, epoch)
        num_batches = self._loader.walk(epoch)
        loaded = self._state.loaded
        if loaded is not None:
            if epoch < loaded["epoch"] or loaded["position"] >= num_batches:
                self._position = 0
                yield from self._pass(self._loader.read_first())
            position = loaded["position"] if epoch == loaded["epoch"] else num_batches
            if epoch == loaded["epoch"]:
                self._state.set_loaded()
                self._show_rank()
        while position < num_batches:
            self._state.epoch, self._state.position = epoch, position
            self._loader.begin(position, 1, self._num_left(epoch * num_batches + position, num_batches))
            position = yield from self._step(position, num_batches)

    def _num_left(self, num_done: int, num_batches: int) -> int | None:
        """After so many batches, the steps to the end, as those before were."""
        if self._num_rounds is None:
            return None
        return self._loop.steps_of(self._num_rounds * num_batches - num_done, num_done)

    def _step(self, position: int, num_batches: int) -> Generator[Any, None, int]:
        """The batches of a step, again as often as the group breaks; returns the place of the one that follows."""
        assert self._loader is not None
        assert self._state is not None
        assert self._turns is not None
        num_passes, number, self._is_again = 1, 0, False
        self._state.position = position + 1
        self._turns.begin_step()
        while True:
            self._loader.number, self._position = number, position + number
            try:
                yield from self._pass(self._loader.read(number))
            except GeneratorExit:
                # The program leaves its loop without using this batch.
                if not number and not self._is_backward:
                    self._loop.drop()
                raise
            number += 1
            if self._is_again:
                # What the program did with the batches that it gets again is taken back.
                self._state.set(self._kept.kept)
                self._turns.begin_step()
                number, self._is_again = 0, False
            elif number == num_passes:
                if not self._loop.is_under_way or position + number == num_batches:
                    return position + number
                self._loader.extend(position + number)
                num_passes += 1
                self._state.position = position + num_passes

    def _pass(self, batch: Any) -> Iterator[Any]:
        if self._trained.device is not None:
            move = importlib.import_module(f"{self._package}.utilities").move_data_to_device
            batch = move(batch, self._trained.device)
        self._is_in_pass, self._is_backward = True, False
        try:
            yield batch
        finally:
            self._is_in_pass = False

    # --- a step -----------------------------------------------------------------------------------------------------

    def backward(
        self, backward: Callable[..., Any], fabric: Any, loss: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> None:
        """Run backward for this worker's part of a batch."""
        if not self._is_in_pass:
            raise NotDivisible(
                "fabric.backward() got a loss that is not of a batch of the training loader; pass the one DataLoader "
                "that the program trains on through fabric.setup_dataloaders(), its model and optimizer through "
                "fabric.setup(), call model.train() before the loop"
            )
        self._is_backward = True
        if self._is_void or self._is_again:
            return
        assert self._loader is not None
        assert self._turns is not None
        self._turns.before_backward(self._loader.number, loss, 1.0)
        backward(loss, *arguments, **keywords)
        self._turns.after_backward()

    def update(self, step: Callable[..., Any], optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        """An optimizer's step, after an exchange; none where the program is void, or the step is given up."""
        if self._turns is None:
            return step(closure)
        if self._is_void or self._is_again:
            return None
        if not self._is_in_pass:
            raise NotDivisible(
                "an optimizer's step() was called outside of the loop over the training loader, where it cannot be "
                "done again if a worker is lost; call it within the loop"
            )

        def exchanged() -> Any:
            result = None if closure is None else closure()
            assert self._turns is not None
            if not self._is_again:
                self._give_up_if(self._turns.before_update(optimizer))
            if self._is_again:
                raise StepAgain
            return result

        try:
            if closure is not None:
                return step(exchanged)
            exchanged()
            return step()
        except StepAgain:
            return None

    def _before_clip(self, parameters: list[torch.Tensor]) -> None:
        if self._turns is not None and self._is_in_pass and not (self._is_void or self._is_again):
            self._give_up_if(self._turns.before_clip(parameters))

    def _give_up_if(self, outcome: Exchanged) -> None:
        if outcome is Exchanged.AGAIN and not self._is_again:
            self._is_again = True
            self._kept.hold()

    def log(self, log: Callable[..., Any], fabric: Any, metrics: Any, *arguments: Any, **keywords: Any) -> Any:
        """Log values to the program's loggers, and as metrics of the job."""
        found = {}
        for name, value in metrics.items():
            is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if is_number and len(str(name)) <= MAX_NAME_CHARS:
                found[str(name)] = float(value)
        if self._is_void:
            return None
        self._loop.metrics.update(dict(list(found.items())[:MAX_METRICS]))
        return log(metrics, *arguments, **keywords)
