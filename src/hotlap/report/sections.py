"""A report of a run: the headline, and its sections in their order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from hotlap.core.table import rows
from hotlap.core.terminal import clean
from hotlap.core.units import show_seconds
from hotlap.plots.trainings import NO_METRICS
from hotlap.report.checks import LOOK, OK, checks_of
from hotlap.report.document import Block, Cell, Checklist, Code, Report, Section, Table, Text, Tile, score, seconds
from hotlap.report.other_gpus import on_other_gpus
from hotlap.report.reading import (
    MANY,
    RECIPE,
    SCRIPT,
    SEARCH,
    TREES,
    RunFiles,
    Training,
    began_s,
    listing,
    mapping,
    number,
    words,
)
from hotlap.report.recipe_sections import Judged, judged, mistakes, scores, search
from hotlap.report.settings_sections import files, repeating, settings
from hotlap.report.training_sections import (
    ROUND,
    curves,
    interval_words,
    moves,
    pace,
    phases_chart,
    phases_of,
    ratio_words,
    speed_tiles,
    total_of,
)
from hotlap.report.usage_sections import usage

MOST_SAID, MOST_SHOWN = 60, 8
BESIDE = {SCRIPT: "the script by itself", TREES: "one booster after the other"}
"""What a run is compared with."""


def report_on(run: RunFiles, against: Sequence[RunFiles] = ()) -> Report:
    """The report of a run; its learning curves have the band of the runs that it is held `against`."""
    others = [training for one in against for training in one.trainings[:1]]
    shown = run.trainings[:MOST_SHOWN]
    models = [one for one in shown if one.path.parent.name != "folds"]
    closely = models[:1] if run.kind == MANY else models
    measured = [*([run.whole] if run.whole is not None else []), *closely]
    rules = mapping(run.scores.get("baselines"))
    found = [
        Section(
            key="moves",
            title="What was tried, and what it gave",
            blocks=_each(measured, moves),
        ),
        Section(key="curves", title="Learning curves", blocks=curves(models, rules, others)),
        Section(key="jobs", title="Trainings", blocks=_jobs(run)),
        Section(key="scores", title="Scores beside simple rules", blocks=scores(run)),
        Section(key="mistakes", title="Where it is wrong", blocks=mistakes(run)),
        Section(key="search", title="Trials", blocks=search(run.search)),
        Section(key="pace", title="Step times", blocks=_each(closely, pace)),
        Section(key="usage", title="GPU and host over time", blocks=_each(closely, usage)),
        Section(key="phases", title="Phases", blocks=_phases(run)),
        Section(key="gpus", title="On other GPUs", blocks=_each(closely, on_other_gpus)),
        Section(key="reuse", title="First and later run", blocks=_reuse(run)),
        Section(key="data", title="The data, as hotlap read it", blocks=_said(run)),
        Section(key="settings", title="Settings and versions", blocks=settings(run)),
        Section(key="files", title="Files", blocks=files(run)),
        Section(key="checklist", title="Checklist", blocks=_checklist(run)),
        Section(key="repeat", title="Repeat it", blocks=repeating(run)),
    ]
    if run.kind == SEARCH:  # its trials come first
        found.sort(key=lambda part: part.key != "search")
    headline, lead = headline_of(run)
    began = began_s(run.path)
    return Report(
        name=run.name,
        kind=kind_words(run),
        headline=headline,
        lead=lead,
        tiles=_tiles(run),
        sections=[part for part in found if part.blocks],
        began=datetime.fromtimestamp(began).astimezone().strftime("%Y-%m-%d %H:%M") if began else "",
        is_live=run.is_live and not run.is_finished,
    )


def kind_words(run: RunFiles) -> str:
    """What kind of run it is: a recipe by its name."""
    if run.kind == RECIPE:
        return f"recipe {words(run.options.get('recipe'))}" if run.options.get("recipe") else RECIPE
    return {SCRIPT: "hotlap run", SEARCH: "search", TREES: "trees", MANY: "fit_many"}.get(run.kind, "fit")


def _each(trainings: Sequence[Training], made: Any) -> list[Block]:
    """The blocks of each training; with their names where there are several."""
    return [block for training in trainings for block in made(training, training.name if len(trainings) > 1 else "")]


# --- headline ------------------------------------------------------------------------------------------


def headline_of(run: RunFiles) -> tuple[str, list[str]]:
    """What a run came to in one line, and the lines below it."""
    first = run.trainings[0] if run.trainings else None
    speed = _speed(run, first)
    scored = score_words(run)
    lead: list[str] = []
    if run.kind in (RECIPE, SEARCH, MANY):
        headline, below = scored or _unfinished(run), speed
    else:
        headline, below = speed or scored or _unfinished(run), scored if speed else ""
    lead += [line for line in (_whole(run, first), below) if line]
    if beaten := listing(run.state.get("beaten_by")):
        lead.insert(0, f"No model is better than {' or '.join(map(words, beaten))}.")
    if headline and not run.is_finished and headline != _unfinished(run):
        lead.append(_unfinished(run))
    return headline, lead


def _whole(run: RunFiles, training: Training | None) -> str:
    """What tuning did for the whole run, its own cost included."""
    if training is None:
        return ""
    if training.result.get("headline"):
        return f"The whole script: {words(training.result['headline'])}."
    saved, took = number(total_of(training.ledger).get("saved_s")), number(training.ended.get("total_s"))
    if saved is None or took is None or took <= 0 or took + saved <= 0:
        return ""
    ratio = ratio_words((took + saved) / took)
    whose = f"training {training.name}" if len(run.trainings) > 1 else "whole run"
    return f"The {whose} took {show_seconds(took)}, without tuning about {show_seconds(took + saved)}: {ratio} as fast."


def _unfinished(run: RunFiles) -> str:
    if run.is_finished:
        return "Trained to its end."
    return "It still runs." if run.is_live else "It did not come to its end."


def _speed(run: RunFiles, training: Training | None) -> str:
    """How many times as fast a step became, with what stayed the same; or that nothing changed."""
    if training is None or training.ledger is None:
        return ""
    found = rows(training.ledger)
    kept = [row for row in found if row.outcome == "kept"]
    total = total_of(training.ledger)
    ratio = number(total.get("ratio"))
    whose = f" in {training.name}" if len(run.trainings) > 1 else ""
    if kept and ratio is not None:
        between = interval_words(number(total.get("low")), number(total.get("high")))
        unit = "round" if run.kind == TREES else "step"
        beside = BESIDE.get(run.kind, "under the plan it began with")
        same = _same(kept)
        said = f"{ratio_words(ratio)} {between} as fast a {unit}{whose} as {beside}{same}".replace("  ", " ")
        if (number(total.get("saved_s")) or 0.0) < 0:
            return f"No faster as a whole: tuning cost more than it saved. Since then {said}"
        return said
    tried = {row.what for row in found if row.outcome in ("rejected", "undecided")}
    if tried:
        return f"Left as it was{whose}: {len(tried)} move{'s' if len(tried) > 1 else ''} tried, none kept"
    return f"Left as it was{whose}: nothing was tried" if any(row.outcome == "not tried" for row in found) else ""


def _same(kept: Sequence[Any]) -> str:
    """What the kept moves leave as it is, where all of them say so."""
    for what in ("same maths", "same trees"):
        if all(what in row.why for row in kept):
            return f"; the {what}"
    return ""


def score_words(run: RunFiles) -> str:
    """The score of a run, in words; empty where it has none."""
    if run.kind == RECIPE:
        by = judged(run.scores, run.options.get("recipe"))
        return "" if by is None else _recipe_score(run, by)
    if run.search:
        best = best_trial(run)
        value = number(best.get("score"))
        if value is None:
            return ""
        chosen = ", ".join(f"{words(name)} {_short(one)}" for name, one in mapping(best.get("values")).items())
        trials = len(listing(run.search.get("trials")))
        return f"{words(run.search.get('monitor'))} {value:.4g} with {chosen}: the best of {trials:,} trials"
    if run.kind == MANY:
        spread = [f"{name} {low:.4g} to {high:.4g}" for name, low, high in _spread(run)[:3]]
        return f"{len(run.trainings):,} trainings: {', '.join(spread)}" if spread else ""
    first = run.trainings[0] if run.trainings else None
    record = best_record(first) if first is not None else {}
    figures = {name: number(value) for name, value in record.items() if name not in (*NO_METRICS, ROUND)}
    shown = {name: value for name, value in figures.items() if value is not None}
    for name in ("valid_loss", "train_loss"):
        value = number(record.get(name))
        if value is not None and (name == "valid_loss" or not shown):
            shown[name.replace("_", " ").replace("valid", "validation").replace("train ", "training ")] = value
    return ", ".join(f"{words(name)} {value:.4g}" for name, value in shown.items())


def best_trial(run: RunFiles) -> dict[str, Any]:
    """The best trial of a search."""
    trials = [mapping(one) for one in listing(run.search.get("trials"))]
    return next((trial for trial in trials if trial.get("number") == (run.search.get("best") or ())), {})


def _spread(run: RunFiles) -> list[tuple[str, float, float]]:
    """The lowest and the highest of each score over all trainings."""
    records = [best_record(one) for one in run.trainings]
    names = dict.fromkeys(name for record in records for name in (*record, "valid_loss") if name not in NO_METRICS[:3])
    left = ("train_loss", "lr", "elapsed_s", "samples", ROUND)
    found = []
    for name in names:
        values = [value for record in records if (value := number(record.get(name))) is not None]
        if values and name not in left:
            found.append((words(name), min(values), max(values)))
    return sorted(found, key=lambda one: one[0] == "valid_loss")


def _recipe_score(run: RunFiles, by: Judged) -> str:
    models, rules = mapping(run.scores.get("models")), mapping(run.scores.get("baselines"))
    best, rule = by.best(models), by.best(rules)
    if best is None:
        return ""
    beside = f"; the best simple rule {rule[1]:.4g} ({words(rule[0])})" if rule is not None else ""
    return f"{by.words} {best[1]:.4g} by {words(best[0])}{beside}"


def _short(value: object) -> str:
    found = number(value)
    return f"{found:.4g}" if found is not None else words(value)[:60]


def best_record(training: Training) -> dict[str, Any]:
    """The evaluation whose weights the model has; the last one where the files do not say."""
    step = training.ended.get("best_step")
    found = [record for record in training.history if step is not None and record.get("step") == step]
    return found[-1] if found else training.history[-1] if training.history else {}


# --- tiles ---------------------------------------------------------------------------------------------


def _tiles(run: RunFiles) -> list[Tile]:
    tiles: list[Tile] = []
    first = next((training for training in run.trainings if training.path.parent.name != "folds"), None)
    if first is not None:
        tiles += [Tile(name=name, words=said, note=note) for name, said, note in speed_tiles(first)]
    if run.kind == RECIPE and (by := judged(run.scores, run.options.get("recipe"))) is not None:
        best = by.best(mapping(run.scores.get("models")))
        if best is not None:
            tiles.insert(0, Tile(name=by.words, words=f"{best[1]:.4g}", note=f"of {words(best[0])}"))
    took = time_of(run)
    if took is not None:
        tiles.append(Tile(name="Time", words=show_seconds(took), note="from start to end"))
    checks = checks_of(run)
    look = sum(check.outcome == LOOK for check in checks)
    note = f"{look} to look at" if look else "all right"
    tiles.append(
        Tile(name="Checklist", words=f"{sum(check.outcome == OK for check in checks)} of {len(checks)}", note=note)
    )
    return tiles


def time_of(run: RunFiles) -> float | None:
    """Seconds from start to end, as far as the files say."""
    if run.kind == RECIPE:
        spent = [found for _, found in _recipe_phases(run)]
        return sum(spent) if spent else None
    if run.kind == SEARCH:
        known = [number(mapping(one).get("seconds")) for one in listing(run.search.get("trials"))]
        return sum(one for one in known if one is not None) or None
    first = run.trainings[0] if run.trainings else None
    if first is None or run.kind == MANY:
        return None
    return number(first.ended.get("total_s")) or number(first.result.get("took_s"))


# --- sections ------------------------------------------------------------------------------------------


def _phases(run: RunFiles) -> list[Block]:
    blocks: list[Block] = []
    if whole := _recipe_phases(run):
        blocks.append(phases_chart(whole))
    if run.kind == SCRIPT and run.trainings:
        blocks += [phases_chart(parts)] if (parts := _script_phases(run.trainings[0])) else []
    rest = [(training, parts) for training in run.trainings[:MOST_SHOWN] if (parts := phases_of(training))]
    if len(rest) == 1 and not blocks:
        return [phases_chart(rest[0][1])]
    if rest:
        names = list(dict.fromkeys(name for _, parts in rest for name, _ in parts))
        listed: list[tuple[Cell, ...]] = [
            (one.name, *(seconds(dict(parts).get(name)) for name in names)) for one, parts in rest
        ]
        blocks.append(Table(title="Phases of each training", head=("training", *names), rows=listed))
    return blocks


def _recipe_phases(run: RunFiles) -> list[tuple[str, float]]:
    known = [(words(name), number(spent)) for name, spent in mapping(run.scores.get("phases")).items()]
    return [(name, spent) for name, spent in known if spent is not None and spent > 0]


def _script_phases(training: Training) -> list[tuple[str, float]]:
    """hotlap's start, tuning, updates, and all else that the script does."""
    took, start = number(training.result.get("took_s")), number(training.result.get("start_s"))
    steps = number(training.result.get("training_s"))
    tuning = number(total_of(training.ledger).get("cost_s")) or 0.0
    if took is None or steps is None:
        return []
    known = [("start of hotlap", start or 0.0), ("tuning", tuning), ("updates", max(0.0, steps - tuning))]
    rest = took - sum(spent for _, spent in known)
    return [(name, spent) for name, spent in (*known, ("the rest of the script", rest)) if spent > 0]


