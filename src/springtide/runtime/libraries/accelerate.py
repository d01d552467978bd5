"""Programs with a loop of their own over what Accelerate has prepared: patched when its module is imported.

Tested with accelerate 1.15. Accelerate believes that it is the only process. A worker that joins runs the program from
its top: in epochs that are over each loader gives one batch, of which nothing is learned, printed or saved.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from springtide.runtime.libraries.epoch_range import num_rounds
from springtide.runtime.libraries.import_hook import around
from springtide.runtime.libraries.loop import Exchanged, LibraryLoop, LibraryState, NotDivisible
from springtide.runtime.libraries.loop_state import LoopState, schedulers_of
from springtide.runtime.libraries.loop_variables import LoopVariables, program_frames
from springtide.runtime.libraries.part_loader import PartLoader
from springtide.runtime.libraries.quiet import QuietOutput
from springtide.runtime.libraries.turns import OptimizerTurns
from springtide.runtime.script_reports import MAX_METRICS, MAX_NAME_CHARS

# Under which a prepared loader has the Accelerator that prepared it.
_OWNER = "_springtide_accelerator"


def patch_accelerator(module: Any, loop: LibraryLoop) -> None:
    """Have training loops over what the Accelerator of `accelerate.accelerator` prepares run by `loop`."""
    fit = AccelerateFit(loop)
    loaders = importlib.import_module("accelerate.data_loader")
    wrapped: list[tuple[type, str, Callable[..., Any]]] = [
        (module.Accelerator, "prepare_data_loader", fit.prepare_loader),
        (module.Accelerator, "backward", fit.backward),
        (module.Accelerator, "log", fit.log),
        (module.Accelerator, "init_trackers", fit.init_trackers),
        (module.Accelerator, "save_state", fit.save_state),
        (module.Accelerator, "save_model", fit.save_model),
        (module.Accelerator, "load_state", fit.load_state),
        (module.AcceleratedOptimizer, "step", fit.update),
        (loaders.DataLoaderShard, "__iter__", fit.iterate),
        (loaders.DataLoaderDispatcher, "__iter__", fit.iterate),
    ]
    for owner, name, method in wrapped:
        setattr(owner, name, around(getattr(owner, name), method))


class AccelerateFit:
    """The one training loop of a program that uses Accelerate, in an elastic job."""

    def __init__(self, loop: LibraryLoop) -> None:
        self._loop = loop
        self._accelerator: Any = None
        # The training loader: Accelerate's, and that which reads the parts of its batches.
        self._shard: Any = None
        self._loader: PartLoader | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        # With several optimizers: the turns that they take.
        self._turns: OptimizerTurns | None = None
        self._state: LoopState | None = None
        self._kept = LibraryState(loop, dict, lambda state: None)
        # The iterations over the training loader that began, and those that the program makes, if that is known.
        self._num_iterations = 0
        self._num_rounds: int | None = None
        # The place in its epoch of the batch that the program has, and whether it has one.
        self._position = 0
        self._is_in_pass = False
        # Of the present pass: whether its loss has gone backward. Of the step: whether the optimizer's step was called,
        # and whether the step is to be done again.
        self._is_backward = False
        self._is_updated = False
        self._is_again = False
        self._output = QuietOutput()

    @property
    def _is_void(self) -> bool:
        """Whether the program is where others are already, or were before a restart."""
        return self._state is not None and self._state.loaded is not None

    # --- before the first step --------------------------------------------------------------------------------------

    def prepare_loader(self, prepare: Callable[..., Any], accelerator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Prepare a loader, and note by which Accelerator."""
        loader = prepare(*arguments, **keywords)
        setattr(loader, _OWNER, accelerator)
        for frame in program_frames():
            # The program counts the batches of an epoch under way from where it goes on, not from 0.
            frame.f_globals.setdefault("enumerate", self._enumerate)
        return loader

    def _enumerate(self, iterable: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
        # A progress bar has what it goes through under this name.
        if self._trains_on(getattr(iterable, "iterable", iterable)):
            return ((start + self._position, batch) for batch in iterable)
        return enumerate(iterable, start)

    def _trains_on(self, loader: Any) -> bool:
        """Whether it is the loader to train on: the first prepared one that is read when the model is to be trained."""
        if self._shard is not None:
            return loader is self._shard
        accelerator = getattr(loader, _OWNER, None)
        if accelerator is None or not torch.is_grad_enabled():
            return False
        return any(model.training for model in accelerator._models)

    def _attach(self, shard: Any) -> None:
        accelerator = getattr(shard, _OWNER)
        model, optimizers = _checked(accelerator)
        if type(shard).__name__ != "DataLoaderShard":
            raise NotDivisible(
                "one process reads the training data for all (dispatch_batches=True, or an IterableDataset), and the "
                "platform divides the batches; give the DataLoader a dataset with __len__ and __getitem__"
            )
        self._accelerator, self._shard, self._optimizers = accelerator, shard, optimizers
        self._loader = PartLoader(shard.base_dataloader, self._loop, accelerator.device)
        self._num_rounds = num_rounds(program_frames())
        schedulers = [scheduler.scheduler for scheduler in accelerator._schedulers]
        schedulers = schedulers_of(schedulers, optimizers, accelerator._optimizers)
        prepared = [accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders]
        known = {id(thing) for things in [*prepared, accelerator._custom_objects] for thing in things}
        self._state = LoopState(optimizers, schedulers, LoopVariables(known), accelerator)
        self._kept = LibraryState(self._loop, self._state.read, self._state.take)
        self._loop.on_group = self._show_rank
        self._loop.ends_by_program = True
        if len(optimizers) > 1:
            self._turns = OptimizerTurns(self._loop, optimizers, "accelerator.backward(loss)")
            self._loop.before_clip = self._before_clip
        self._loop.attach(model, optimizers, self._kept, takes_turns=self._turns is not None)

    def _show_rank(self) -> None:
        """Have Accelerate's checks for the main process follow the group's leader. Where all is over, none is it."""
        is_void = self._is_void
        shared = importlib.import_module("accelerate.state").PartialState._shared_state
        shared["process_index"] = shared["local_process_index"] = max(self._loop.rank, int(is_void))
        self._output.set(is_void)

    # --- loaders ----------------------------------------------------------------------------------------------------

    def iterate(self, iterate: Callable[[], Iterator[Any]], shard: Any) -> Iterator[Any]:
        """Go through a prepared loader; of the one to train on, through this worker's parts of its batches."""
        if self._trains_on(shard):
            return self._train(iterate, shard)
        return self._first(iterate, shard) if self._is_void else iterate()

    def _first(self, iterate: Callable[[], Iterator[Any]], shard: Any) -> Iterator[Any]:
        yield from itertools.islice(iterate(), 1)
        shard.end()

    def _train(self, iterate: Callable[[], Iterator[Any]], shard: Any) -> Iterator[Any]:
        if self._loader is None:
            self._attach(shard)
        if shard is not self._shard:
            # Both were asked for, as by zip, before one was read.
            yield from iterate()
            return
        assert self._loader is not None
        assert self._state is not None
        epoch, position = self._num_iterations, 0
        self._num_iterations += 1
        shard.begin()
        shard.set_epoch(epoch)
        num_batches = self._loader.walk(epoch)
        loaded = self._state.loaded
        if loaded is not None:
            if epoch < loaded["epoch"] or loaded["position"] >= num_batches:
                yield from self._void_pass()
            position = loaded["position"] if epoch == loaded["epoch"] else num_batches
            if epoch == loaded["epoch"]:
                self._state.set_loaded()
                self._show_rank()
        while position < num_batches:
            self._begin(epoch, position, num_batches)
            num_passes = self._state.position - position
            while True:
                yield from self._passes(position, num_passes, num_batches)
                if not self._is_again:
                    break
                # What the program did with the batches that it gets again is taken back.
                self._state.set(self._kept.kept)
            position += num_passes
        shard.iteration = epoch + 1
        shard.end()

    def _void_pass(self) -> Iterator[Any]:
        assert self._loader is not None
        self._shard.end_of_dataloader = False
        self._position = 0
        yield from self._pass(self._loader.read_first())
        self._accelerator.gradient_state._set_sync_gradients(True)

    def _pass(self, batch: Any) -> Iterator[Any]:
        shard = self._shard
        if shard.device is not None:
            send = importlib.import_module("accelerate.utils").send_to_device
            batch = send(batch, shard.device, non_blocking=shard._non_blocking)
        self._is_in_pass, self._is_backward = True, False
        try:
            yield batch
        finally:
            self._is_in_pass = False

    # --- a step -----------------------------------------------------------------------------------------------------

    def _begin(self, epoch: int, position: int, num_batches: int) -> None:
        assert self._loader is not None
        assert self._state is not None
        accumulated, num_left = self._accelerator.gradient_accumulation_steps, None
        if self._num_rounds is not None:
            in_epoch = -(-num_batches // accumulated)
            done = epoch * in_epoch + position // accumulated
            num_left = max(1, _length(self._num_rounds, in_epoch, self._accelerator._schedulers) - done)
        self._state.epoch, self._state.position = epoch, position
        num_passes = self._loader.begin(position, accumulated, num_left)
        self._state.position = position + num_passes

    def _passes(self, position: int, num_passes: int, num_batches: int) -> Iterator[Any]:
        """The batches of the present step."""
        assert self._loader is not None
        accelerator = self._accelerator
        # Its windows of accumulation begin where a step does, also after batches that do not count.
        accelerator.step = position
        accelerator.gradient_state._set_sync_gradients(True)
        self._is_updated, self._is_again = False, False
        if self._turns is not None:
            self._turns.begin_step()
        for number in range(num_passes):
            self._loader.number, self._position = number, position + number
            self._shard.end_of_dataloader = self._position == num_batches - 1
            try:
                yield from self._pass(self._loader.read(number))
            except GeneratorExit:
                # The program leaves its loop without using this batch.
                if not number and not self._is_backward:
                    self._loop.drop()
                raise
            if not (self._is_backward or self._turns):
                raise NotDivisible(
                    "the program used a batch of its training loader without accelerator.backward(loss), as with "
                    "loss.backward() or `continue`, so that workers cannot add up their gradients; call it for every "
                    "batch"
                )
        if not (self._is_updated or self._is_again or self._turns):
            raise NotDivisible(
                "the optimizer's step() was not called after the last backward pass of its step; to add up gradients "
                "over several batches use Accelerator(gradient_accumulation_steps=N) and "
                "accelerator.accumulate(model)"
            )

    def backward(self, backward: Callable[..., Any], accelerator: Any, loss: torch.Tensor, **keywords: Any) -> None:
        """Run backward for this worker's part of a batch; in the last pass of a step, exchange."""
        sync = accelerator.gradient_state
        if not self._is_in_pass or accelerator is not self._accelerator:
            raise NotDivisible(
                "accelerator.backward() got a loss that is not of a batch of the training loader; pass the one "
                "DataLoader that the program trains on, its model and its optimizer through accelerator.prepare(), "
                "call model.train() before the loop"
            )
        if self._is_backward and self._turns is None:
            raise NotDivisible("the program has two backward passes for one batch; add up the losses")
        self._is_backward = True
        if self._is_void:
            sync._set_sync_gradients(False)
            return
        if self._is_again:
            # The step is given up already.
            return
        assert self._loader is not None
        number = self._loader.number
        if self._loop.is_last(number) != sync.sync_gradients:
            raise NotDivisible(
                "the program accumulates gradients in its own way; use `with accelerator.accumulate(model):` around "
                "each batch"
            )
        told = self._loop.part_of_step(number)
        if self._turns is not None:
            self._turns.before_backward(number, loss, told)
            backward(loss, **keywords)
            self._turns.after_backward()
            return
        self._loop.weigh(number, loss, told)
        backward(loss, **keywords)
        if self._loop.is_last(number):
            self._give_up_if(self._loop.exchange())

    def _give_up_if(self, outcome: Exchanged) -> None:
        if outcome is Exchanged.AGAIN:
            self._is_again = True
            self._kept.hold()
            # As in a pass before the last: optimizers' steps and schedulers' change nothing.
            self._accelerator.gradient_state._set_sync_gradients(False)

    def _before_clip(self, parameters: list[torch.Tensor]) -> None:
        if self._turns is not None and self._is_in_pass and self._accelerator.gradient_state.sync_gradients:
            self._give_up_if(self._turns.before_clip(parameters))

    def update(self, step: Callable[..., Any], optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        """The optimizer's step; where several take turns, after an exchange."""
        if optimizer.gradient_state.sync_gradients and any(optimizer.optimizer is one for one in self._optimizers):
            self._is_updated = True
            if self._turns is not None and self._is_in_pass:
                self._give_up_if(self._turns.before_update(optimizer))
        return step(*arguments, **keywords)

    # --- what only one process does ---------------------------------------------------------------------------------

    def log(
        self, log: Callable[..., Any], accelerator: Any, values: dict[str, Any], *more: Any, **keywords: Any
    ) -> Any:
        """Log values to the program's trackers, and as metrics of the job."""
        found = {}
        for name, value in values.items():
            is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if is_number and len(str(name)) <= MAX_NAME_CHARS:
                found[str(name)] = float(value)
        if not self._is_void:
            self._loop.metrics.update(dict(list(found.items())[:MAX_METRICS]))
        return log(values, *more, **keywords)

    def init_trackers(self, begin: Callable[..., Any], accelerator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Begin the trackers on every worker, because each may come to lead; only the leader logs."""
        shared = importlib.import_module("accelerate.state").PartialState._shared_state
        index, shared["process_index"] = shared["process_index"], 0
        try:
            return begin(*arguments, **keywords)
        finally:
            shared["process_index"] = index

    def save_state(
        self, save: Callable[..., Any], accelerator: Any, output_dir: Any = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Save on the leader; others count it."""
        if accelerator.is_main_process:
            return save(output_dir, *arguments, **keywords)
        accelerator.project_configuration.iteration += 1
        return output_dir

    def save_model(self, save: Callable[..., Any], accelerator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Save on the leader."""
        return save(*arguments, **keywords) if accelerator.is_main_process else None

    def load_state(self, load: Callable[..., Any], accelerator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Load a saved state, unless that is over already."""
        return None if self._is_void else load(*arguments, **keywords)


def _checked(accelerator: Any) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """The model and torch's optimizers that train it; several models as one.

    Raises InvalidRequest for what cannot move or be divided.
    """
    if accelerator.num_processes > 1 or accelerator.distributed_type.value != "NO":
        raise NotDivisible(
            "the Accelerator uses DeepSpeed, FSDP or several devices, and the platform divides the work itself; leave "
            "them out"
        )
    if accelerator.scaler is not None or accelerator.mixed_precision == "fp8":
        raise NotDivisible(f"mixed_precision={accelerator.mixed_precision!r} scales what cannot move; use 'bf16'")
    state = accelerator.gradient_state
    if accelerator.gradient_accumulation_steps > 1 and not state.sync_with_dataloader:
        raise NotDivisible("sync_with_dataloader=False has steps that go across the end of an epoch; leave it out")
    if not accelerator._optimizers:
        raise NotDivisible(
            "the program has prepared no optimizer, and a loop that is resized in place has one, passed through "
            "accelerator.prepare()"
        )
    optimizers = [wrapper.optimizer for wrapper in accelerator._optimizers]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for model in accelerator._models:
        if trained <= {id(parameter) for parameter in model.parameters()}:
            return model, optimizers
    models = torch.nn.ModuleList(accelerator._models)
    if len(optimizers) > 1 and trained <= {id(parameter) for parameter in models.parameters()}:
        return models, optimizers
    raise NotDivisible(
        "the parameters of the optimizer are not those of one model that was passed through accelerator.prepare() "
        "(of several optimizers, of several models); pass modules that have them all"
    )


def _length(num_rounds: int, in_epoch: int, schedulers: list[Any]) -> int:
    """The steps of a loop of so many epochs. It may end within the last one, which schedules of transformers know."""
    length = num_rounds * in_epoch
    for one in schedulers:
        for rule in getattr(one.scheduler, "lr_lambdas", ()):
            told = getattr(rule, "keywords", {}).get("num_training_steps")
            if isinstance(told, int) and length - in_epoch < told < length:
                length = told
    return length
