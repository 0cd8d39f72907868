"""Report sections with one table per machine."""


def section(intro, rows, table):
    """Return ``intro`` and, for each machine, ``table`` of the rows of its newest run; "" if there are no rows."""
    machines = sorted({_machine(row) for row in rows})
    tables = [table(_newest([row for row in rows if _machine(row) == machine])) for machine in machines]
    return "\n".join([intro, *tables]) if tables else ""


def _machine(row):
    return row["gpu"], row["num_gpus"]


def _newest(rows):
    return [row for row in rows if row["date"] == max(row["date"] for row in rows)]
