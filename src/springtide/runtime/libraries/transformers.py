"""Programs that train by a Trainer of transformers: its loop is patched when the module is imported.

Tested with transformers 5.23 and accelerate 1.15. The Trainer believes that it is the only process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from springtide.runtime.libraries.loop import LOOP, Exchanged, LibraryLoop, LibraryState, NotDivisible
from springtide.runtime.libraries.noticed_number import noticed
from springtide.runtime.libraries.part_loader import PartLoader
from springtide.runtime.libraries.plain_values import ChangedValues
from springtide.runtime.script_reports import MAX_METRICS, MAX_NAME_CHARS

# Stands for the checkpoint's folder where the state came from another worker or from the platform's checkpoint.
_TAKEN = "<springtide>"
# What a checkpoint of the Trainer gets last.
_WRITTEN_LAST = "trainer_state.json"
_BEST_MODEL_WAIT_S = 120.0


def patch_trainer(module: Any) -> None:
    """Have the Trainer of `transformers.trainer` run its loop by this process's LOOP."""
    run, skip = module.Trainer._inner_training_loop, module.skip_first_batches
    train_all = module.Trainer.train

    @functools.wraps(run)
    def _inner_training_loop(self: Any, *arguments: Any, **keywords: Any) -> Any:
        assert LOOP.loop is not None
        return TrainerFit(self, LOOP.loop).run(functools.partial(run, self, *arguments, **keywords))

    @functools.wraps(train_all)
    def train(self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        assert LOOP.loop is not None
        try:
            return train_all(self, resume_from_checkpoint, *arguments, **keywords)
        except Exception as error:
            if not resume_from_checkpoint or LOOP.loop.is_attached:
                raise
            # The leader may be writing that checkpoint, and a worker that joins does without it.
            self._springtide_unread = error
            return train_all(self, None, *arguments, **keywords)

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, PartLoader):
            return skip(dataloader, num_batches)
        dataloader.skipped = num_batches
        return dataloader

    module.Trainer._inner_training_loop = _inner_training_loop
    module.Trainer.train = train
    module.skip_first_batches = skip_first_batches


