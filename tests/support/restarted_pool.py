"""A pool of ranks for programs whose ranks are killed or hang."""

from tdkernels.launch import RankPool


class RestartedPool:
    """A RankPool that is started by its first run, and again when it has broken.

    Args:
        world_size: The number of ranks.
        device: As for RankPool.
        grace_s: As for RankPool.
    """

    def __init__(self, world_size, device, grace_s=20.0):
        self.world_size, self._device, self._grace_s, self._pool = world_size, device, grace_s, None

    def run(self, function, *args, timeout_s):
        """Return the results of all ranks, or raise RankError."""
        if self._pool is None or not self._pool.usable:
            self._pool = RankPool(self.world_size, self._device, grace_s=self._grace_s)
        self._pool.timeout_s = timeout_s
        return self._pool.run(function, *args)

    def close(self):
        if self._pool is not None:
            self._pool.close()
