# SPDX-License-Identifier: Apache-2.0
"""The documentation says what is true of the code: examples run, tables are the code's, links lead somewhere.

The rule for code blocks: every `python` block compiles; one with `title="Runs as it stands"` is run; those of a page
with `title="Runs on vLLM"` are run on a tiny model, in order; one whose title is a file of this repository stands in
that file, word for word.
"""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import omni_core.backend.errors
import omni_core.integrations.vllm.errors
import omni_core.prefix_cache.errors
import omni_core.settings.errors
import omni_core.sinks.errors
from omni_core.cli.main import COMMANDS
from omni_core.prefix_cache.config import PrefixCacheConfig

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = (
    REPOSITORY / "README.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((REPOSITORY / "backends").glob("*/README.md")),
)
RUN_TITLE = "Runs as it stands"
ENGINE_TITLE = "Runs on vLLM"
TITLES = (None, RUN_TITLE, ENGINE_TITLE)  # any other names a file
ERROR_MODULES = (
    omni_core.prefix_cache.errors,
    omni_core.backend.errors,
    omni_core.sinks.errors,
    omni_core.integrations.vllm.errors,
    omni_core.settings.errors,
)

FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]*)"')
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
MODEL = "path/to/a/model"
EXAMPLE_LINE = re.compile(
    r"request \S+ vLLM skipped (\d+) tokens and computed (\d+) rows; delivered \((\d+), \d+\), "
    r"positions \[\(0, (\d+)\)\]"
)
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


def name_of(page):
    return str(page.relative_to(REPOSITORY))


@dataclass(frozen=True)
class Block:
    page: Path
    where: str
    language: str
    title: str | None
    code: str


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            indent, info, code = fence.groups()
            title = TITLE.search(info)
            lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
            line = text.count("\n", 0, fence.start()) + 1
            yield Block(
                page=page,
                where=f"{name_of(page)}:{line}",
                language=info.split(maxsplit=1)[0] if info.strip() else "",
                title=title.group(1) if title else None,
                code="".join(lines),
            )


BLOCKS = tuple(blocks())


def chosen(of):
    return [pytest.param(block, id=block.where) for block in BLOCKS if of(block)]


@pytest.mark.parametrize("block", chosen(lambda block: block.language == "python"))
def test_python_block_compiles(block):
    compile(textwrap.dedent(block.code), block.where, "exec")


@pytest.mark.parametrize("block", chosen(lambda block: block.title == RUN_TITLE))
def test_block_that_says_it_runs_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, block.where, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", chosen(lambda block: block.title not in TITLES))
def test_block_with_a_file_name_stands_in_that_file(block):
    file = REPOSITORY / block.title
    assert file.is_file(), f"{block.where}: {block.title!r} is neither one of {TITLES[1:]} nor a file"
    assert block.code in file.read_text(encoding="utf-8")


def test_there_is_something_to_run_and_to_compare():
    assert sum(block.title == RUN_TITLE for block in BLOCKS) >= 5
    assert sum(block.title not in TITLES for block in BLOCKS) >= 3


@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.title == ENGINE_TITLE}), ids=name_of)
def test_blocks_that_say_they_run_on_vllm_run(page, tmp_path):
    example = tmp_path / "example.py"
    code = [block.code for block in BLOCKS if block.page == page and block.title == ENGINE_TITLE]
    example.write_text("\n".join(code), encoding="utf-8")
    told = run_on_vllm(example, in_directory=tmp_path)
    whole = [line for line in told if line.endswith("True")]  # what an example prints of each request: `complete`, last
    assert whole != [], told


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_the_example_program_delivers_every_row_of_every_prompt(tmp_path):
    told = run_on_vllm(REPOSITORY / "examples" / "offline_llm.py", "--model", MODEL, in_directory=tmp_path)
    lines = [EXAMPLE_LINE.fullmatch(line) for line in told if line.startswith("request ")]
    assert len(lines) == 3, told
    assert all(lines), told
    for skipped, computed, delivered, stop in (map(int, line.groups()) for line in lines):
        assert skipped + computed == delivered == stop
    assert any(int(line[1]) for line in lines), "no prompt hit the prefix they share"


