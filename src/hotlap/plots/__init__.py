"""Pictures of trainings, searches and runs as SVG: files that need nothing else, and parts of a page.

`svg` draws marks, words and the frame of a picture; `axes` draws lines over axes. `trainings` and `searches` draw what
run folders keep, `bars` what only a report shows. All can be read on white and on black, in black and white, and by
people who see colours otherwise: series differ by mark or dash too.
"""

from __future__ import annotations

from hotlap.plots.axes import round_marks as round_marks
from hotlap.plots.searches import importance_bars as importance_bars
from hotlap.plots.searches import search_history as search_history
from hotlap.plots.trainings import confusion_picture as confusion_picture
from hotlap.plots.trainings import curves as curves
