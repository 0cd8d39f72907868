"""The group of solo mode: its peers do not exist and agree with everything."""

from collections.abc import Sequence

import torch.distributed as dist

from tdkernels.runtime import gpu
from tdkernels.solo.workspace import SoloWorkspace
from tdkernels.symm.group import GroupState, states
from tdkernels.symm.topology import Topology

OPERATORS = "ag_gemm", "gemm_ar", "gemm_rs"  # not "forward" of gemm_ar, nor "one_shot" of gemm_rs unless inexact


class SoloState(GroupState):
    """GroupState of rank 0 of W ranks in solo mode.

    Attributes:
        link_rate: Bytes per second at which data arrives; None: at once.
        inexact: Whether kernels may run whose results are not exact in solo mode.
    """

    workspace_class = SoloWorkspace
    has_link = False
    inexact = False

    def __init__(self, group, prefix="tdkernels"):
        super().__init__(group, prefix)
        self._topology = Topology(self.rank, self.world_size, self.world_size)

    def exchange(self, operator: str, text: str) -> list[str]:
        return [text] * self.world_size

    def expect_new_kernels(self) -> None:
        """Run the next launch of each workspace and plan without a relay, because it may load a kernel.

        Loading a kernel waits for running kernels, and a relay would wait for the loaded one.
        """
        for workspace in self.workspaces.values():
            workspace.expect_new_kernels()


def why_not_solo(operators: Sequence[str], world_size: int | None, gbps: float | None) -> str | None:
    """Return the reason why the options --solo and --link of a command make no sense, or None."""
    if world_size is None:
        return None if gbps is None else "--link is for --solo"
    unsupported = [name for name in operators if name not in OPERATORS]
    if unsupported:
        return f"--solo supports {', '.join(OPERATORS)}, not {', '.join(unsupported)}"
    if world_size < 2:
        return f"--solo must be at least 2 ranks, not {world_size}"
    if gbps is not None and not gbps > 0:
        return f"--link must be more than 0 GB/s, not {gbps:g}"
    return None


def enter_solo_mode(world_size: int, link_rate: float | None = None, inexact: bool = False) -> None:
    """Make a rank of a ``RankPool`` leave its group and call ``solo_group`` with the same arguments."""
    dist.destroy_process_group()
    solo_group(world_size, link_rate, inexact)


def solo_group(world_size: int, link_rate: float | None = None, inexact: bool = False) -> dist.ProcessGroup:
    """Return a group of ``world_size`` ranks in solo mode. It becomes the default group of this process.

    torch's collectives do not communicate in this group, and their results are meaningless. So method "torch" of the
    operators raises NotImplementedError.

    Args:
        world_size: The number of ranks, W.
        link_rate: Bytes per second at which this rank receives; None: data arrives at once.
        inexact: Also run "one_shot" of ``gemm_rs``, to time it. A call with new operands may have a wrong result,
            because the rows of mirror images belong to other tiles than their signals.

    Raises:
        ValueError: If ``world_size`` is less than 2, or ``link_rate`` is not positive.
        RuntimeError: If the process has a default group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if world_size < 2:
        raise ValueError(f"world_size must be at least 2, not {world_size}")
    if link_rate is not None and not link_rate > 0:
        raise ValueError(f"link_rate must be positive, not {link_rate}")
    if dist.is_initialized():
        raise RuntimeError("solo mode needs a process of its own, without torch.distributed.init_process_group")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    gpu.spare_sms = 1  # for the relay, and for copies within the GPU, which may be kernels
    group = dist.group.WORLD
    assert group is not None
    states[group] = state = SoloState(group)
    state.link_rate, state.inexact = link_rate, inexact
    return group
