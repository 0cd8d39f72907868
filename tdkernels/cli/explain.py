"""``python -m tdkernels explain``: which config a call would run with, and what limits it."""

import dataclasses
import json
import sys

import torch

from tdkernels.cli.suggest import check_known
from tdkernels.cli.tune import DTYPES, parse_sizes


def main(options):
    """Return the exit code: 0, or 2 for arguments that make no sense."""
    from tdkernels.autotune.explain import explain
    from tdkernels.autotune.tunable import operators, tunable

    try:
        check_known("operator", [options.operator], operators())
        sizes = parse_sizes(options.shape, "x", "--shape")
        alone = tunable(options.operator).alone
        ranks = options.nproc if options.nproc is not None else max(torch.cuda.device_count(), 1 if alone else 2)
        found = explain(
            options.operator, *sizes, dtype=DTYPES[options.dtype], layout=options.layout, world_size=ranks
        )
    except ValueError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_as_dict(found), indent=2) if options.json else found)
    return 0


def _as_dict(explanation):
    """The fields of an Explanation, as JSON can hold them."""
    fields = {field.name: getattr(explanation, field.name) for field in dataclasses.fields(explanation)}
    for name in ("problem", "tuned_for", "config"):
        if fields[name] is not None:
            fields[name] = dataclasses.asdict(fields[name])
    return fields | {"method": explanation.method}
