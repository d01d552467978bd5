"""Lightning programs: a callback that Lightning itself asks for, by the entry points of its factories of callbacks.

Tested with Lightning 2.6. Outside of a worker that runs an elastic Lightning program the factories return nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from springtide.runtime.libraries.loop import LOOP, Exchanged, LibraryLoop, LibraryState, NotDivisible
from springtide.runtime.libraries.part_loader import PartLoader
from springtide.runtime.libraries.plain_values import ChangedValues
from springtide.runtime.libraries.turns import OptimizerTurns, StepAgain
from springtide.runtime.script_reports import MAX_METRICS, MAX_NAME_CHARS

_METRICS_INTERVAL_S = 0.25
# The name under which a program's loggers get the number of workers: TensorBoard's, MLflow's and W&B's alike.
WORKERS_METRIC = "springtide_workers"


def lightning_callbacks() -> list[Any]:
    """The callbacks for `lightning.pytorch`, where this process runs an elastic Lightning program; else none."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """The same for the package `pytorch_lightning`."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    return [] if LOOP.loop is None else [_callback(package, LightningFit(package, LOOP.loop))]


def _callback(package: str, fit: LightningFit) -> Any:
    class SpringtideCallback(importlib.import_module(package).Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                fit.prepare(trainer)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            fit.before_backward(loss)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
            fit.before_update(optimizer)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            fit.after_backward()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            fit.after_batch()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            fit.end()

    return SpringtideCallback()


class LightningFit:
    """One call of `Trainer.fit` in an elastic job. Lightning believes that it is alone, on one device."""

    def __init__(self, package: str, loop: LibraryLoop) -> None:
        self._package = package
        self._loop = loop
        self._trainer: Any = None
        self._loader: PartLoader | None = None
        # Where the program updates by itself (manual optimization): its turns, and what takes a step of them back.
        self._turns: OptimizerTurns | None = None
        self._take_back: Callable[[], None] = lambda: None
        self._sigterm: Any = None
        self._is_leader = False
        self._is_repeating = False
        # What is to be set again once the loop has taken up a loaded state.
        self._loaded: dict[str, Any] | None = None
        # The program's own module, callbacks and data, and what has changed in their plain attributes.
        self._own: dict[str, Any] = {}
        self._changed = ChangedValues({})
        self._num_steps: int | None = None
        self._metrics_at_s = -math.inf
        self._told_workers = 0

    # --- before the first step --------------------------------------------------------------------------------------

    def prepare(self, trainer: Any) -> None:
        """Before Lightning sets the model up: check what it was told, and be asked for the data and for the rank."""
        self._trainer = trainer
        self._loop.check_first()
        _check(trainer)
        self._sigterm = signal.getsignal(signal.SIGTERM)
        # Which member leads is not known yet: until then none writes or prints what only one of them should.
        self._show_rank()
        strategy, fit = trainer.strategy, self

        class Alone(type(strategy)):  # type: ignore[misc]
            @property
            def is_global_zero(self) -> bool:
                return fit._is_leader

            def process_dataloader(self, dataloader: Any) -> Any:
                return fit._divided(super().process_dataloader(dataloader))

        Alone.__name__ = type(strategy).__name__
        strategy.__class__ = Alone
        fit_loop = trainer.fit_loop
        set_up = fit_loop.setup_data

        def setup_data() -> None:
            set_up()
            # It is called once before the optimizers exist where these ask for the number of steps.
            if trainer.optimizers and not self._loop.is_attached:
                self._attach()

        fit_loop.setup_data = setup_data

    def _divided(self, dataloader: Any) -> Any:
        """The loader of which this worker reads its parts, if it is the one to train on."""
        trainer = self._trainer
        if not trainer.training:
            return dataloader
        loader = PartLoader(dataloader, self._loop, trainer.strategy.root_device)
        loader.where = self._where
        loader.plan = self._plan
        self._loader = loader
        return loader

    def _attach(self) -> None:
        trainer = self._trainer
        # Lightning's own stands for none.
        if all(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers):
            raise NotDivisible("configure_optimizers() has returned no optimizer")
        if type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            raise NotDivisible("training_step takes a dataloader_iter, which cannot be divided")
        if len(trainer.fit_loop._combined_loader.flattened) != 1:
            raise NotDivisible("the program trains on several DataLoaders at once")
        # Lightning's own handler ends the program: the platform's lets the step end and saves.
        signal.signal(signal.SIGTERM, self._sigterm)
        num_steps = _estimated_steps(trainer)
        self._num_steps = int(num_steps) if 0 < num_steps < math.inf else None
        self._loop.on_group = self._show_rank
        callbacks = {f"callback {index}": callback for index, callback in enumerate(trainer.callbacks)}
        self._own = {"module": trainer.lightning_module, "data": trainer.datamodule, **callbacks}
        self._changed = ChangedValues(self._own, [id(thing) for thing in self._own.values()])
        state = LibraryState(self._loop, self._state, self._load)
        takes_turns = not trainer.lightning_module.automatic_optimization
        self._loop.attach(trainer.lightning_module, trainer.optimizers, state, takes_turns=takes_turns)
        if takes_turns:
            self._take_turns()
        if self._is_leader and not self._loop.step:
            # What Lightning does before it knows the rank.
            trainer_module = importlib.import_module(f"{self._package}.trainer.trainer")
            if trainer.enable_autolog_hparams:
                trainer_module._log_hyperparams(trainer)
            for callback in trainer.callbacks:
                if isinstance(callback, importlib.import_module(f"{self._package}.callbacks").ModelSummary):
                    callback.on_fit_start(trainer, trainer.lightning_module)

    def _take_turns(self) -> None:
        assert self._loader is not None
        self._loader.is_open = True
        self._turns = turns = OptimizerTurns(self._loop, self._trainer.optimizers, "self.manual_backward(loss)")
        self._loop.before_clip = lambda parameters: _leave_if_again(turns.before_clip(parameters))
        manual = self._trainer.fit_loop.epoch_loop.manual_optimization
        manual.run = functools.partial(self._run_manual, manual.run)

    def _show_rank(self) -> None:
        """Have Lightning's own checks for the rank follow the group's leader."""
        was_leader, self._is_leader = self._is_leader, self._loop.is_attached and self._loop.rank == 0
        rank_zero_only = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
        rank_zero_only.rank = 0 if self._is_leader else 1
        if self._is_leader and not was_leader:
            self._save_missed()

    def _save_missed(self) -> None:
        """Save what the leader before this one was lost in saving, if nothing was trained since."""
        for callback in self._trainer.checkpoint_callbacks:
            path = getattr(callback, "_last_checkpoint_saved", "")
            is_now = path and callback._last_global_step_saved == self._trainer.global_step
            if is_now and not callback._fs.exists(path):
                self._trainer.save_checkpoint(path, callback.save_weights_only)

    # --- where the loop is ------------------------------------------------------------------------------------------

    def _where(self) -> tuple[int, int]:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._begin_epoch()
            # A checkpoint of a release before this one lacks them.
            if "own" in loaded:
                self._changed.write(self._own, loaded["own"])
            # Lightning's way of taking a loop up in the midst of an epoch counts a batch too many after a validation.
            epoch_loop._batches_that_stepped = loaded["batches_that_stepped"]
            for config, state in zip(self._trainer.lr_scheduler_configs, loaded["lr_schedulers"], strict=True):
                config.scheduler.load_state_dict(state)
        return self._trainer.current_epoch, epoch_loop.batch_progress.current.ready

    def _begin_epoch(self) -> None:
        """Do what the program does at the beginning of an epoch, which others have begun; rates stay as they are."""
        trainer = self._trainer
        if not trainer.fit_loop.restarted_mid_epoch:
            return
        kept = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        call = importlib.import_module(f"{self._package}.trainer.call")
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        for group, values in kept:
            group.update(values)

    def _plan(self) -> tuple[int, int | None]:
        trainer = self._trainer
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._turns is not None:
            return 1, self._num_left(trainer.current_epoch * trainer.num_training_batches + ready)
        num_passes = min(trainer.accumulate_grad_batches, trainer.num_training_batches - ready)
        num_left = None if self._num_steps is None else max(1, self._num_steps - trainer.global_step)
        return int(num_passes), num_left

    def _num_left(self, num_batches: int) -> int | None:
        """Of a program that updates by itself, after so many batches: the steps to the end as those before were."""
        trainer, num_left = self._trainer, math.inf
        if trainer.max_epochs not in (None, -1):
            num_left = trainer.max_epochs * trainer.num_training_batches - num_batches
        if trainer.max_steps != -1 and trainer.global_step:
            # Of which each update counts.
            num_left = min(num_left, (trainer.max_steps - trainer.global_step) * num_batches / trainer.global_step)
        if not math.isfinite(num_left):
            return None
        return self._loop.steps_of(num_left, num_batches)

    # --- a step -----------------------------------------------------------------------------------------------------

    def before_backward(self, loss: torch.Tensor) -> None:
        """Weight the gradients by this worker's part of the batch."""
        assert self._loader is not None
        number = self._loader.number
        if self._turns is not None:
            self._turns.before_backward(number, loss, 1.0)
            return
        # Lightning divides by the number of passes of a full step.
        told = self._trainer.accumulate_grad_batches * self._loop.part_of_step(number)
        self._loop.weigh(number, loss, told)

    def after_backward(self) -> None:
        """In the last backward pass of a step, exchange; do the step's passes again as often as the group breaks."""
        assert self._loader is not None
        if self._turns is not None:
            self._turns.after_backward()
            return
        last = self._loader.number
        if self._is_repeating or not self._loop.is_last(last):
            return
        while self._loop.exchange() is Exchanged.AGAIN:
            self._is_repeating = True
            # What training_step has counted counts once.
            counted = self._changed.read(self._own)
            try:
                for number in range(last + 1):
                    self._loader.number = number
                    self._repeat(number, number - last)
            finally:
                self._is_repeating = False
                self._changed.write(self._own, counted)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Of a program that updates by itself: exchange, once an optimizer is to update."""
        if self._turns is not None:
            _leave_if_again(self._turns.before_update(optimizer))

    def _run_manual(self, run: Callable[[Any], Any], kwargs: Any) -> Any:
        """A batch of a program that updates by itself; the step's batches again as often as the group breaks."""
        assert self._loader is not None
        assert self._turns is not None
        last, is_again = self._loader.number, False
        if not last:
            self._turns.begin_step()
            self._take_back = self._kept_controls()
        while True:
            try:
                for number in range(last if is_again else 0):
                    self._loader.number = number
                    run(self._arguments(number, number - last))
                self._loader.number = last
                return run(self._arguments(last, 0) if is_again else kwargs)
            except StepAgain:
                is_again = True
                self._take_back()
                self._turns.begin_step()

    def _kept_controls(self) -> Callable[[], None]:
        """What a step that is given up has changed beside weights and optimizers; the call sets it as it is now."""
        trainer, module = self._trainer, self._trainer.lightning_module
        manual = trainer.fit_loop.epoch_loop.manual_optimization
        function, progress = module._current_fx_name, manual.optim_step_progress.state_dict()
        trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        schedulers = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs
        ]
        own = self._changed.read(self._own)

        def take_back() -> None:
            self._changed.write(self._own, own)
            with contextlib.suppress(ValueError):
                trainer.profiler.stop("optimizer_step")
            module._current_fx_name = function
            manual.optim_step_progress.load_state_dict(progress)
            for parameter, is_trained in trained:
                # An optimizer's turn may have begun for which others are frozen.
                parameter.requires_grad_(is_trained)
            for scheduler, state in schedulers:
                scheduler.load_state_dict(copy.deepcopy(state))

        return take_back

    def _arguments(self, number: int, offset: int) -> Any:
        """Those of training_step for a pass once more, on this worker's part of its batch in the present group."""
        trainer = self._trainer
        assert self._loader is not None
        batch = trainer.precision_plugin.convert_input(self._loader.read(number))
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        epoch_loop = trainer.fit_loop.epoch_loop
        return epoch_loop._build_kwargs(OrderedDict(), batch, epoch_loop.batch_idx + offset)

    def _repeat(self, number: int, offset: int) -> None:
        """One pass once more."""
        trainer = self._trainer
        kwargs = self._arguments(number, offset)
        result = trainer.fit_loop.epoch_loop.automatic_optimization._training_step(kwargs)
        trainer.strategy.backward(result.closure_loss, trainer.optimizers[0])

    def after_batch(self) -> None:
        """Pass on what the program has logged, and have its loggers note how many workers train where that changes."""
        # In an epoch that was taken up in its midst, schedulers are stepped at its end, too.
        self._trainer.fit_loop._restarting = False
        now_s = time.monotonic()
        if self._is_leader and self._told_workers != self._loop.world_size:
            self._told_workers = self._loop.world_size
            for logger in self._trainer.loggers:
                logger.log_metrics({WORKERS_METRIC: float(self._told_workers)}, step=self._trainer.global_step)
        if not self._is_leader or now_s - self._metrics_at_s < _METRICS_INTERVAL_S:
            return
        self._metrics_at_s = now_s
        logged = {
            name: float(value) for name, value in self._trainer.callback_metrics.items() if len(name) <= MAX_NAME_CHARS
        }
        self._loop.metrics.update(dict(list(logged.items())[:MAX_METRICS]))

    def end(self) -> None:
        """After the last step and all that Lightning does after it."""
        self._metrics_at_s = -math.inf
        self.after_batch()
        self._loop.end()

    # --- the state of the loop --------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """What Lightning puts into its own checkpoints beside the weights and the optimizer, at a boundary."""
        if self._loaded is not None:
            # It is handed on before the loop has taken it up.
            return self._loaded
        trainer = self._trainer
        call = importlib.import_module(f"{self._package}.trainer.call")
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": importlib.import_module(self._package).__version__,
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        if trainer.datamodule is not None:
            state = call._call_lightning_datamodule_hook(trainer, "state_dict")
            if state:
                checkpoint[type(trainer.datamodule).__qualname__] = state
        # Hooks may ask for the weights, which move by themselves.
        checkpoint["state_dict"] = weights = trainer.lightning_module.state_dict()
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        places = [name for name, value in checkpoint.items() if value is weights]
        checkpoint = {name: value for name, value in checkpoint.items() if name not in places}
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        return {**checkpoint, "batches_that_stepped": stepped, "weights": places, "own": self._changed.read(self._own)}

    def _load(self, state: dict[str, Any]) -> None:
        """Set it by Lightning's own way of resuming, before its loop begins."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        for callback in trainer.callbacks:
            directory = state["callbacks"].get(callback.state_key, {}).get("dirpath")
            if directory is not None and hasattr(callback, "best_model_path"):
                # Another worker may have drawn another folder for the same run.
                callback.dirpath = directory
        weights = trainer.lightning_module.state_dict()
        self._loaded = state
        connector._loaded_checkpoint = state = {**state, **dict.fromkeys(state.get("weights", ()), weights)}
        try:
            importlib.import_module(f"{self._package}.trainer.call")._call_lightning_module_hook(
                trainer, "on_load_checkpoint", state
            )
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_loops()
        finally:
            connector._loaded_checkpoint = {}


def _estimated_steps(trainer: Any) -> float:
    """The optimizer's steps of the whole training; infinite if it has no end of its own."""
    found = float(trainer.estimated_stepping_batches)
    for callback in trainer.callbacks:
        # Of a GradientAccumulationScheduler, which Lightning's own number does not know.
        accumulated = getattr(callback, "get_accumulate_grad_batches", None)
        if accumulated is not None and trainer.max_epochs not in (None, -1) and found < math.inf:
            num_batches, epochs = trainer.num_training_batches, range(trainer.max_epochs)
            num_steps = float(sum(-(-num_batches // accumulated(epoch)) for epoch in epochs))
            found = num_steps if trainer.max_steps == -1 else min(num_steps, trainer.max_steps)
    return found


def _leave_if_again(outcome: Exchanged) -> None:
    if outcome is Exchanged.AGAIN:
        raise StepAgain


def _check(trainer: Any) -> None:
    """Raise InvalidRequest for what Lightning would do on other devices by itself, or what cannot move."""
    strategy = type(trainer.strategy).__name__
    if strategy != "SingleDeviceStrategy":
        raise NotDivisible(
            f"the Trainer uses {strategy}, and the platform divides the work itself; leave out strategy and devices"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise NotDivisible('precision="16-mixed" scales its loss, which cannot move; use "bf16-mixed"')
    callbacks = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    if "Timer" in callbacks:
        raise NotDivisible("max_time and Timer end each worker at another step; use max_steps or max_epochs")
    for name in {"LearningRateFinder", "BatchSizeFinder"} & callbacks:
        raise NotDivisible(
            f"{name} trains by itself before the training; find the value in a run of its own, and write it into the "
            "program"
        )
    if "BaseFinetuning" in callbacks:
        raise NotDivisible(
            "BackboneFinetuning and other kinds of BaseFinetuning give the optimizer parameters as it trains; give it "
            "all at the beginning, in a group whose rate is 0 until then"
        )
    norm = torch.nn.modules.batchnorm._BatchNorm
    if "StochasticWeightAveraging" in callbacks and any(
        isinstance(one, norm) for one in trainer.lightning_module.modules()
    ):
        raise NotDivisible(
            "StochasticWeightAveraging of a model with batch normalisation has an epoch in which nothing is trained; "
            "use layers without it, as GroupNorm, or EMAWeightAveraging"
        )
