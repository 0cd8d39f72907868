"""Problems of a fault campaign: operators that must run warp-specialized kernels."""

import torch.distributed as dist

from tests.chaos import specialized
from tests.chaos.base import BF16
from tests.chaos.dense_problems import Dense
from tests.chaos.expert_problems import TensorParallelExperts
from tests.ops.dense.cases import config_for


class Specialized:
    """A problem whose forward must run warp-specialized kernels; ``check`` fails if others ran.

    Attributes:
        kernels: their names.
        splits: whether they must split tiles along K.
    """

    kernels, splits = (), False

    def steps(self, backward):
        steps = super().steps(backward)
        with specialized.gluon_launches() as self.launched:
            next(steps)
        yield
        yield from steps

    def check(self):
        self._check_kernels()
        super().check()

    def _check_kernels(self):
        expected = {(name, self.splits) for name in self.kernels}
        launched = {(name, num_splits > 1) for name, num_splits in self.launched}
        assert launched == expected, f"kernels and whether they split K: {launched}, not {expected}"


class SpecializedDense(Specialized, Dense):
    def __init__(self, operator, changes, shape, seed, group):
        fields, self.splits = changes
        self.kernels = (f"{operator}_specialized_kernel",)
        sizes = specialized.shape_of(operator, self.splits, shape, dist.get_world_size())
        self.case = specialized.SparseCase(operator, *sizes, seed)
        self.options = {"config": config_for(self.case, **fields)}
        self.group, self.results = group, {}


class SpecializedExperts(Specialized, TensorParallelExperts):
    SHAPES, DTYPE = specialized.EXPERTS_SHAPES, BF16
    kernels = "moe_ag_gemm_specialized_kernel", "moe_gemm_rs_specialized_kernel"
    tolerance = 0.1  # torch in bf16 is off by up to 0.033, because it rounds the rows between the stages, too
