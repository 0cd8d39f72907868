"""Solo mode: one GPU acts as rank 0 of W, to measure kernels without peers and with a modelled link.

The model is a symmetric run: every peer does the same as this rank at the same time. What this rank stores in the slot
of rank 0 in the memory of peer q, rank W - q stores in its own slot in the memory of this rank. So the "memory" of peer
q is this rank's own buffer, shifted by W - q slots: kernels run unchanged, every byte that would go to a peer arrives
as the byte that a peer would have sent, and the memory traffic is that of a real run. Signals are set in separate words
and relayed to the words that the kernels wait for (``relay``), at the rate of a link.

The model fits kernels that treat all peers alike, and whose data and signals consist of W equal slots (OPERATORS).
"""

from tdkernels.solo.group import OPERATORS, SoloState, enter_solo_mode, solo_group, why_not_solo
from tdkernels.solo.workspace import SoloWorkspace

__all__ = ["OPERATORS", "SoloState", "SoloWorkspace", "enter_solo_mode", "solo_group", "why_not_solo"]
