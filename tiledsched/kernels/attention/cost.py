"""What an attention problem and its schedules cost: see :mod:`tiledsched.kernels.attention.model`, which needs NumPy."""

from __future__ import annotations

from tiledsched.core.cost import Cost
from tiledsched.core.device import ArchSpec
from tiledsched.core.problem import Problem
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention.problem import hidden_keys, padding_keys


class AttentionCost(Cost):
    """The traffic of the keys that are seen, and a model of pipes, placement of blocks and memory (docs/model.md)."""

    def bytes_moved(self, p: Problem) -> int:
        """Least device-memory traffic in bytes. Keys and values that no row sees are not read."""
        key_bytes = p.kv_heads * (p.head_dim + p.value_columns) * p.element_bytes
        unread = (hidden_keys(p) + padding_keys(p)) * p.sequences * key_bytes
        return super().bytes_moved(p) - int(unread)

    def expected(self, p: Problem, s: Schedule, spec: ArchSpec) -> ResourceFacts:
        """The resources of machine code that was not built: four tiles in flight, and the registers that the occupancy leaves."""
        from tiledsched.kernels.attention.model import expected_facts

        return expected_facts(p, s, spec)

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds. Only the order of estimates counts."""
        from tiledsched.kernels.attention.model import estimate_us

        return estimate_us(p, s, facts, spec)
