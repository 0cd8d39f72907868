"""What a dispatch and a combine have to give, from the tokens of all ranks, by plain torch on the CPU.

    case = Routed([7, 0, 3], k=2, experts=6, width=32)     # tokens of each rank
    recv, handle = case.dispatch()
    case.check_received(recv)

Every rank makes the same operands of all ranks from the seed, so it knows what is to come out on its own.
"""

import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives.cases import same
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Routed:
    """All ranks' tokens, their experts, and what comes of them.

    Args:     tokens: T of each rank; k, experts, width: of all
              ids: "distinct" experts of a token; "any", which may be twice or -1; "one" for all tokens of all ranks,
              of their first choice only; "none", all -1; "last", on the last rank only; "near", on a token's own node
              values: "exact", so small that every sum is exact in every dtype, so that checks ask for equality;
              "normal"; or any "bits", with all kinds of NaN
              weights: their dtype; that of a choice of no expert is NaN, since nobody may look at it
              out_width, out_dtype: of the experts' rows, those of x if None
              rank: in the group that is used; None means the world
              local_world_size: ranks of a node; None means all

    x, ids and weights are this rank's, on its device; all_x and so on those of all ranks, on the CPU. ``order`` tells
    of this rank's rows which choice, token * k + number, each belongs to.
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
        # In the order of the ranks, of their tokens and of those's choices, which sorting by expert keeps.
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
        """[rows, width] of the kind of values that this case has."""
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
        """What this rank's experts have made of its rows: just anything."""
        return self.all_out[self.order].to(device())

    def capacity(self):
        """(rows that any rank receives, tokens that any has to stage, once for each peer) at most."""
        ranks, local = torch.arange(self.world_size), self.local_world_size
        source = torch.repeat_interleave(ranks, torch.tensor(self.tokens))
        going = torch.stack([
            torch.bincount(source[(self.dest == rank).any(1)], minlength=self.world_size) for rank in range(len(ranks))
        ], 1)
        rows = torch.bincount(self.dest[self.valid], minlength=self.world_size).max().item()
        rail = ranks % local
        going = going.where(rail[:, None] != rail[None, :], 0)  # the others come by the network, or stay
        # What comes back meets at the rank of the source's number on each node.
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

    # ---- what is to come out ----

    def received(self, of_all):
        """This rank's rows of what all ranks' tokens have, [N, …]."""
        data = of_all.contiguous().view(torch.uint8) if of_all.dtype.itemsize == 1 else of_all
        return data[self.order // self.k].view(of_all.dtype)

    def by_row(self, of_choices):
        """This rank's rows of what all ranks' choices have, [N, k]."""
        return of_choices.flatten()[self.order]

    def combined(self, out, weights, combine="per_rank", rank=None):
        """(in fp64, as plain torch has it in the dtype): this rank's tokens' sums of all choices' rows [N * k, H]."""
        valid, dest = self.valid[self.mine], self.dest[self.mine]
        rows = out.view(sum(self.tokens), self.k, out.shape[1])[self.mine]
        weights = (torch.ones(valid.shape) if weights is None else weights[self.mine]).where(valid, 0.0)
        exact = (rows.double() * weights.double()[..., None]).sum(1)

        def add_up(which, total):
            for j in range(self.k):
                term = rows[:, j].float() * weights[:, j : j + 1].float()
                total = total + term.where(which[:, j : j + 1], 0.0)
            return total

        low = torch.zeros(exact.shape)
        for node in range(self.world_size // self.local_world_size):
            is_ours = node == self.rank // self.local_world_size
            total = self._sum_on_node(node, dest, add_up, torch.zeros(exact.shape), combine, out.dtype)
            low = low + (total if is_ours else total.to(out.dtype).float())  # rounded where it crosses
        return exact, low.to(out.dtype)

    def _sum_on_node(self, node, dest, add_up, zeros, combine, dtype):
        """What a node adds up of this rank's tokens, where the rank of its number is."""
        local = self.local_world_size
        if combine == "per_expert":
            return add_up((dest >= 0) & (dest // local == node), zeros)
        total = zeros
        for source in range(node * local, (node + 1) * local):
            if source % local == self.rank % local:  # what does not cross is not a sum of its own
                total = add_up(dest == source, total)
            else:
                total = total + add_up(dest == source, zeros).to(dtype).float()
        return total

    # ---- checks ----

    def check_received(self, recv, weighted=True, capacity=None):
        """``recv`` to the bit; with a capacity in its first rows."""
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
            assert recv.topk_weights is None, f"{title}: weights from nowhere"

    def check_numbers(self, name, got, exact, low):
        """Equal if all sums are exact, else no further off than twice what plain torch is."""
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
