"""Run the partitions of ``group_gemm_weights_specialized_kernel`` on the CPU; see ``specialized_protocol``.

Each work item is the only tile of its expert. Groups begin at multiples of GROUP rows.
"""

import threading
from types import SimpleNamespace

from tdkernels.ops.experts.grouped_gemm.specialized import weights
from tests.ops.dense.specialized_protocol import BLOCK_K, BLOCK_M, HALF_M, Barrier, Cell, Run, Weight, indexed

GROUP = 16 * BLOCK_K
_FORM = {"dtype": "bf16", "block_type": SimpleNamespace(shape=(1, BLOCK_K, HALF_M)), "layout": None}


class WeightsRun(Run):
    """A program of the kernel, for groups of random numbers of rows, some of them 0."""

    partitions = (weights,)

    def __init__(self, seed, items, source=None):
        super().__init__(seed, items, 0, source)
        self.bars += [Barrier(1) for _ in range(weights.LAST.value + weights.STAGES.value - len(self.bars))]
        self.memory = (
            indexed(_Rows(cell.num_bytes) for cell in self.memory[0]), indexed(_Columns() for _ in self.memory[1]),
            *self.memory[2:],
        )
        last_steps = [2 * BLOCK_K + rows for rows in (1, 16, 17, 32, 33)]
        rows = 0, 1, 8, BLOCK_K - 1, BLOCK_K, BLOCK_K + 9, 3 * BLOCK_K, *last_steps, 7 * BLOCK_K + 63
        self.rows = [self.schedule.random.choice(rows) for _ in range(items)]

    def threads(self):
        bars, code = indexed(self.bars), self.code
        dy, dw = (SimpleNamespace(**_FORM) for _ in range(2))

        def load():
            splits = None, None, 0
            code["load_weights_partition"]((dy, "weight"), self.memory, bars, splits, None, None, self.items, 1)

        def store():
            code["store_weights_partition"](self.memory, bars, dw, None)
            self.closed = True

        multiply = {
            f"multiply {which}": lambda which=which: code["multiply_weights"](self.memory, bars, which)
            for which in range(2)
        }
        return {"load": load, "store": store, **multiply}

    def names(self):
        return {
            "_ends_of_groups": lambda splits, experts: None, "_place_of": lambda tile, problem: (tile, tile, 0),
            "_group_of": lambda expert, ends, experts: (expert * GROUP, expert * GROUP + self.rows[expert]),
            "request_number": lambda counter: None, "reset_after": self._check_reset,
            "partition_barrier": self.schedule.until,
            "no_epilogue": self._check_place, "_keep_rows": self._keep_rows,
        }

    def place(self, desc, plane, row):
        return row // BLOCK_M, row % BLOCK_M // HALF_M

    def place_of_output(self, desc, row):
        return row // BLOCK_M, row % BLOCK_M // HALF_M

    def place_of_item(self, item):
        return item, 0, item

    def splits_of(self, item):
        return [list(range(max(-(-self.rows[item] // BLOCK_K), 1)))]

    def _check_place(self, half, place, which, side, epilogue):
        assert place == self.place_of_item(half.item)
        return half

    # ---- rows of no group, or of the next one ----

    def _load(self, desc, at, bar, cell, pred=True):
        """Load a block with its name as ``Run`` has it: the place of the tile's rows, and the row in the group."""
        row, col = at[-2:]
        item, first = divmod(row, GROUP)
        cell.item, cell.first, cell.zeroed, cell.are_fenced = item, first, set(), True
        super()._load(desc, (col, first) if desc == "weight" else (at[0], col, first), bar, cell, pred)

    def _keep_rows(self, block, first, count):
        """Set rows to zero, as ``_keep_rows`` of the partition does, and check that they have arrived."""
        self.schedule.until()
        for cell in _cells(block):
            assert cell.value is not None and cell.value[-1] == cell.first, "rows are set to zero before they arrive"
            assert count == self.rows[cell.item] - cell.first, "other rows are set to zero"
            cell.zeroed |= set(range(max(first, count), first + 8))
            cell.are_fenced = False

    def _fence(self):
        if threading.current_thread().name != "load":
            super()._fence()
            return
        for block in (*self.memory[0], *self.memory[1]):
            for cell in _cells(block):
                cell.are_fenced = True
        self.schedule.until()

    def _multiply(self, x, weight, acc, use_acc, is_async):
        """Multiply all rows of a step, or the first ones, which must be all of its group."""
        depth = BLOCK_K
        if isinstance(x, _FirstRows):
            assert x.count == weight.count
            depth, x, weight = x.count, x.block, weight.block
        for cell in (*_cells(x), *_cells(weight)):
            count = max(self.rows[cell.item] - cell.first, 0)
            assert min(count, BLOCK_K) <= depth, "rows of the group are not multiplied"
            others = set(range(count, depth))
            assert cell.zeroed & set(range(depth)) == others and cell.are_fenced, "rows of no group are multiplied"
        return super()._multiply(x, weight, acc, use_acc, is_async)


class _FirstRows:
    """The first ``count`` rows of an operand."""

    def __init__(self, block, count):
        self.block, self.count = block, count


class _Rows(Cell):
    """A block of dy."""

    def slice(self, first, size, dim):
        assert (first, dim) == (0, 1)
        return _FirstRows(self, size)


class _Columns(Weight):
    """A block of x."""

    def slice(self, first, size, dim):
        return super().slice(first, size, dim) if dim == 1 else _FirstRows(self, size)


def _cells(block):
    return block.halves if isinstance(block, Weight) else [block]
