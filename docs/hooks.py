"""Hooks of mkdocs: pages from files outside docs/, and links to such files."""

import contextlib
import io
import itertools
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

import tdkernels
from tdkernels.cli.parser import COMMANDS, make_parser

ROOT = Path(__file__).parents[1]
PAGES = {  # page of the site: file of the repository
    "performance/index.md": "bench/README.md",
    **{f"performance/tables/{table.name}": f"bench/tables/{table.name}" for table in (ROOT / "bench/tables").glob("*")},
    "contributing/index.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
SITE = {source: page for page, source in PAGES.items()}  # file of the repository: page or image of the site
SITE |= {f"bench/plots/{plot.name}": f"performance/plots/{plot.name}" for plot in (ROOT / "bench/plots").glob("*.png")}


def on_files(files, config):
    """Add the generated pages, and the plots that they show."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text(), source, page)))
    for source, image in SITE.items():
        if image not in PAGES:
            files.append(File.generated(config, image, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Insert the help texts, and turn links to files outside the site into the names of these files."""
    if "{{ cli }}" in markdown:
        markdown = markdown.replace("{{ cli }}", "\n\n".join(_help(name) for name, *_ in COMMANDS))
    if page.file.src_uri in PAGES:
        return markdown
    return _moved(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _moved(markdown, source, page):
    """Rewrite relative links of a Markdown file of the repository for a page of the site."""
    def link(match):
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = SITE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if there is None:
            return f"{text}" if f"`{file}`" in text else f"{text} (`{file}`)"
        where = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{image}[{text}]({where}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    prose = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, part) for part in parts[::2]]  # code is in between
    return "".join(text for pair in itertools.zip_longest(prose, parts[1::2], fillvalue="") for text in pair)


def _help(command):
    """The help text of a subcommand, as a section."""
    text = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        make_parser(tdkernels.__version__).parse_args([command, "--help"])
    return f"## {command}\n\n```text\n{text.getvalue().rstrip()}\n```"
