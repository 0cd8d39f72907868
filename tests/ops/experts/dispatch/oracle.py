"""Expected results of a dispatch and a combine, computed from the tokens of all ranks in plain torch on the CPU.

    case = Routed([7, 0, 3], k=2, experts=6, width=32)     # tokens of each rank
    recv, handle = case.dispatch()
    case.check_received(recv)

Every rank draws the operands of all ranks from the seed, so it computes the expected results without communication.
"""

import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives.cases import same
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Routed:
    """Tokens of all ranks, their routing, and the expected results.

    Args:     tokens: T of each rank; k, experts, width: the same on all ranks
              ids: "distinct" experts of each token; "any", with duplicates and -1; "one" expert for the first
              assignment of all tokens and -1 for the rest; "none", all -1; "last", experts of the last rank only;
              "near", experts on the node of the token
              values: "exact", small integers whose sums are exact in every dtype, so that checks compare for equality;
              "normal"; or random "bits", including NaNs
              weights: their dtype; the weight of an assignment with id -1 is NaN, since it must not be read
              out_width, out_dtype: width and dtype of the experts' rows; None: as x
              rank: rank in the group of the call; None: rank in the world group
              local_world_size: ranks per node; None: one node

    x, ids and weights belong to this rank and are on its device; all_x, all_ids and all_weights belong to all ranks
    and are on the CPU. ``order`` maps each row of this rank to its assignment, token * k + index.
    """

    def __init__(
        self, tokens, k, experts, width, dtype=BF16, *, ids="any", values="exact", weights=FP32, out_width=None,
        out_dtype=None, seed=0, rank=None, local_world_size=None,
    ):
        self.local_world_size = local_world_size or len(tokens)
        self.world_size, self.rank = len(tokens), dist.get_rank() if rank is None else rank
        self.tokens, self.k, self.experts, self.dtype, self.values = tokens, k, experts, dtype, values
        self.title = f"tokens={tokens} k={k} experts={experts} width={width} {dtype} ids={ids} {values} seed={seed}"
        self.generator = torch.Generator().manual_seed(seed)
        total = sum(tokens)
        self.start = sum(tokens[: self.rank])
        self.mine = slice(self.start, self.start + tokens[self.rank])
        self.all_ids = self._draw_ids(ids, total)
        self.valid = self.all_ids >= 0
        self.all_x = self.draw(total, width, dtype)
        self.all_weights = self._draw_weights(total).to(weights)
        self.all_out = self.draw(total * k, out_width or width, out_dtype or (dtype if dtype.itemsize > 1 else BF16))

        each = experts // self.world_size
        self.dest = torch.where(self.valid, self.all_ids // each, -1)
        here = (self.dest.flatten() == self.rank).nonzero().flatten()
        experts_here = self.all_ids.flatten()[here]
        # Assignments are ordered by rank, token and index; the stable sort by expert keeps this order.
        self.order = here[torch.sort(experts_here, stable=True).indices]
        self.splits = torch.bincount(experts_here - self.rank * each, minlength=each).int()
        self.num_rows = len(self.order)

        self.x = self.all_x[self.mine].to(device())
        self.ids = self.all_ids[self.mine].to(device())
        self.weights = self.all_weights[self.mine].to(device())

    def _draw_ids(self, ids, total):
        shape, experts = (total, self.k), self.experts
        if ids == "any":
            return torch.randint(-1, experts, shape, generator=self.generator)
        if ids == "last":
            each = experts // self.world_size
            return torch.randint(experts - each, experts, shape, generator=self.generator)
        if ids == "near":
            of_node = experts // self.world_size * self.local_world_size
            source = torch.repeat_interleave(torch.arange(self.world_size), torch.tensor(self.tokens))
            first = source // self.local_world_size * of_node
            return first[:, None] + torch.randint(of_node, shape, generator=self.generator)
        if ids == "distinct":
            return torch.rand(total, experts, generator=self.generator).argsort(1)[:, : self.k]
        drawn = torch.full(shape, -1)
        if ids == "one":
            drawn[:, 0] = experts // 2
        return drawn

    def _draw_weights(self, total):
        if self.values == "normal":
            drawn = torch.rand(total, self.k, generator=self.generator)
        else:
            drawn = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(4, (total, self.k), generator=self.generator)]
        return drawn.where(self.valid, torch.nan)

    def draw(self, rows, width, dtype):
        """Return a tensor [rows, width] with the kind of values of this case."""
        if self.values == "normal":
            return torch.randn(rows, width, generator=self.generator).to(dtype)
        if self.values == "exact":
            return torch.randint(-3, 4, (rows, width), generator=self.generator).to(dtype)
        bits = torch.randint(256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=self.generator)
        return bits.view(dtype)

    # ---- calls ----

    def dispatch(self, weighted=True, **options):
        return tdkernels.ep_dispatch(
            self.x, self.ids, self.weights if weighted else None, num_experts=self.experts, **options
        )

    def expert_out(self):
        """Return arbitrary outputs of this rank's experts, one row for each received row."""
        return self.all_out[self.order].to(device())

    def capacity(self):
        """Return the maxima over ranks of (rows received, tokens staged, counted once for each peer)."""
        ranks, local = torch.arange(self.world_size), self.local_world_size
        source = torch.repeat_interleave(ranks, torch.tensor(self.tokens))
        going = torch.stack([
            torch.bincount(source[(self.dest == rank).any(1)], minlength=self.world_size) for rank in range(len(ranks))
        ], 1)
        rows = torch.bincount(self.dest[self.valid], minlength=self.world_size).max().item()
        rail = ranks % local
        going = going.where(rail[:, None] != rail[None, :], 0)  # tokens of the same rail use the network, or stay
        # Rows on the way back are collected, on each node, by the rank with the local rank of the source.
        staged = [going.sum(0).max().item()]
        to_node = going.view(self.world_size, -1, local).sum(2)
        staged.append(to_node.view(-1, local, to_node.shape[1]).sum(0).max().item())
        node_of = torch.where(self.valid, self.dest // local, -1)
        crossing = torch.stack([
            torch.bincount(source[(node_of == node).any(1) & (source // local != node)], minlength=self.world_size)
            for node in range(self.world_size // local)
        ], 1)
        staged += [crossing.sum(1).max().item(), crossing.view(-1, local, crossing.shape[1]).sum(0).max().item()]
        return rows, max(staged)

    # ---- expected results ----

    def received(self, all_values):
        """Return this rank's received rows [N, …] of a tensor with one row for each token of all ranks."""
        data = all_values.contiguous().view(torch.uint8) if all_values.dtype.itemsize == 1 else all_values
        return data[self.order // self.k].view(all_values.dtype)

    def by_row(self, per_assignment):
        """Return this rank's received elements [N] of a tensor [T, k] of all ranks' assignments."""
        return per_assignment.flatten()[self.order]

    def combined(self, out, weights, combine="per_rank", rank=None):
        """Return the sums of rows [N * k, H] over the assignments of this rank's tokens, in fp64 and in the dtype."""
        valid, dest = self.valid[self.mine], self.dest[self.mine]
        rows = out.view(sum(self.tokens), self.k, out.shape[1])[self.mine]
        weights = (torch.ones(valid.shape) if weights is None else weights[self.mine]).where(valid, 0.0)
        exact = (rows.double() * weights.double()[..., None]).sum(1)

        def add_up(mask, total):
            for j in range(self.k):
                term = rows[:, j].float() * weights[:, j : j + 1].float()
                total = total + term.where(mask[:, j : j + 1], 0.0)
            return total

        low = torch.zeros(exact.shape)
        for node in range(self.world_size // self.local_world_size):
            is_ours = node == self.rank // self.local_world_size
            total = self._sum_on_node(node, dest, add_up, torch.zeros(exact.shape), combine, out.dtype)
            low = low + (total if is_ours else total.to(out.dtype).float())  # rounded before the inter-node transfer
        return exact, low.to(out.dtype)

    def _sum_on_node(self, node, dest, add_up, zeros, combine, dtype):
        """Return the partial sums of this rank's tokens on a node, computed by the node's rank on the same rail."""
        local = self.local_world_size
        if combine == "per_expert":
            return add_up((dest >= 0) & (dest // local == node), zeros)
        total = zeros
        for source in range(node * local, (node + 1) * local):
            if source % local == self.rank % local:  # added directly, without a rounded partial sum
                total = add_up(dest == source, total)
            else:
                total = total + add_up(dest == source, zeros).to(dtype).float()
        return total

    # ---- checks ----

    def check_received(self, recv, weighted=True, capacity=None):
        """Compare ``recv`` bitwise; with a capacity, only the used rows."""
        tdkernels.synchronize()
        rows = self.num_rows if capacity is None else capacity
        title = f"{self.title}, rank {self.rank} of {self.world_size}"
        assert recv.x.shape[0] == rows and recv.x.is_contiguous(), f"{title}: rows {list(recv.x.shape)}, not {rows}"
        assert same(recv.splits, self.splits), f"{title}: splits {recv.splits.tolist()}, not {self.splits.tolist()}"
        assert same(recv.x.detach()[: self.num_rows], self.received(self.all_x)), f"{title}: x"
        if weighted:
            got, expected = recv.topk_weights.detach(), self.by_row(self.all_weights).float()
            assert got.shape == (rows,) and same(got[: self.num_rows], expected), f"{title}: topk_weights"
        else:
            assert recv.topk_weights is None, f"{title}: unexpected topk_weights"

    def check_numbers(self, name, got, exact, low):
        """Require equality if all sums are exact; otherwise allow twice the error of plain torch."""
        title = f"{name} of {self.title}, rank {self.rank} of {self.world_size}"
        if self.values == "exact":
            assert got.dtype == low.dtype and got.shape == low.shape, f"{title}: {got.dtype} {list(got.shape)}"
            wrong = (got.detach().cpu().double() != exact).sum().item()  # a NaN is unequal too
            assert wrong == 0, f"{title}: {wrong} of {got.numel()} elements are wrong"
        else:
            assert_close(title, got, exact, low)

    def check_combined(self, y, weighted=True, combine="per_rank"):
        tdkernels.synchronize()
        weights = self.all_weights if weighted else None
        self.check_numbers("y", y, *self.combined(self.all_out, weights, combine))
