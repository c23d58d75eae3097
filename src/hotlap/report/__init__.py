"""The report of a run: one page that people can read and share, from the files of its folder alone.

`reading` finds out what kind of run a folder holds and reads it; it may be a stranger's. `document` is a report as a
value: sections of text, figures, tables and pictures. `sections` makes one of a run; the other files of sections have
its parts, `checks` its checklist. `rendering` writes it as HTML, Markdown or JSON. `runs` lists
the runs of a folder, `comparing` tells differences from noise, `serving` shows all of it in a browser. `by_hand` has
what a run changed as the lines one would write, with the places that `source` finds in a script. Nothing here imports
torch.
"""

from __future__ import annotations

from pathlib import Path

from hotlap.report.document import Report as Report


def report_of(folder: str | Path) -> Report:
    """The report of a run's folder. Raises StoreError where it is none."""
    from hotlap.report.reading import read_run
    from hotlap.report.sections import report_on

    return report_on(read_run(Path(folder)))


def write_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the report of a run as HTML into its folder, or where `path` says: its ending decides the format.

    Raises StoreError for a file that hotlap did not write.
    """
    from hotlap.report.rendering import PAGE, write

    return write(report_of(folder), Path(folder) / PAGE if path is None else Path(path))