class TrainerFit:
    """One call of `Trainer.train` in an elastic job."""

    def __init__(self, trainer: Any, loop: LibraryLoop) -> None:
        self._trainer = trainer
        self._loop = loop
        self._loader: PartLoader | None = None
        self._epoch = 0
        # Whether its callbacks know that the training has begun.
        self._is_running = False
        # Of the present step: how many passes it has, and which of them is computed.
        self._num_passes = 1
        self._number = 0
        # Whether the loss of the present pass was divided by the number of items in the whole step.
        self._is_summed: Callable[[], bool] = lambda: False
        # A state that came before the loop began, and what it is still to be used for.
        self._loaded: dict[str, Any] | None = None
        self._is_taken_up = True
        # Whether the leader has written what was to be saved after the newest step, and what saves it.
        self._is_saved: Callable[[], bool] = lambda: True
        self._save_again: Callable[[], None] = lambda: None
        # The program's own Trainer and callbacks, and what has changed in their plain attributes.
        self._own: dict[str, Any] = {}
        self._changed = ChangedValues({})

    def run(self, train: Callable[[], Any]) -> Any:
        """Run the Trainer's own loop, with this object's methods around its."""
        trainer = self._trainer
        self._loop.check_first()
        _check(trainer)
        wrapped: dict[str, Callable[..., Any]] = {
            "get_train_dataloader": self._make_loader,
            "_init_training_state": self._begin,
            "_prepare_for_training": self._prepare,
            "_run_epoch": self._run_epoch,
            "_load_rng_state": self._load_random_state,
            "get_batch_samples": self._read_step,
            "training_step": self._pass,
            "log": self._log,
            "_save_checkpoint": self._save,
            "_load_best_model": self._load_best,
            "_finalize_training": self._end,
        }
        backward = trainer.accelerator.backward
        for name, method in wrapped.items():
            setattr(trainer, name, functools.partial(method, getattr(trainer, name)))
        trainer.accelerator.backward = functools.partial(self._backward, backward)
        try:
            return train()
        finally:
            for name in wrapped:
                delattr(trainer, name)
            del trainer.accelerator.backward

    # --- before the first step --------------------------------------------------------------------------------------

    def _make_loader(self, make: Callable[[], Any]) -> PartLoader:
        made = make()
        base = getattr(made, "base_dataloader", made)
        loader = PartLoader(base, self._loop, self._trainer.args.device)

        def where() -> tuple[int, int]:
            # As the Trainer has its samplers told: their order follows from the epoch.
            if hasattr(made, "set_epoch"):
                made.set_epoch(self._epoch)
            return self._epoch, loader.skipped

        loader.where, loader.plan = where, self._plan
        self._loader = loader
        return loader

    def _begin(self, begin: Callable[..., tuple[int, int]], *arguments: Any, **keywords: Any) -> tuple[int, int]:
        """Once the Trainer has its own state: join a group and take what that has, if it has any."""
        trainer = self._trainer
        where = begin(*arguments, **keywords)
        max_steps, steps_per_epoch, num_epochs, _, trial = arguments
        trainer.create_optimizer()
        self._loop.on_group = self._show_rank
        callbacks = {f"callback {index}": one for index, one in enumerate(trainer.callback_handler.callbacks)}
        self._own = {"trainer": trainer, **callbacks}
        self._changed = ChangedValues(self._own, [id(thing) for thing in (*self._own.values(), trainer.model)])
        state = LibraryState(self._loop, self._state, self._take)
        self._loop.attach(trainer.model, [trainer.optimizer], state)
        if self._loaded is None:
            if unread := getattr(trainer, "_springtide_unread", None):
                raise unread
            return where
        known = {field.name for field in dataclasses.fields(trainer.state)}
        fields = {name: value for name, value in self._loaded["state"].items() if name in known}
        trainer.state = type(trainer.state)(**fields)
        is_restored, trainer.args.restore_callback_states_from_checkpoint = (
            trainer.args.restore_callback_states_from_checkpoint,
            True,
        )
        trainer._load_callback_state()
        trainer.args.restore_callback_states_from_checkpoint = is_restored
        trainer.state.init_training_references(trainer, max_steps, num_epochs, trial)
        self._show_rank()
        epoch, step = divmod(trainer.state.global_step, steps_per_epoch)
        return epoch, step * trainer.args.gradient_accumulation_steps

    def _prepare(self, prepare: Callable[..., Any], max_steps: int, loader: Any, resume_from_checkpoint: Any) -> Any:
        """Once the Trainer has its scheduler: set both to where they were, by what was taken, not by a checkpoint."""
        trainer = self._trainer
        groups = [{**group} for group in trainer.optimizer.param_groups]
        prepared = prepare(max_steps, loader, None if self._loaded else resume_from_checkpoint)
        if self._loaded is not None:
            trainer.lr_scheduler.load_state_dict(self._loaded["scheduler"])
            for group, values in zip(trainer.optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in values.items() if name != "params"})
        return prepared

    def _run_epoch(self, run: Callable[..., Any], **keywords: Any) -> Any:
        assert self._loader is not None
        self._epoch, self._loader.skipped, self._is_running = keywords["epoch"], 0, True
        if self._loaded is not None:
            keywords["resume_from_checkpoint"] = _TAKEN
        return run(**keywords)

    def _load_random_state(self, load: Callable[[str], None], checkpoint: str) -> None:
        # Each pass is seeded by itself.
        if checkpoint != _TAKEN:
            load(checkpoint)

    def _show_rank(self) -> None:
        """Have the checks of transformers and accelerate for the rank follow the group's leader."""
        shared = importlib.import_module("accelerate.state").PartialState._shared_state
        shared["process_index"] = shared["local_process_index"] = self._loop.rank
        state, is_leader = self._trainer.state, self._loop.rank == 0
        was_leader = state.is_world_process_zero
        state.is_world_process_zero = state.is_local_process_zero = is_leader
        if self._is_running and is_leader and not was_leader:
            self._take_over_reports()
            if not self._is_saved():
                # The leader before this one was lost in saving, and nothing was trained since.
                self._save_again()

    def _take_over_reports(self) -> None:
        """Have callbacks make what they made on the leader alone, as the training began: bars of progress, runs."""
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            if getattr(callback, "training_bar", callback) is None:
                callback.on_train_begin(trainer.args, trainer.state, trainer.control)
            if hasattr(callback, "_initialized"):
                # Those of trackers then set themselves up before they log.
                callback._initialized = False

    # --- a step -----------------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[int, int | None]:
        state = self._trainer.state
        return self._num_passes, max(1, state.max_steps - state.global_step)

    def _read_step(self, read: Callable[..., Any], iterator: Any, num_batches: int, device: Any) -> Any:
        self._num_passes, self._number = num_batches, 0
        samples, num_items = read(iterator, num_batches, device)
        loaded = self._loaded
        if loaded is not None and not self._is_taken_up:
            self._is_taken_up = True
            for name, value in loaded["logged"].items():
                setattr(self._trainer, name, value)
            # A checkpoint of a release before this one lacks them.
            if "own" in loaded:
                self._changed.write(self._own, loaded["own"])
        return samples, self._count(samples, num_items, device)

    def _count(self, samples: list[Any], num_items: Any, device: Any) -> Any:
        """The number of items (tokens, say) in the step, over all workers, where the loss is normalised by it."""
        if num_items is None or self._loop.world_size == 1:
            return num_items
        own = [sample for number, sample in enumerate(samples) if self._loop.has_part(number)]
        count = self._trainer._get_num_items_in_batch(own, device) if own else 0
        return torch.as_tensor(self._loop.total(float(count)), dtype=torch.float32, device=device)

    def _pass(self, train: Callable[..., torch.Tensor], model: Any, inputs: Any, num_items: Any = None) -> torch.Tensor:
        """A pass of the Trainer; in the last of a step the exchange. The step's loss is returned by the last one."""
        trainer, number = self._trainer, self._number
        loss = self._compute(train, model, inputs, num_items)
        self._number = number + 1
        if not self._loop.is_last(number):
            return torch.zeros_like(loss)
        while self._loop.exchange() is Exchanged.AGAIN:
            assert self._loader is not None
            samples = [self._loader.read(number) for number in range(self._num_passes)]
            num_items = self._count(samples, trainer._get_num_items_in_batch(samples, trainer.args.device), loss.device)
            for self._number, inputs in enumerate(samples):
                self._compute(train, model, inputs, num_items)
        return torch.full_like(loss, self._loop.loss or 0.0)

    def _compute(self, train: Callable[..., torch.Tensor], model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        trainer = self._trainer
        takes_items = num_items is not None and (
            trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        )
        self._is_summed = lambda: takes_items
        if takes_items and self._loop.world_size > 1 and not trainer.args.torch_compile:
            # Many models and losses get the number and return the mean over their samples all the same.
            num_items, self._is_summed = noticed(num_items)
        self._loop.seed_pass(self._number)
        return train(model, inputs, num_items)

    def _backward(self, backward: Callable[..., None], loss: torch.Tensor, **keywords: Any) -> None:
        self._loop.weigh(self._number, loss, 1.0, is_summed=self._is_summed())
        backward(loss, **keywords)

    # --- what follows from a step -----------------------------------------------------------------------------------

    def _log(self, log: Callable[..., None], logs: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        kept = {name: float(value) for name, value in numbers.items() if len(name) <= MAX_NAME_CHARS}
        self._loop.metrics.update(dict(list(kept.items())[:MAX_METRICS]))
        log(logs, *arguments, **keywords)

    def _save(self, save: Callable[..., None], model: Any, trial: Any) -> None:
        save(model, trial)
        state, folder = self._trainer.state, self._trainer._get_output_dir(trial=trial)
        if state.best_global_step:
            # The leader may be about to write it.
            state.best_model_checkpoint = f"{folder}/checkpoint-{state.best_global_step}"
        step, path = state.global_step, Path(folder) / f"checkpoint-{state.global_step}" / _WRITTEN_LAST
        self._is_saved = lambda: state.global_step != step or path.exists()
        self._save_again = lambda: save(model, trial)

    def _load_best(self, load: Callable[[], None]) -> None:
        end_s = time.monotonic() + _BEST_MODEL_WAIT_S
        written = Path(self._trainer.state.best_model_checkpoint or "") / _WRITTEN_LAST
        while self._loop.rank and not written.exists() and time.monotonic() < end_s:
            # Where there is no model, transformers only warns.
            time.sleep(0.1)
        while True:
            try:
                return load()
            except Exception:
                # The leader may still be writing it.
                if self._loop.rank == 0 or time.monotonic() > end_s:
                    raise
            time.sleep(0.5)

    def _end(self, finalize: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._loop.end()
        return finalize(*arguments, **keywords)

    # --- the state of the loop --------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """What the Trainer's own checkpoints hold beside weights and optimizer, and its sums for the next log."""
        if self._loaded is not None and not self._is_taken_up:
            # It was handed on before the Trainer's own loop began.
            return self._loaded
        trainer = self._trainer
        exported: dict[str, Any] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if callable(getattr(callback, "state", None)):
                exported.setdefault(type(callback).__name__, []).append(callback.state())
        names = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
        logged = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
        if "_tr_loss" in logged:
            logged["_tr_loss"] = logged["_tr_loss"].clone()
        scheduler = trainer.lr_scheduler
        return {
            "state": {
                **vars(trainer.state),
                "log_history": list(trainer.state.log_history),
                "stateful_callbacks": exported,
            },
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "logged": logged,
            "own": self._changed.read(self._own),
        }

    def _take(self, state: dict[str, Any]) -> None:
        # In a first group nothing has begun yet.
        if state["scheduler"] is not None:
            self._loaded, self._is_taken_up = state, False


def _check(trainer: Any) -> None:
    """Raise InvalidRequest for what the Trainer would do on other devices by itself, or what cannot move."""
    args = trainer.args
    is_divided = args.n_gpu > 1 or trainer.accelerator.num_processes > 1
    if is_divided or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise NotDivisible(
            "the Trainer uses DeepSpeed, FSDP or several devices, and the platform divides the work itself; leave them "
            "out"
        )
    if trainer.accelerator.scaler is not None:
        raise NotDivisible("fp16=True scales its loss, which cannot move; use bf16=True")
    if args.auto_find_batch_size:
        raise NotDivisible("auto_find_batch_size would give each worker another batch; leave it out")
