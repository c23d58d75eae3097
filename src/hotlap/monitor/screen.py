"""A view of the machine and its trainings as lines of text that fit a terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotlap.core.terminal import clean
from hotlap.core.units import show_bytes, show_rate, show_seconds
from hotlap.machine.host import SWAPS
from hotlap.monitor.trainings import ENDED, KILLED, SILENT, Training

BARS = "▁▂▃▄▅▆▇█"
DONE, LEFT = "━", "╌"
PLAIN = str.maketrans({**dict(zip(BARS, "__..--**", strict=True)), DONE: "=", LEFT: "-", "·": "|", "°": " ", "…": "~",
                       "→": ">", "×": "x", "–": "-", "µ": "u"})  # fmt: skip
"""Signs for a terminal that shows ASCII only."""
LABEL = 13
"""Columns before what is said of a training."""
LEAST_WIDTH, MOST_BAR = 40, 40
MOST_ENTRIES = 3
"""Lines of the ledger that are shown where there is room."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The machine and its trainings at one moment."""

    at: float
    gpus: list[dict[str, Any]]
    gpu_why: str | None
    """Why there is no GPU to be read."""
    host: dict[str, Any]
    trainings: list[Training]
    process: dict[str, Any] | None = None
    """What can be seen from outside of a process that is no training of hotlap's."""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """It as JSON."""
        return {
            "at": self.at,
            "gpus": self.gpus,
            "gpu_error": self.gpu_why,
            "host": self.host,
            "trainings": [training.to_dict() for training in self.trainings],
            "process": self.process,
            "note": self.note,
        }


@dataclass(frozen=True)
class Line:
    """A line, and how it looks where a terminal has colours."""

    text: str
    style: str = field(default="")


def lines(view: View, width: int, height: int | None = None) -> list[Line]:
    """The view in lines of at most `width` columns, and at most `height` of them."""
    width = max(LEAST_WIDTH, width)
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    head = [Line(f"{'hotlap watch':<{width - len(clock)}}{clock}", "bold"), *_machine(view, width)]
    below = [*([Line(""), *_outside(view.process)] if view.process is not None else [])]
    below += [Line(""), *map(Line, textwrap.wrap(view.note, width))] if view.note else []
    room = None if height is None else height - len(head) - len(below)
    shown = [*head, *_trainings(view, width, room), *below]
    fitted = [part for line in shown for part in _cut(line, width)]
    return fitted if height is None or len(fitted) <= height else fitted[:height]