def _reuse(run: RunFiles) -> list[Block]:
    """What came from the cache, and what that saved."""
    blocks: list[Block] = []
    models = {name: mapping(said) for name, said in mapping(run.scores.get("models")).items()}
    kept = [
        (words(name), number(said.get("train_s"))) for name, said in models.items() if said.get("from_cache") is True
    ]
    said = [words(line) for line in listing(run.scores.get("said")) if "saved" in str(line) and "cache" in str(line)]
    if kept:
        table = Table(title="From the cache", head=("model", "training saved"), rows=[(n, seconds(s)) for n, s in kept])
        blocks += [Text("These models were trained before on the same data, code and settings."), table]
    blocks += [Text(line) for line in said[:20]]
    for training in run.trainings if run.kind != RECIPE else ():
        if "cache" in str(training.ended.get("stopped")):
            blocks.append(Text("The model was trained before and came from the cache."))
    if run.kind == RECIPE and run.scores and not blocks:
        blocks.append(Text("A first run: nothing came from the cache. The same command again reads what it made."))
    return blocks


def _jobs(run: RunFiles) -> list[Block]:
    """The scores of trainings that belong together."""
    if run.kind != MANY:
        return []
    names = [name for name, *_ in _spread(run)]
    rows: list[tuple[Cell, ...]] = [
        (
            training.name,
            *(score(number(best_record(training).get(name))) for name in names),
            seconds(number(training.ended.get("total_s"))),
            words(training.ended.get("stopped") or "not ended"),
        )
        for training in run.trainings
    ]
    return [Table(title="Trainings", head=("training", *names, "time", "ended"), rows=rows)]


def _said(run: RunFiles) -> list[Block]:
    """What a recipe said before it trained."""
    lines = [clean(line[:300]) for line in listing(run.scores.get("said"))[:MOST_SAID] if isinstance(line, str)]
    return [Code("\n".join(lines))] if lines else []


def _checklist(run: RunFiles) -> list[Block]:
    checks = checks_of(run)
    return [Checklist(checks)] if checks else []
