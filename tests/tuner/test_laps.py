"""The lap clock: what is timed, what is thrown away, and what is left out."""

import pytest

from hotlap import Plan
from hotlap.engine.cursor import Place
from hotlap.tuner.laps import ENOUGH, LAP_S, MOST_AGAIN, LapClock


class Driver:
    """A training of steps that take as long as the test says, and its clock."""

    def __init__(self, *, step_s=0.01, epoch=100, period=None, few_windows=0):
        self.plan, self.steps, self.place, self.epoch_windows = Plan(), 0, Place(), epoch
        self.warmup_steps, self.now, self.step_s, self.waits = 0, 0.0, step_s, 0
        self.laps = LapClock(self, period=period, few_windows=few_windows, clock=lambda: self.now)

    def wait(self):
        self.waits += 1

    def step(self, updates=1, feed_s=0.0, evaluation_s=None):
        if self.place.window >= self.epoch_windows:
            self.place = Place(self.place.epoch + 1, 0, self.place.served)
        self.now += feed_s
        self.laps.fed(feed_s)
        self.now += self.step_s * updates
        self.steps += updates
        self.place = Place(self.place.epoch, self.place.window + updates, self.place.served + updates)
        lap = self.laps.stepped(updates)
        if evaluation_s is not None and self.place.window >= self.epoch_windows:
            self.now += evaluation_s
            self.laps.paused(evaluation_s)
        return lap

    def lap(self, warm=1, **step):
        self.laps.ask(warm=warm)
        for _ in range(10_000):
            lap = self.step(**step)
            if lap is not None:
                return lap
        raise AssertionError("no lap came")


def test_a_lap_is_the_mean_of_steps_that_take_long_enough_together():
    driver = Driver(step_s=0.004)
    lap = driver.lap()
    assert lap.step_s == pytest.approx(0.004)
    assert (lap.updates - 1) * 0.004 >= LAP_S  # the first one was not timed
    assert lap.wall_s == pytest.approx(lap.updates * 0.004)


def test_a_step_longer_than_a_lap_is_a_lap():
    driver = Driver(step_s=1.5)
    assert driver.lap(warm=2).updates == 3


def test_the_device_is_waited_for_once_at_each_end_of_a_lap():
    driver = Driver()
    driver.lap()
    assert driver.waits == 3  # in the first one under a plan, its pace is looked at, too
    driver.lap()
    assert driver.waits == 5


class Lagging(Driver):
    """Asks a device for steps that take it many times as long as the asking."""

    def __init__(self, *, device_s, **settings):
        self.device_s, self.ready = device_s, 0.0
        super().__init__(**settings)

    def step(self, updates=1, **settings):
        self.ready = max(self.ready, self.now) + self.device_s * updates
        return super().step(updates, **settings)

    def wait(self):
        super().wait()
        self.now = max(self.now, self.ready)


def test_laps_are_no_longer_than_they_need_be_where_the_host_runs_ahead_of_the_device():
    driver = Lagging(step_s=0.0005, device_s=0.02)
    laps = [driver.lap() for _ in range(3)]
    # To the host alone 0.05 s would be 100 steps, and 2 s to the device.
    assert [lap.updates for lap in laps] == [5, 5, 5]
    assert all(lap.step_s == pytest.approx(0.02, rel=0.05) for lap in laps)


def test_a_plan_that_has_become_faster_has_laps_of_full_length_again():
    driver = Lagging(step_s=0.0005, device_s=0.02, epoch=100_000)
    driver.lap()
    driver.device_s = 0.001
    driver.lap()
    lap = driver.lap()
    assert (lap.updates - 1) * 0.001 == pytest.approx(LAP_S, abs=0.002)


@pytest.mark.parametrize("epoch", [100_000, 7])
def test_the_first_lap_of_a_plan_that_has_become_faster_is_of_full_length_too(epoch):
    driver = Lagging(step_s=0.0005, device_s=0.02, epoch=epoch)
    driver.lap()
    driver.device_s, before = 0.001, driver.waits
    lap = driver.lap()
    assert (lap.updates - 1) * 0.001 >= ENOUGH * LAP_S
    assert lap.step_s == pytest.approx(0.001, rel=0.1)
    if epoch > 7:
        assert driver.waits - before == 3  # its pace is looked at once