def run_on_vllm(example, *arguments, in_directory):
    """The lines an example prints, run on the tiny model that `engine_example.py` makes."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_example.py")), str(example), *arguments],
        cwd=in_directory,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return run.stdout.splitlines()


# -- links ------------------------------------------------------------------------------------------------------------


def prose(page):
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The ids of a page's headings, as Python-Markdown's `toc` makes them."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(prose(page)))
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain)
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{name_of(page)} links to {target}, and there is no such file"
        if page.is_relative_to(DOCS):
            assert file.is_relative_to(DOCS), f"{name_of(page)} links to {target}, which the site does not have"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}; headings: {sorted(anchors(file))}"


def test_every_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert [page for page in pages if page not in navigation] == [], "add these pages to `nav` in mkdocs.yml"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs here; `make docs` brings it")
def test_the_site_builds_without_a_warning(tmp_path):
    run = subprocess.run(
        # Not --quiet: it hides the warnings from --strict as well.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html")]
    loads = re.compile(r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?:[^"]*)"')
    fetched = {address for page in pages for address in loads.findall(page)}
    assert fetched == set(), "a page must not fetch anything from elsewhere"


# -- tables -----------------------------------------------------------------------------------------------------------


def table(page, *header):
    """The rows of the one table of a page whose header is `header`; `|` inside a cell is written `\\|`."""
    rows, found = None, []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            rows = None
            continue
        cells = tuple(cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if rows is not None:
            rows.append(cells)
        elif cells == header:
            rows = []
            found.append(rows)
    assert len(found) == 1, f"{page} has {len(found)} tables with the header {header}"
    return found[0][1:]  # without the rule under the header


def bare(cell):
    assert re.fullmatch(r"`[^`]+`", cell), f"expected one code span, found {cell!r}"
    return cell.strip("`")


def shown_default(field):
    if field.default is not dataclasses.MISSING:
        return repr(field.default.value if isinstance(field.default, Enum) else field.default)
    return "required" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


def settings_of(rows):
    return [(bare(name), default if default == "required" else bare(default)) for name, default, _ in rows]


def expected_settings(settings):
    return [(field.name, shown_default(field)) for field in dataclasses.fields(settings)]


def test_cache_settings_table_is_the_configuration():
    rows = table("settings.md", "Field", "Default", "Meaning")
    assert settings_of(rows) == expected_settings(PrefixCacheConfig)


@pytest.mark.parametrize("module", ERROR_MODULES, ids=lambda module: module.__name__)
def test_troubleshooting_has_every_error(module):
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    classes = [error for _, error in inspect.getmembers(module, inspect.isclass) if error.__module__ == module.__name__]
    roots = {base for error in classes for base in error.__bases__}
    assert {error.__name__ for error in classes if error not in roots} - explained == set()


def test_troubleshooting_has_no_error_that_is_not():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    known = {name for module in ERROR_MODULES for name, _ in inspect.getmembers(module, inspect.isclass)}
    assert set(re.findall(r"`(\w+Error)`", text)) - known == {"OSError"}


# -- commands and figures ---------------------------------------------------------------------------------------------


def test_commands_named_are_commands():
    known = {command.name for command in COMMANDS}
    assert named_after("omni-core") >= {("README.md", "simulate")}
    assert {use for use in named_after("omni-core") if use[1] not in known} == set()


def test_make_targets_named_are_targets():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert named_after("make") >= {("README.md", "demo")}
    assert {use for use in named_after("make") if use[1] not in known} == set()


def named_after(program):
    """(page, first argument) of every call of `program` in a shell block or a code span."""
    found = set()
    for page in PAGES:
        fences = FENCE.finditer(page.read_text(encoding="utf-8"))
        code = [line for fence in fences if fence.group(2) == "sh" for line in fence.group(3).splitlines()]
        code += re.findall(r"`([^`\n]+)`", prose(page))
        calls = (re.match(rf"{program} ([a-z][a-z-]*)", line) for line in code)
        found |= {(name_of(page), call.group(1)) for call in calls if call}
    return found


def test_the_host_memory_figure_is_the_configurations():
    config = PrefixCacheConfig(
        num_blocks=15_092, block_size=16, hidden_size=2_048, hidden_dtype=torch.bfloat16, max_num_tokens=8_192
    )
    figure = f"{config.pool_bytes(config.hidden_row_bytes):,} bytes"
    assert figure in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert figure in (DOCS / "sizing.md").read_text(encoding="utf-8")
