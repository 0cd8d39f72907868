"""Files of rows: one JSON object a line, in a folder for each kind of machine."""

import json
import re


def append(rows, folder, name=None):
    """Append rows of one machine to ``folder``/<gpu>x<number>/<name>.jsonl; the default name is the operator."""
    slug = re.sub(r"[^a-z0-9]+", "-", rows[0]["gpu"].lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"{slug}x{rows[0]['num_gpus']}" / f"{name or rows[0]['op']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