def test_each_plan_has_a_pace_of_its_own():
    driver = Lagging(step_s=0.0005, device_s=0.02)
    driver.lap()
    driver.plan, driver.device_s = Plan().but(optimizer="fused"), 0.001
    lap = driver.lap()
    assert (lap.updates - 1) * 0.001 == pytest.approx(LAP_S, abs=0.002)


def test_what_comes_first_under_a_plan_is_not_timed():
    driver = Driver(step_s=0.01)
    driver.laps.ask(warm=3)
    driver.step_s = 5.0  # something is set up
    for _ in range(3):
        assert driver.step() is None
    driver.step_s = 0.01
    lap = next(lap for _ in range(100) if (lap := driver.step()) is not None)
    assert lap.step_s == pytest.approx(0.01)
    assert lap.wall_s > 15  # but it was spent


def test_feeding_and_issuing_are_told_apart():
    lap = Driver(step_s=0.01).lap(feed_s=0.03)
    assert lap.feed_s == pytest.approx(0.03)
    assert lap.issue_s == pytest.approx(0.01)
    assert lap.step_s == pytest.approx(0.04)


def test_a_lap_that_the_end_of_an_epoch_cuts_is_thrown_away():
    driver = Driver(step_s=0.01, epoch=10)
    for _ in range(6):
        driver.step()
    driver.laps.ask(warm=0)
    lap = next(lap for _ in range(100) if (lap := driver.step(evaluation_s=3.0)) is not None)
    assert lap.step_s == pytest.approx(0.01)
    assert driver.place.epoch == 1
    assert 3 < driver.place.window < 10


def test_where_epochs_are_shorter_than_a_lap_it_is_whole_epochs_without_what_lies_between_them():
    driver = Driver(step_s=0.01, epoch=3)
    lap = driver.lap(evaluation_s=7.0)
    assert lap.step_s == pytest.approx(0.01)
    again = driver.lap(evaluation_s=7.0)
    assert again.step_s == pytest.approx(0.01)
    assert driver.place.window == 3


def test_evaluations_by_steps_cut_as_the_ends_of_epochs_do():
    driver = Driver(step_s=0.01, epoch=10_000, period=4)
    lap = driver.lap()
    assert lap.step_s == pytest.approx(0.01)
    assert driver.steps % 4 == 0


def test_a_save_in_the_middle_voids_the_lap():
    driver = Driver(step_s=0.02)
    driver.laps.ask(warm=0)
    driver.step()
    driver.now += 4.0
    driver.laps.paused(4.0)
    lap = next(lap for _ in range(100) if (lap := driver.step()) is not None)
    assert lap.step_s == pytest.approx(0.02)
    assert lap.wall_s < 1


def test_a_lap_waits_until_captures_are_recorded_and_begins_again_where_one_comes_later():
    driver = Driver(step_s=0.01)
    driver.laps.ask(warm=0)
    for _ in range(4):  # eager, and then the recording
        driver.warmup_steps += 1
        driver.step_s = 0.5
        assert driver.step() is None
    driver.step_s = 0.01
    assert driver.step() is None
    driver.warmup_steps += 1  # another shape of batch
    driver.step_s = 0.5
    assert driver.step() is None
    driver.step_s = 0.01
    lap = next(lap for _ in range(100) if (lap := driver.step()) is not None)
    assert lap.step_s == pytest.approx(0.01)


def test_a_plan_that_never_comes_to_its_pace_is_timed_in_the_end():
    driver = Driver(step_s=0.01, epoch=100_000)
    driver.laps.ask(warm=0)
    lap = None
    while lap is None and driver.steps < 2000:
        driver.warmup_steps += 1
        lap = driver.step()
    assert lap is not None
    assert driver.steps * driver.step_s > MOST_AGAIN * LAP_S  # as many were thrown away before


def test_windows_of_several_updates_count_as_many():
    lap = Driver(step_s=0.001, epoch=10_000).lap(updates=8)
    assert lap.step_s == pytest.approx(0.001)
    assert lap.updates % 8 == 0


def test_a_record_that_is_written_after_the_next_step_does_not_make_laps_whole_epochs():
    driver = Driver(step_s=0.01, epoch=5000)
    driver.place = Place(0, 4997, 4997)
    driver.laps.ask(warm=0)
    for _ in range(5):
        driver.step()
    driver.laps.paused(0.001)
    lap = next(lap for _ in range(50) if (lap := driver.step()) is not None)
    assert lap.step_s == pytest.approx(0.01)
    assert driver.place.window < 50