def spark(values: Sequence[float], width: int) -> str:
    """A curve in so many signs: the mean of the values that belong to each."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    parts = [values[n * len(values) // width : (n + 1) * len(values) // width] for n in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if high <= low:
        return BARS[0] * width
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)


# --- the machine ---------------------------------------------------------------------------------------------------


def _machine(view: View, width: int) -> Iterator[Line]:
    for gpu in view.gpus:
        yield from _gpu(gpu)
    if not view.gpus:
        yield Line(f"GPU    none to be seen: {view.gpu_why or 'the driver lists none'}")
    host = view.host
    parts = []
    if "cores_busy" in host:
        parts.append(f"{host['cores_busy']:.1f} of {host['cores']} cores")
    parts += [
        f"{what} {show_bytes(host[f'{name}_used_bytes'])} of {show_bytes(host[f'{name}_bytes'])}"
        for what, name in (("RAM", "ram"), ("shm", "shm"))
        if f"{name}_bytes" in host
    ]
    if (rate := host.get("swap_bytes_per_s", 0.0)) >= SWAPS:
        parts.append(f"swaps {show_bytes(rate)}/s")
    if "battery" in host:
        parts.append(f"on battery, {100 * host['battery']:.0f} %")
    if "disk_bytes" in host:
        parts.append(f"disk {show_bytes(host['disk_bytes'] - host['disk_used_bytes'])} free")
    yield from _joined("host   ", parts, width)


def _gpu(gpu: dict[str, Any]) -> Iterator[Line]:
    first = [f"GPU {gpu.get('index', 0)}  {clean(str(gpu.get('name', '')))}"]
    if "busy" in gpu:
        first.append(f"{100 * gpu['busy']:.0f} % busy")
    if "memory_used_bytes" in gpu and "memory_bytes" in gpu:
        first.append(f"{show_bytes(gpu['memory_used_bytes'])} of {show_bytes(gpu['memory_bytes'])}")
    if "power_w" in gpu:
        limit = f" of {gpu['power_limit_w']:.0f}" if "power_limit_w" in gpu else ""
        first.append(f"{gpu['power_w']:.0f}{limit} W")
    yield Line("  ".join(first), "bold")
    second = []
    if "sm_mhz" in gpu:
        most = f" of {gpu['most_sm_mhz']:,.0f}" if "most_sm_mhz" in gpu else ""
        second.append(f"{gpu['sm_mhz']:,.0f}{most} MHz")
    if "temperature_c" in gpu:
        second.append(f"{gpu['temperature_c']:.0f} °C")
    if "pcie_in_bytes_per_s" in gpu:
        second.append(f"PCIe {show_bytes(gpu['pcie_in_bytes_per_s'])}/s in")
    if gpu.get("others"):
        second.append(_counted(gpu["others"], "process", "processes"))
    if gpu.get("throttled"):
        second.append(f"clocks lowered: {', '.join(gpu['throttled'])}")
    if second:
        yield Line(f"       {'  '.join(second)}", "yellow" if gpu.get("throttled") else "")


# --- trainings -----------------------------------------------------------------------------------------------------


def _trainings(view: View, width: int, room: int | None) -> Iterator[Line]:
    """As many trainings as there is room for; where there is little, with fewer lines of their ledgers."""
    blocks = [[Line(""), *_training(training, width, MOST_ENTRIES)] for training in view.trainings]
    if room is not None and sum(map(len, blocks)) > room:
        blocks = [[Line(""), *_training(training, width, 1)] for training in view.trainings]
    taken = 0
    for number, block in enumerate(blocks):
        rest = len(blocks) - number
        # A last line says how many are left out.
        if room is not None and taken + len(block) + (rest > 1) > room:
            yield from block[: max(0, room - taken - 1)] if number == 0 else ()
            left = rest - (number == 0)
            if left:
                yield Line(f"and {left} more training{'s' if left > 1 else ''}: `hotlap watch RUN`, --once, --json")
            return
        yield from block
        taken += len(block)


def _training(training: Training, width: int, entries: int) -> Iterator[Line]:
    kind, name, device = (training.text(one) for one in ("kind", "name", "device"))
    what = f"{name} on {device}" if device else name
    yield Line(f"{training.folder}  pid {training.state['pid']}  {kind}  {what}", "bold cyan")
    yield from _place(training, width)
    if training.is_open:
        yield from _pace(training, width)
    yield from _loss(training, width)
    if training.is_open:
        yield from _memory(training)
        yield from _bound(training, width)
    yield from _ledger(training, width, entries)


def _place(training: Training, width: int) -> Iterator[Line]:
    step, steps, unit = training.number("step") or 0, training.number("steps"), training.text("unit") or "steps"
    place = f"{step:,.0f}{f' of {steps:,.0f}' if steps else ''} {unit}"
    ago = show_seconds(round(max(0.0, time.time() - training.state["at"])))
    if training.status == ENDED:
        took = training.number("elapsed_s")
        words = [training.text("stopped") or "done", place, *([show_seconds(took)] if took else [])]
        yield Line(_labelled("ended", " · ".join(words)))
        return
    if training.status == KILLED:
        yield Line(_labelled("gone", f"its process was killed or crashed, last seen {ago} ago, at {place}"), "red")
        yield Line(_labelled("", f"go on with: hotlap resume {training.folder}"))
        return
    if training.status == SILENT:
        yield Line(_labelled("silent", f"nothing heard for {ago}: it is stopped, or hangs; at {place}"), "red")
        return
    share = max(0.0, min(1.0, step / steps)) if steps else None
    bar = (
        ""
        if share is None
        else f"  {_bar(share, min(MOST_BAR, max(4, width - LABEL - len(place) - 26)))} {100 * share:.0f} %"
    )
    epoch, epochs = training.number("epoch"), training.number("epochs")
    where = f"  epoch {epoch:.0f} of {epochs:.0f}" if epoch and epochs else ""
    doing = training.text("doing") or "training"
    yield Line(_labelled(doing, f"{place}{bar}{where}"), "green")


def _pace(training: Training, width: int) -> Iterator[Line]:
    unit, rate, samples = (training.text("unit") or "steps"), *map(training.number, ("steps_per_s", "samples_per_s"))
    left, elapsed = training.number("left_s"), training.number("elapsed_s")
    parts = [
        *([f"{show_rate(rate)} {unit}/s"] if rate else []),
        *([f"{show_rate(samples)} samples/s"] if samples else []),
        *([f"{show_seconds(left)} left"] if left is not None else []),
        *([f"{show_seconds(elapsed)} so far"] if elapsed is not None else []),
        *(["tuning"] if training.state.get("is_tuning") is True else []),
    ]
    yield from _joined(_labelled("pace", ""), parts, width)


def _loss(training: Training, width: int) -> Iterator[Line]:
    points = training.state.get("losses")
    losses = [point[1] for point in points if _is_point(point)] if isinstance(points, list) else []
    named = training.part("metrics") or training.part("best")
    passed = ("step", "epoch", "samples", "lr", "elapsed_s", "trial")
    scores = [f"{clean(name)} {value:.4g}" for name, value in named.items() if name not in passed and _is_number(value)]
    if losses:
        head = f"{losses[-1]:.4g}  "
        yield Line(_labelled("loss", head + spark(losses, width - LABEL - len(head))))
    if scores:
        yield from _joined(_labelled("last", ""), scores, width)


def _memory(training: Training) -> Iterator[Line]:
    gpus = training.part("sample").get("gpus")
    parts = (
        training.part("sample", "torch"),
        training.part("sample", "host"),
        gpus[0] if isinstance(gpus, list) and gpus else {},
    )
    torch, host, gpu = (_numbers(part) for part in parts)
    if torch and {"memory_bytes", "memory_used_bytes"} <= set(gpu):
        # What torch keeps and no tensor uses is free for this training.
        spare = torch.get("reserved_bytes", 0) - torch.get("allocated_bytes", 0)
        free = max(0, gpu["memory_bytes"] - gpu["memory_used_bytes"] + spare)
        held, peak = show_bytes(torch.get("allocated_bytes", 0)), show_bytes(torch.get("peak_bytes", 0))
        yield Line(_labelled("memory", f"{held} in tensors, {peak} at the peak, {show_bytes(free)} of the GPU free"))
    elif {"own_ram_bytes", "ram_bytes"} <= set(host):
        free = host["ram_bytes"] - host.get("ram_used_bytes", 0)
        yield Line(_labelled("memory", f"{show_bytes(host['own_ram_bytes'])} of RAM, {show_bytes(free)} free"))


def _bound(training: Training, width: int) -> Iterator[Line]:
    bound, reached = training.part("bound"), training.part("headway")
    if isinstance(bound.get("by"), str):
        yield from _wrapped("bound by", f"{bound['by']}: {bound.get('why')}", width, "yellow")
        if isinstance(bound.get("answer"), str):
            yield from _wrapped("", f"→ {bound['answer']}", width)
    if isinstance(reached.get("line"), str):
        yield from _wrapped("reaches", reached["line"], width)


def _ledger(training: Training, width: int, most: int) -> Iterator[Line]:
    entries = training.state.get("ledger")
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    for number, entry in enumerate(found[-most:]):
        ratio = f" {entry['ratio']:.3g}x" if _is_number(entry.get("ratio")) else ""
        why = f": {entry['why']}" if entry.get("why") else ""
        step = entry["step"] if _is_number(entry.get("step")) else 0
        words = f"{step:,} {entry.get('outcome')}  {entry.get('what')}{ratio}{why}"
        yield Line(_labelled("" if number else "ledger", words))


# --- a process that is no training of hotlap's ---------------------------------------------------------------------


def _outside(process: dict[str, Any]) -> Iterator[Line]:
    yield Line(f"process {process['pid']}  {process['command']}", "bold cyan")
    if "why" in process:
        yield Line(_labelled("unseen", process["why"]))
        return
    children = process["children"]
    held = f" with {show_bytes(process['children_ram_bytes'])}"
    worker_words = f", {_counted(children, 'child process', 'child processes')}{held}" if children else ""
    threads = _counted(process["threads"], "thread", "threads")
    yield Line(_labelled("running", f"for {show_seconds(process['seconds'])}, {threads}"))
    yield Line(_labelled("work", f"{process['cores_busy']:.2f} cores"))
    yield Line(_labelled("memory", f"{show_bytes(process['ram_bytes'])} of RAM{worker_words}"))
    gpus = ", ".join(f"GPU {index}" for index in process["gpus"])
    yield Line(_labelled("on", gpus or "no GPU, as far as the driver lists its processes"))


# --- signs ---------------------------------------------------------------------------------------------------------


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{LABEL - 2}}{text}"


def _bar(share: float, width: int) -> str:
    done = round(share * width)
    return DONE * done + LEFT * (width - done)


def _joined(head: str, parts: Iterable[str], width: int) -> Iterator[Line]:
    """Parts beside each other, and below where a line is full."""
    line, indent = head, " " * len(head)
    for part in parts:
        if len(line) > len(head) and len(line) + len(part) + 2 > width:
            yield Line(line)
            line = indent
        line += part if line in (head, indent) else f"  {part}"
    if line.strip() and line != head:
        yield Line(line)


def _wrapped(label: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    head = _labelled(label, "")
    for part in textwrap.wrap(clean(text), width, initial_indent=head, subsequent_indent=" " * LABEL):
        yield Line(part, style)


def _cut(line: Line, width: int) -> Iterator[Line]:
    text = clean(line.text)
    yield Line(text if len(text) <= width else f"{text[: width - 1]}…", line.style)


def _numbers(value: object) -> dict[str, Any]:
    """The numbers in an object that may be a stranger's."""
    return {name: one for name, one in value.items() if _is_number(one)} if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_point(point: object) -> bool:
    return isinstance(point, list) and len(point) == 2 and _is_number(point[1])
