"""Parts that scripts reach for."""

from datasets.utils import logging as logging
