"""Problems of a fault campaign: attention."""

import torch

import tdkernels
from tests.chaos.base import FP32, ExactCase, NamedResults, assert_near
from tests.ops.attention.ag_attention import cases as attention
from tests.ops.attention.ag_attention.oracle import Sharded
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import CACHES, Decode
from tests.ops.attention.ulysses import cases as sequence_parallel
from tests.ops.attention.ulysses.cases import Projection


class Decoding(NamedResults):
    # All ranks must pass the same batch, but not the same number of keys.
    SHAPES = [dict(batch=2, keys=7), dict(batch=3, keys=7), dict(batch=1, keys=20), dict(batch=4, keys=40)]

    def __init__(self, operator, changes, shape, seed, group):
        self.case = Decode(heads=4, kv_heads=2, dim=16, dtype=FP32, seed=seed, **self.SHAPES[shape])
        self.case.require()
        self.options = {"config": decoding.config_of(changes)}
        self.group, self.results = group, {}

    def _call(self):
        o, lse = self.case.call(return_lse=True, **self.options)
        return {"o": o, "lse": lse}, [self.case.do, self.case.dlse]

    def _gradients(self):
        return self.case.gradients()

    def check(self):
        tdkernels.synchronize()
        case, expected = self.case, self.case.expected(torch.double, True)
        first = int(case.all_lens[: case.rank].sum())
        for name, got in self.results.items():
            if name[1:] in CACHES:
                parts = torch.cat(case._key_gradients(name, got))
                assert_near(name, parts, expected[name][first : first + len(parts)])
            else:
                assert_near(name, got, expected[name])


class Attention(NamedResults):
    SHAPES = [dict(rows=9), dict(rows=10), dict(rows=7, batch=2), dict(rows=21, sharding="zigzag")]

    def __init__(self, operator, changes, shape, seed, group):
        self.case = Sharded(heads=2, kv_heads=1, d=16, dv=16, dtype=FP32, seed=seed, **self.SHAPES[shape])
        self.case.require()
        self.options = {"config": attention.CONFIGS[changes]}
        self.group, self.results = group, {}

    def _call(self):
        o, lse = self.case.call(**self.options)
        return {"o": o, "lse": lse}, [self.case.do, self.case.dlse]

    def _gradients(self):
        return self.case.gradients()

    def _expected(self):
        return {name: self.case.part(whole) for name, whole in self.case.expected(torch.double).items()}


class Ulysses(ExactCase):
    SHAPES = [(5, 7, 3), (6, 7, 3), (9, 8, 4), (20, 12, 9)]  # positions, k, n

    def __init__(self, operator, changes, shape, seed, group):
        positions, k, n = self.SHAPES[shape]
        self.case = Projection(operator, FP32, positions, k, n, batch=1, exact=True, seed=seed)
        self.options = {"config": sequence_parallel.CONFIGS[changes]}
        self.group, self.results = group, {}

    def _call(self):
        self.case.group = self.group
        return self.case.call(**self.options)
