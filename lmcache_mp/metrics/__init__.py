"""The parent's side of measuring: from a phase's arrays to a report. Never imported by workers."""

from lmcache_mp.metrics.formats import Section, check_format, check_width
from lmcache_mp.metrics.phase import PhaseData
from lmcache_mp.metrics.report import Handler, Metrics

__all__ = ["Handler", "Metrics", "PhaseData", "Section", "check_format", "check_width"]
