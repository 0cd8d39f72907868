"""The command line: ``python -m tdkernels doctor | tune | cache | bench | trace``."""

import argparse
import sys

from tdkernels.cli import bench as bench_command
from tdkernels.cli import cache as cache_command
from tdkernels.cli import trace as trace_command
from tdkernels.cli import tune as tune_command


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tdkernels", description="Tools that come with tdkernels.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="say what works on this machine, what does not, and what to do about it",
        description="Say what works on this machine, what does not, and what to do. Exit code 1 if there is a problem.",
    )
    doctor.add_argument("--no-self-test", action="store_true", help="do not start ranks to try the operators")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    tune = commands.add_parser(
        "tune", help="find the best configs for shapes on this machine and keep them",
        description="Find the best config for each shape, on ranks that this command starts, and keep it in the cache.",
    )
    tune_command.add_arguments(tune)
    cache = commands.add_parser("cache", help="show, export, merge or clear what was tuned")
    cache_command.add_arguments(cache)
    bench = commands.add_parser(
        "bench", help="measure the operators beside plain torch and other libraries (from the repository)",
        description="Measure the operators, plain torch and other libraries in turns, on ranks that are started here.",
    )
    bench_command.add_arguments(bench)
    trace = commands.add_parser(
        "trace", help="show what the programs of an operator do, and when, on every rank",
        description="Record one launch of an operator on ranks that are started here: when each program computed, "
        "pushed and waited. Writes a trace for Perfetto and a picture, and prints where the time went.",
    )
    trace_command.add_arguments(trace)
    options = parser.parse_args(argv)
    if options.command == "tune":
        return tune_command.main(options)
    if options.command == "cache":
        return cache_command.main(options)
    if options.command == "bench":
        return bench_command.main(options)
    if options.command == "trace":
        return trace_command.main(options)
    from tdkernels.cli import doctor

    return doctor.main(self_test=not options.no_self_test, as_json=options.json)


if __name__ == "__main__":  # ranks import this file, too
    sys.exit(main())
