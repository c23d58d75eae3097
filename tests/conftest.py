"""Tests train under the job's own plan, unless they are about tuning: what a tuner does depends on the clock.

Nor does a property test depend on it: on a busy machine drawing examples may take long.
"""

import os

os.environ["HOTLAP_PLAN"] = "off"

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests for a GPU do without it
    pass
else:
    settings.register_profile("hotlap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("hotlap")