class Dozing(Driver):
    """A script: being watched slows its steps, and it tells of quiet ones all at once."""

    watching_s = 0.0005

    def __init__(self, **settings):
        self.dozed = 0
        super().__init__(**settings)

    def step(self, feed_s=0.0, evaluation_s=None):
        if self.place.window >= self.epoch_windows:
            self.place = Place(self.place.epoch + 1, 0, self.place.served)
        quiet = self.laps.quiet if not self.dozed else self.quiet
        self.now += feed_s + self.step_s + (0.0 if quiet else self.watching_s)
        self.steps += 1
        self.place = Place(self.place.epoch, self.place.window + 1, self.place.served + 1)
        lap = None
        if quiet:
            self.dozed, self.quiet = self.dozed + 1, quiet - 1
        else:
            self.laps.fed(feed_s)
            lap = self.laps.stepped(self.dozed + 1, self.dozed + 1)
            self.dozed = 0
        if evaluation_s is not None and self.place.window >= self.epoch_windows:
            self.now += evaluation_s
            self.laps.paused(evaluation_s)
        return lap


@pytest.mark.parametrize("epoch", [1000, 130, 60])
def test_laps_that_are_dozed_through_are_of_the_script_without_its_watcher(epoch):
    driver = Dozing(step_s=0.001, epoch=epoch)
    first = driver.lap(feed_s=0.0002, evaluation_s=7.0)
    assert first.step_s == pytest.approx(0.0017), "which is watched, to know what the host does"
    for _ in range(5):
        lap = driver.lap(warm=0, feed_s=0.0002, evaluation_s=7.0)
        assert lap.step_s == pytest.approx(0.0012, rel=0.02)
        assert lap.step_s * lap.updates >= ENOUGH * LAP_S
        assert lap.feed_s == pytest.approx(0.0002)


def test_another_plan_is_dozed_through_as_soon_as_its_pace_is_known():
    driver = Dozing(step_s=0.001)
    driver.lap()
    driver.plan = Plan().but(optimizer="fused")
    lap = driver.lap(warm=2)
    assert lap.step_s == pytest.approx(0.001, rel=0.08)
    assert lap.feed_s == 0.0


def test_nothing_is_quiet_before_a_lap_begins_nor_at_its_end():
    driver = Dozing(step_s=0.001)
    driver.lap()
    driver.laps.ask(warm=3)
    assert driver.laps.quiet == 0
    for _ in range(3):
        driver.step()
    assert driver.laps.quiet == 33, "as many as a lap of watched steps has, but the last"
    driver.laps.paused(1.0)
    assert driver.laps.quiet == 0, "it begins anew"


class Saving(Driver):
    """Saves something behind the first step of each epoch, as scripts do."""

    def step(self, **settings):
        if self.place.window == 1:
            self.now += 0.2
        return super().step(**settings)


def test_laps_are_whole_epochs_where_these_are_short_and_have_few_windows():
    driver = Saving(step_s=0.02, epoch=16, few_windows=32)
    driver.lap()
    laps = [driver.lap() for _ in range(6)]
    assert all(lap.step_s == pytest.approx(0.02 + 0.2 / 16) for lap in laps)
    uneven = Saving(step_s=0.02, epoch=16)
    uneven.lap()
    assert len({round(uneven.lap().step_s, 4) for _ in range(6)}) > 1, "some laps have what is saved, others not"


@pytest.mark.parametrize(
    ("epoch", "step_s"), [(33, 0.02), (16, 0.2)], ids=["an epoch of many windows", "an epoch that takes long"]
)
def test_other_epochs_hold_several_laps(epoch, step_s):
    driver = Driver(step_s=step_s, epoch=epoch, few_windows=32)
    driver.lap()
    assert driver.lap().updates < 16


def test_a_whole_epoch_leaves_out_what_lies_between_it_and_the_next():
    driver = Driver(step_s=0.02, epoch=16, few_windows=32)
    driver.lap(evaluation_s=0.5)
    assert driver.lap(evaluation_s=0.5).step_s == pytest.approx(0.02)
