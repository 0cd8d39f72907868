"""The command line: ``python -m tdkernels doctor``."""

import argparse
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tdkernels", description="Tools that come with tdkernels.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="say what works on this machine, what does not, and what to do about it",
        description="Say what works on this machine, what does not, and what to do. Exit code 1 if there is a problem.",
    )  # fmt: skip
    doctor.add_argument("--no-self-test", action="store_true", help="do not start ranks to try the operators")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    from tdkernels import doctor  # here, so that --help does not wait for it

    return doctor.main(self_test=not options.no_self_test, as_json=options.json)


if __name__ == "__main__":  # ranks of the self-test import this file, too
    sys.exit(main())
