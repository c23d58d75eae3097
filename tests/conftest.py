"""Tests train under the job's own plan, unless they are about tuning: what a tuner does depends on the clock."""

import os

os.environ["HOTLAP_PLAN"] = "off"
