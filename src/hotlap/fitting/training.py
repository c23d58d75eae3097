"""The training loop: steps until the end or a signal, evaluations and checkpoints between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor

from hotlap.core.errors import DivergedError, StoreError, TrainingError, first_line
from hotlap.core.terminal import clean
from hotlap.core.turns import turn
from hotlap.engine.objective import PendingMean
from hotlap.engine.step import Window, is_out_of_memory
from hotlap.fitting.before_the_end import SavedInTime
from hotlap.fitting.deadline import Deadline, span_schedule
from hotlap.fitting.hangs import watch_for_hangs
from hotlap.fitting.live import LOOK_S, LiveTraining
from hotlap.fitting.lost_workers import LostWorkers, deaths_raised_by_the_feed, is_lost
from hotlap.fitting.metric_logs import MetricLogs
from hotlap.fitting.not_finite import NotFinite
from hotlap.fitting.progress import Pace, format_record, status
from hotlap.fitting.record import resume_words
from hotlap.fitting.rescue import Rescue, within
from hotlap.fitting.session import ProgressState, RunSession, unfit_checkpoint
from hotlap.fitting.task import Task
from hotlap.fitting.tuning import chooser_for, tuning_line
from hotlap.guard.signals import StopRequest
from hotlap.monitor.sampler import Sampler
from hotlap.ranks.leader import LostRankError

MOST_LOST, NEAR = 3, 100
"""How often other ranks may be lost within so many steps."""
EVALUATIONS = 3
"""How often an evaluation is made whose workers die."""
SIGNAL_S = 2.0
"""How long a signal may take to arrive after it has ended the workers."""
PUT_BACK: Final = "put back"
"""Why steps end where the training goes on from an earlier one."""


def train(task: Task, session: RunSession, state: ProgressState) -> str:
    """Train to the end, from where the rig stands, and return why it ended.

    A signal ends it after the step in hand and a checkpoint: KeyboardInterrupt, or exit code 143. An error of the
    user's own code or data is raised after a checkpoint of the last step that was made.
    """
    loop, rig, saves = _Loop(task, session, state), task.rig, task.save_every != 0
    end = task.session_end if saves else None
    live = loop.live
    try:
        sampler = Sampler(session.folder.path, live.read, live.state)
        session.until_it_ends(watch_for_hangs(task, session, state))
        with sampler, deaths_raised_by_the_feed(), StopRequest(end) as stop:
            try:
                stopped = live.stopped = loop.steps(stop)
            except Exception as error:
                loop.save_after(error)
                raise
            loop.tuner.ended()
            saves = saves and not loop.numbers.has_dead_weights
            asked = stop.signal is not None
            saved = saves and (asked or session.saver.due_at_end(rig.steps))
            if saved:
                session.save(state, wait=True)
        if stop.signal is not None:
            if saves and not saved:  # it came while that was decided
                session.save(state, wait=True)
            task.voice.say(f"stopped by {stop.reason}; go on with: {resume_words(session.folder)}")
            if end is not None and end.then:
                task.voice.say(f"       {end.then}")
            stop.obey()
    finally:
        live.close()
        loop.logs.close()
        session.saver.finish()
    return stopped


class _Loop:
    """The steps of one call of `fit`, and what is done between two of them."""

    def __init__(self, task: Task, session: RunSession, state: ProgressState) -> None:
        self._job, self._rig, self._voice, self._save_every = task.job, task.rig, task.voice, task.save_every
        self._task = within(task, task.rig.plan.memory) if task.tuned else task
        self._session, self._state = session, state
        if self._save_every is None or self._save_every == 0:
            session.keep_start(state)
        state.clock.loop_s = time.perf_counter()
        self._pace = Pace(task.total, task.rig.steps, task.rig.samples)
        self._deadline = self._deadline_of(task)
        self._length = None if self._deadline is None else self._deadline.length
        self.tuner = chooser_for(self._task, self._length)
        self.live = LiveTraining(task, session, state, self.tuner)
        self.logs = MetricLogs(task.logs, session.folder.path, task.identity["settings"], task.voice.mention)
        self._rescue, self._lost_workers = Rescue(task.rig), LostWorkers(task.rig)
        self._told = self.tuner.done
        """Whether the outcome of tuning was shown, or there is none."""
        self.numbers = NotFinite(task, session, state)
        self._dead: list[str] = []
        """What to say of numbers that are not finite and have ended the training, a line each."""
        self._is_elsewhere = False
        """Whether the training has been put back since the last step."""
        self._open: tuple[dict[str, Any], PendingMean] | None = None
        """A record whose loss is still on its way, and that loss."""
        if task.dataset.bad is not None:
            task.dataset.bad.tell = self._tell_of_bad_sample
        self._begun_at = task.rig.steps
        self._turn = turn.get()
        self._lost_at: list[int] = []
        """The steps at which other ranks were lost lately."""
        self._failed: Window | None = None
        """The window whose step an error ended, where nothing has put the training back."""
        self._step: Callable[[Window], Tensor] = task.rig.advance

    def steps(self, stop: StopRequest) -> str:
        """Make all steps that are left; why it ended."""
        while True:
            try:
                ended = self._steps_from_here(stop)
            except LostRankError as error:
                self._regroup(error)
                continue
            if not self._is_elsewhere:
                return ended
            self._is_elsewhere = False

    def _steps_from_here(self, stop: StopRequest) -> str:
        """Make all steps that are left, or those until the training is put back to an earlier step; why it ended."""
        now, state = time.perf_counter(), self._state
        self._show_at_s, self._look_at_s = now + self._voice.console.every_s, now + LOOK_S
        self._ends = SavedInTime(self._task, self._session, state, stop)
        if (early := self._early_end()) is not None:
            return early
        if (state.from_checkpoint is not None or self._lost_at) and self._lacks_record():
            self._record()
            if (early := self._early_end()) is not None:
                return early
        if self._deadline is not None:
            self._deadline.try_evaluation()
        # What a forged or foreign state breaks, it breaks in the first step.
        self._step = self._rig.advance if state.from_checkpoint is None else self._step_from_checkpoint
        for window in self._windows(stop):
            if self._turn is not None and self.tuner.done:  # what tuning times must run alone
                self._turn.pass_on()
            if self._stepped(window) and (ended := self._between_steps(stop)) is not None:
                return ended
        return self._after_last_step(stop)

    def _stepped(self, window: Window) -> bool:
        """Make the update of a window; False where it comes again, under another plan or from a checkpoint."""
        self._rescue.begins(window)
        try:
            self._step(window)
        except Exception as error:
            self._answered(error, window)
            return False
        self._rescue.ended()
        self._step = self._rig.advance
        self.tuner.stepped(window.updates)
        if self._rescue.larger:
            self._use_more_memory()
        if self.tuner.done and not self._told:
            self._tell_of_tuning()
        if (good := self.tuner.drifted()) is not None:
            self._go_back(good)
            return False
        return True

    def _between_steps(self, stop: StopRequest) -> str | None:
        """Do what is due after a step; why the training ends here, or None where it goes on."""
        # A record is finished only now, with the next step under way: the device has no pause between epochs.
        for what_is_due in (self._finish_record, self._look, self._show, self._evaluate):
            what_is_due()
            if self._is_elsewhere:
                return PUT_BACK
        ended = self._early_end() or self._stopped_by(stop) or self._out_of_time()
        if ended is not None:
            return ended
        self._save()
        return PUT_BACK if self._is_elsewhere else None

    def _after_last_step(self, stop: StopRequest) -> str:
        """Evaluate the trained model, if the last step has not been; why the training ended."""
        state = self._state
        self._finish_record()
        self._check_weights()
        if self._is_elsewhere:
            return PUT_BACK
        if self._dead and (early := self._early_end()) is not None:
            return early
        if stop.signal is not None:
            return "on a signal"
        if not state.history or state.history[-1]["step"] != self._rig.steps:
            self._record(evaluates=self._has_time_to_evaluate())
            self._finish_record()
        return "after all epochs" if self._job.epochs is not None else "after all steps"

    def _look(self) -> None:
        """Count the step; every few seconds look at pace and loss, and answer numbers that are not finite."""
        self.live.stepped()
        now = time.perf_counter()
        if now >= self._look_at_s:
            self.live.look()
            if (too_slow := self._ends.look()) is not None:
                self._voice.say(f"time   {too_slow}")
            self._look_at_s = time.perf_counter() + LOOK_S
            if self.live.losses.is_lost:
                self._check_weights()
        if row := self.numbers.skipped_in_a_row():
            self._answer_skips(row)

    def _show(self) -> None:
        """Show the progress, where that is due."""
        if time.perf_counter() < self._show_at_s:
            return
        rig, saver = self._rig, self._session.saver
        if not saver.busy:
            saver.finish()  # tells of a checkpoint that could not be written
        loss = rig.totals.mean()  # waits for the device, so that the rates below are true
        reading = self._pace.read(step=rig.steps, samples=rig.samples, epoch=rig.place.epoch, loss=loss)
        self._voice.console.show(reading.step, reading.total_steps, partial(status, reading))
        self._show_at_s = time.perf_counter() + self._voice.console.every_s

    def _evaluate(self) -> None:
        """Begin the record of this step, where one is due and time allows."""
        if self._is_record_due() and self._ends.leaves_time_to_evaluate() and self._has_time_to_evaluate():
            self._record()

    def _stopped_by(self, stop: StopRequest) -> str | None:
        """Why a signal ends the training here; None without one. The figures of this step are noted."""
        if stop.signal is None:
            return None
        self._finish_record()
        return "on a signal"

    def _save(self) -> None:
        """Make a checkpoint, where one is due and the training stands where it is worth making."""
        if not self._session.saver.due(self._rig.steps) or not self._may_save():
            return
        began = time.perf_counter()
        self._session.checkpoints.trusted = self.tuner.trusted
        self.live.doing = "saving"
        self._session.save(self._state)
        self.live.doing = "training"
        self.tuner.paused(time.perf_counter() - began)

    def _deadline_of(self, task: Task) -> Deadline | None:
        """Keeps the training within its time, where that is limited."""
        state, saver, weights_bytes = self._state, self._session.saver, task.weights_bytes()
        if task.limit is not None:
            return Deadline(
                task.limit,
                task.job,
                task.rig,
                total=task.total,
                closing_s=lambda: saver.closing_s(weights_bytes),
                planned=state.planned,
            )
        if state.planned is not None and task.rig.schedule.spans_the_run:
            span_schedule(task.rig, task.job, task.total, task.total)
            self._voice.say(f"note   the schedule spanned {state.planned:,} updates; it spans all {task.total:,} again")
            state.planned = None
        return None

    def _has_time_to_evaluate(self) -> bool:
        return self._deadline is None or self._deadline.may_evaluate()

    def _out_of_time(self) -> str | None:
        """Why the training ends here, if it has no more time; the figures of this step are noted."""
        deadline, state = self._deadline, self._state
        if deadline is None:
            return None
        if (planned := deadline.planned()) is not None:
            self._voice.say(f"time   {planned}")
            self._pace.total = deadline.updates
        if deadline.is_shorter:
            state.planned, state.is_cut = deadline.updates, True
        if not deadline.is_over() or self._rig.steps >= deadline.total:
            return None
        self._finish_record()
        if not state.history or state.history[-1]["step"] != self._rig.steps:
            self._record(evaluates=deadline.may_evaluate())
            self._finish_record()
            if deadline.goes_on():
                return None
        state.is_cut = state.best.decides = True
        state.left_out = tuple(deadline.left_out())
        return deadline.why

    def _early_end(self) -> str | None:
        """Why the training ends before its time; None where it goes on."""
        job, best = self._job, self._state.best
        if self._dead:
            return f"early: {self._dead[0]}; the weights of the best evaluation are restored"
        if self._state.asked_to_end is not None:
            return f"early: {self._state.asked_to_end}"
        return f"early: no better {job.monitor} in {job.patience} evaluations" if best.is_long_ago() else None

    def _answered(self, error: Exception, window: Window) -> None:
        """Answer an error in a step by another plan, so that its window comes again.

        Raises the error where there is no answer.
        """
        rig, is_short, self._failed = self._rig, is_out_of_memory(error), window
        if isinstance(error, LostRankError):
            raise error
        if is_short:
            place = self._rescue.undo(error, window)
            self._failed = None
        else:
            place = rig.place
        if self.tuner.failed(error):
            self._failed = None
            if is_short:
                rig.place = place
            return
        if not is_short:
            raise error
        if (again := self._rescue.why_again(error)) is not None:
            self._voice.warn(f"out of memory at step {rig.steps:,}, made again under the same plan: {again}")
            rig.place = place
            return
        self.tuner.ended()
        less = self._rescue.use_less(error, window)
        self._voice.warn(f"out of memory at step {rig.steps:,}; from here on: {less}")
        self._task = within(self._task, rig.plan.memory)
        self._choose_anew()

    def _use_more_memory(self) -> None:
        """Go back to larger pieces where they may fit again; not while plans are tried or replayed."""
        if self._task.replayed is None and self.tuner.done and (more := self._rescue.use_more()) is not None:
            self._voice.say(f"memory at step {self._rig.steps:,}, tried again: {more}")
            self._task = within(self._task, self._rig.plan.memory)

    def _regroup(self, error: LostRankError) -> None:
        """Go on where another rank was lost: from the newest checkpoint, or where the lost step began."""
        rig, window, self._failed, self._open = self._rig, self._failed, None, None
        self._lost_at = [step for step in self._lost_at if rig.steps - step < NEAR] + [rig.steps]
        why = f"{error}, at step {rig.steps:,}"
        if len(self._lost_at) > MOST_LOST:
            raise TrainingError(f"{why}, for the {len(self._lost_at)}th time within {NEAR} steps: train with gpus=1")
        try:
            self._state.put_back_records(self._session.put_back(until=rig.steps, or_start=True))
            self._session.folder.write_metrics(self._state.history)
        except StoreError:
            left = None if window is None else self._rescue.step_back(error, window)
            if left is not None:
                raise TrainingError(f"{why}; there is no checkpoint to go back to, and {left}") from None
        rig.write_down("rank lost", "fault", f"{why}; started again, from step {rig.steps:,} on")
        self._voice.warn(f"{why}; the ranks start again, from step {rig.steps:,} on")

    def save_after(self, error: Exception) -> None:
        """Save what was trained before an error, and add to the error the line that goes on from there."""
        rig, session, state = self._rig, self._session, self._state
        # A training that made no step has nothing to lose, and one whose weights are NaN nothing to keep.
        if self._save_every == 0 or rig.steps == 0 or self.numbers.has_dead_weights:
            return
        try:
            unsaved = self._rescue.step_back(error, self._failed) if self._failed is not None else None
            if unsaved is None and not self.numbers.has_finite_weights():
                unsaved = "its weights are not finite"
            if unsaved is None and rig.steps != self._begun_at:
                self._finish_record()
                self.tuner.ended()
                before = session.saver.saved
                session.checkpoints.trusted = self.tuner.trusted
                session.save(state, wait=True)
                unsaved = None if session.saver.saved > before else "it could not be written"
        except Exception as other:  # such as a device that answers no more: the first error is the one to raise
            unsaved = first_line(other)
        last = f"saved at step {rig.steps:,}" if unsaved is None else f"step {rig.steps:,} is not saved ({unsaved})"
        line = f"{last}; once the error is mended, go on with: {resume_words(session.folder)}"
        self._voice.say(line)
        error.add_note(line)

    def _windows(self, stop: StopRequest) -> Iterator[Window]:
        """The rig's windows, until they end or a signal ends the workers that bring them."""
        windows = self._all_windows()
        while True:
            asked = time.perf_counter()
            try:
                window = next(windows)
            except StopIteration:
                return
            except (RuntimeError, MemoryError, ConnectionError, EOFError) as error:
                if self._rescue.fetches_again(error):
                    windows = self._all_windows()
                    continue
                # A signal to the whole group ends the loader's workers too, and torch complains of that first.
                if stop.comes_within(SIGNAL_S):
                    return
                if not is_lost(error):
                    raise
                self._start_workers_again(error)
                windows = self._all_windows()
                continue
            waited_s = time.perf_counter() - asked
            self.live.fed_s += waited_s
            self.tuner.fed(waited_s)
            yield window

    def _all_windows(self) -> Iterator[Window]:
        return self._rig.windows(epochs=self._job.epochs, steps=self._job.steps, room=self._room)

    def _start_workers_again(self, error: Exception) -> None:
        """Go on where workers died, with as many or fewer; tuning starts from there."""
        if self.tuner.failed(error):  # those of a plan on trial
            return
        self.tuner.ended()
        before = self._rig.plan.feed
        self._voice.warn(self._lost_workers.answer(error))
        after = self._rig.plan.feed
        if after != before:
            task = self._task
            own = task.own_plan if task.own_plan.feed != before else replace(task.own_plan, feed=after)
            self._task = replace(task, own_plan=own)
        self._choose_anew()

    def _choose_anew(self) -> None:
        """Begin to choose plans from where the training stands."""
        self.tuner = self.live.tuner = chooser_for(self._task, self._length)
        self._told = self.tuner.done

    def _tell_of_bad_sample(self, line: str) -> None:
        self._rig.write_down("sample left out", "fault", line)
        self._voice.warn(line)

    def _room(self) -> int:
        """Updates until an evaluation, or a checkpoint that is due by number."""
        steps = self._rig.place.served
        periods = [every for every in (self._job.eval_every, self._save_every) if every]
        planned = [] if self._deadline is None else [self._deadline.room()]
        return min((self.tuner.room(), *planned, *(every - steps % every for every in periods)))

    def _tell_of_tuning(self) -> None:
        self._told = True
        found = tuning_line(self._rig.ledger)
        if found:
            self._voice.say(f"tuned  {found}")

    def _go_back(self, good: int) -> None:
        """Go on from the newest checkpoint of a time at which all was well; from here, where there is none."""
        why = "the tuned plan no longer trains as the user's own does"
        self._open = None
        try:
            self._state.put_back_records(self._session.put_back(until=good))
        except StoreError as error:
            self._voice.warn(f"{why}; another one is used from step {self._rig.steps:,} on ({error})")
            return
        self._session.folder.write_metrics(self._state.history)
        self._voice.warn(f"{why}; gone back to the checkpoint of step {self._rig.steps:,}, under another plan")

    def _step_from_checkpoint(self, window: Window) -> Tensor:
        with unfit_checkpoint(str(self._state.from_checkpoint)):
            return self._rig.advance(window)

    def _is_record_due(self) -> bool:
        every = self._job.eval_every
        if every is not None:
            return self._rig.steps % every == 0
        return self._rig.place.window == self._rig.epoch_windows

    def _lacks_record(self) -> bool:
        """Whether the evaluation that is due at this step was not made: an error ended it, and the step was saved."""
        rig, every, history = self._rig, self._job.eval_every, self._state.history
        if not rig.steps or (history and history[-1]["step"] == rig.steps):
            return False
        return rig.steps % every == 0 if every is not None else rig.place.window == rig.windows_here

    def _record(self, *, evaluates: bool = True) -> None:
        """Note the figures of this step, and evaluate. Without validation data this does not wait for the device."""
        job, rig, began = self._job, self._rig, time.perf_counter()
        rig.settle()
        loss = rig.totals.take()
        record: dict[str, Any] = {
            "step": rig.steps,
            "epoch": rig.place.epoch + 1,
            "samples": rig.samples,
            "train_loss": math.nan,
            "lr": float(rig.optimizer.param_groups[0]["lr"]),
        }
        self._open = (record, loss)
        if job.valid is None or not evaluates:
            return
        # The device goes from the last step to this without a pause: nothing has waited for that step.
        self.live.doing = "evaluating"
        try:
            scores = self._scores(job.valid)
        except Exception:
            rig.totals.put_back(loss.numbers())
            self._open = None
            raise
        finally:
            self.live.doing = "training"
        record |= {("valid_loss" if name == "loss" else name): value for name, value in scores.items()}
        rig.schedule.evaluated(scores[job.monitor])
        self._open = (record, loss)
        self._finish_record(spent_s=loss.ago_s())
        if self._deadline is not None:
            self._deadline.evaluated(time.perf_counter() - began)

    def _scores(self, valid: Any) -> dict[str, float]:
        """Evaluate; where workers die, again."""
        job, left = self._job, EVALUATIONS
        while True:
            try:
                return self._rig.evaluate(valid, job.metrics, batch_size=job.eval_batch, collate=job.collate)
            except (RuntimeError, ConnectionError, EOFError) as error:
                left -= 1
                if not left or not is_lost(error):
                    raise
                self._voice.warn(f"{first_line(error)}; the evaluation is made again")

    def _finish_record(self, spent_s: float = 0.0) -> None:
        """Write down a record that was begun; what that takes, and `spent_s` until now, is not training's time."""
        if self._open is None:
            return
        if self._turn is not None:  # reading the loss waits for the device
            self._turn.pass_on(until_done=True)
        job, state = self._job, self._state
        (record, loss), self._open = self._open, None
        record["train_loss"] = loss.mean()
        aside = time.perf_counter() - spent_s
        record["elapsed_s"] = state.clock.elapsed(time.perf_counter())
        state.history.append(record)
        try:
            self._session.folder.add_metrics(record)
        except StoreError as error:
            self._voice.warn(f"metrics.jsonl lacks step {record['step']}: {error}; training goes on")
        self.logs.add(record)
        self._voice.say(format_record(record, by_step=job.eval_every is not None))
        self._check_finite(record)
        if self._is_elsewhere:  # the record is of steps that do not count
            return
        state.best.judge(record)
        if self._task.on_evaluation is not None:
            answer = self._task.on_evaluation(dict(record))
            if isinstance(answer, str):
                state.asked_to_end = clean(" ".join(answer.split()))
        spent = time.perf_counter() - aside
        state.clock.aside_s += spent
        self._pace.pause(spent)
        self.tuner.paused(spent)

    def _check_finite(self, record: dict[str, Any]) -> None:
        """Warn of a loss that is not finite, and answer weights that are not either, or updates that are skipped."""
        self.numbers.warn_of_loss(record)
        if not all(math.isfinite(record.get(name, 0.0)) for name in ("train_loss", "valid_loss")):
            self._check_weights()
        if not self._is_elsewhere and (row := self.numbers.skipped_in_a_row(is_record=True)):
            self._answer_skips(row)

    def _check_weights(self) -> None:
        """Answer weights that are not finite."""
        if not self._dead and not self._is_elsewhere and not self.numbers.has_finite_weights():
            self._answer_not_finite("the weights are not finite", until=self._rig.steps)

    def _answer_skips(self, row: int) -> None:
        """Answer updates that were skipped one after the other."""
        what = f"{row:,} updates in a row have gradients that are not finite"
        self._answer_not_finite(what, until=self._rig.steps - row)

    def _may_save(self) -> bool:
        """Whether the training stands where a checkpoint is worth making; answers weights that are not finite."""
        self._finish_record()
        self._check_weights()
        return not self._dead and not self._is_elsewhere

    def _answer_not_finite(self, what: str, *, until: int) -> None:
        """Go on from finite numbers under another plan; if there is none, end the training and say where it began.

        Raises DivergedError if no better weights are kept, which early stopping would have.
        """
        # While plans are tried, another one may have been in force where it began.
        tried = not self.tuner.done and any(entry.plan != self._task.own_plan for entry in self._rig.ledger)
        in_force, self._open = None if tried else self._rig.plan, None
        if in_force != self._task.own_plan:
            self.tuner.distrust()
        self.tuner.ended()
        plan = self.numbers.go_back(what, in_force, until=until)
        if plan is not None:
            self._is_elsewhere = True
            self._task = replace(self._task, own_plan=plan, tuned=False, replayed=None)
            self._choose_anew()
            return
        self._dead = self.numbers.stop(what)
        if not self._state.best.is_known:
            raise DivergedError("\n  ".join(self._dead))
        self._voice.warn("; ".join(self._dead))
