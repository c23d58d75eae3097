"""The sections on what a run was made with, what it left, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hotlap.core.units import show_bytes
from hotlap.report.document import Block, Code, Table, Text, size
from hotlap.report.reading import RunFiles, Training, artefacts, listing, mapping, number, words


def settings(run: RunFiles) -> list[Block]:
    """Plan, settings, versions and machine."""
    blocks: list[Block] = []
    first = run.trainings[0] if run.trainings else None
    plans = [(training.name, plan_words(training)) for training in run.trainings if plan_words(training)]
    if plans:
        blocks.append(Table(title="Plan at the end", head=("training", "plan at the end"), rows=plans))
    options = {name: value for name, value in run.options.items() if value not in ("", None, [])}
    if options:
        listed = [(name, words(value)) for name, value in options.items()]
        blocks.append(Table(title="Options", head=("option", "value"), rows=listed))
    if first is None:
        return blocks
    job = {name: value for name, value in first.job.items() if value is not None}
    if job and not options:
        listed = [(words(name), words(value)) for name, value in job.items()]
        blocks.append(Table(title="Settings", head=("setting", "value"), rows=listed))
    environment = first.environment
    if environment:
        listed = [(name, words(value)) for name, value in mapping(environment.get("versions")).items() if value]
        listed += _machine(environment)
        blocks.append(Table(title="Versions and machine", head=("", "value"), rows=listed))
    return blocks


def plan_words(training: Training) -> str:
    if training.tree_plan:
        return " · ".join(f"{words(name)} {words(value)}" for name, value in training.tree_plan.items())
    return str(training.plan) if training.plan is not None else ""


def _machine(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for gpu in listing(environment.get("gpus")):
        said = mapping(gpu)
        memory = number(said.get("memory_bytes"))
        name = words(said.get("name"))
        found.append(("GPU", f"{name}, {show_bytes(memory)}" if memory else name))
    if not found:
        found.append(("GPU", "none"))
    cpu, memory = mapping(environment.get("cpu")), number(environment.get("memory_bytes"))
    if cpu:
        found.append(("CPU", f"{words(cpu.get('cores'))} cores of {words(cpu.get('model'))}"))
    if memory:
        found.append(("memory", show_bytes(memory)))
    found += [(words(name), words(value)) for name, value in mapping(environment.get("variables")).items()]
    return found


def files(run: RunFiles) -> list[Block]:
    """The files that the run left."""
    found = artefacts(run.path)
    listed = [(name, size(taken), about) for name, taken, about in found]
    whole = sum(taken for _, taken, _ in found)
    table = Table(title="Files", head=("file", "size", "what it is"), rows=listed)
    return [Text(f"{len(found)} files and folders, {show_bytes(whole)} in all."), table] if found else []


def repeating(run: RunFiles) -> list[Block]:
    """The commands that repeat the run, as far as its files say."""
    where = shlex.quote(str(run.path))
    if run.options.get("recipe"):
        recipe = shlex.quote(words(run.options["recipe"]))
        return [Code(f"hotlap train {recipe} --options {where}/options.toml --out NEW")]
    started = run.trainings[0].started.get("words") if run.trainings else None
    said = [words(one) for one in started] if isinstance(started, list) else []
    if not said:
        return []
    if said[0] == "hotlap":
        line = shlex.join(said)
        replay: list[Block] = [
            Text("With the plans that this run found, and no tuning:"),
            Code(f"{line} --plan {where}"),
        ]
        return [Code(line), *(replay if said[1:2] == ["demo"] else [])]
    return [Code(f"python {shlex.join(said)}")]
