from tests.nodes import a_group_on_nodes
from tests.ops.decode import Decode
from tests.ranks import on_ranks
import pytest

def computes(spec, local):
    with a_group_on_nodes(local) as group:
        case = Decode(**spec, group=group)
        case.check(case.run(()))
        del case, group

@pytest.mark.parametrize("w,l", [(2,1),(4,2),(3,1)])
@pytest.mark.parametrize("spec", [dict(batch=3, heads=6, kv_heads=2, dim=64, keys=20), dict(batch=2, heads=4, kv_heads=2, dim=16, keys=6, tokens=3, seed=9)])
def test_a(w,l,spec):
    on_ranks(w, computes, spec, l)
