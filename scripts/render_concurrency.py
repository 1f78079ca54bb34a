# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/concurrency.md from the source: `python scripts/render_concurrency.py`.

A part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. `tests/docs` compares them with the source.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from marked_block import with_block

from omni_core.prefix_cache.task import LEGAL_MOVES, TaskState

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "concurrency.md"
PICTURE = REPOSITORY / "docs" / "assets" / "task-states.svg"
SOURCES = (
    "omni_core/prefix_cache",
    "omni_core/diffusion_kv",
    "omni_core/integrations",
    "omni_core/sinks",
    "backends/cpu_sim",
)
CORE = "omni_core/prefix_cache"

THREADS = {
    "save_outputs": "engine",
    "materialize": "consumer",
    "committer": "`omni-core-committer`",
    "prefetch": "`omni-core-prefetch`",
}
"""Who passes a checkpoint, by the first part of its name."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in the source."""

    where: str
    """Module and function, such as `committer.Committer._run`."""
    method: str
    receiver: ast.expr
    arguments: tuple[ast.expr, ...]

    @property
    def name(self) -> str | None:
        """The first argument if it is a literal string; names with a placeholder keep its braces."""
        if not self.arguments:
            return None
        first = self.arguments[0]
        if isinstance(first, ast.JoinedStr):
            return ast.unparse(first)[2:-1]
        return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def calls(folder: str) -> Iterator[CallSite]:
    """Every method call in a folder's modules, in the order of the source."""
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        yield from _calls_in(ast.parse(path.read_text(encoding="utf-8")), (path.stem,))


def _calls_in(node: ast.AST, names: tuple[str, ...]) -> Iterator[CallSite]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            values = (*child.args, *(keyword.value for keyword in child.keywords))
            yield CallSite(".".join(names), child.func.attr, child.func.value, values)
        inner = isinstance(child, ast.ClassDef | ast.FunctionDef)
        yield from _calls_in(child, (*names, child.name) if inner else names)


# -- states -----------------------------------------------------------------------------------------------------------


def state_meanings() -> dict[TaskState, str]:
    """The docstring under each state."""
    (tree,) = ast.parse(inspect.getsource(TaskState)).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    found = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            (target,) = statement.targets
            found[TaskState[ast.unparse(target)]] = " ".join(ast.literal_eval(following.value).split())
    return found


def states_table() -> str:
    """What each state means, and what may follow."""
    meanings = state_meanings()
    rows = ["| State | Means | May be followed by |", "|---|---|---|"]
    for state in TaskState:
        nexts = ", ".join(f"`{following.name}`" for following in TaskState if following in LEGAL_MOVES[state])
        rows.append(f"| `{state.name}` | {meanings[state]} | {nexts or 'nothing'} |")
    return "\n".join(rows)


def states_mermaid() -> str:
    """The legal moves as a Mermaid diagram."""
    ends = [state for state in TaskState if not LEGAL_MOVES[state]]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(TaskState)).name}"]
    for state in TaskState:
        lines += [
            f"    {state.name} --> {following.name}" for following in TaskState if following in LEGAL_MOVES[state]
        ]
    lines += [f"    {state.name} --> [*]" for state in ends]
    return "\n".join([*lines, "```"])


def states_svg() -> str:
    """The legal moves as a picture: the way of a write that succeeds, and below it the state of one that does not."""
    path = [next(iter(TaskState))]
    while following := [state for state in LEGAL_MOVES[path[-1]] if state is not TaskState.FAILED]:
        (state,) = following
        path.append(state)
    step, width, height = 170, 130, 44
    whole = 40 + step * (len(path) - 1) + width
    middle = whole // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} 210" width="{whole}" height="210" role="img" '
        'aria-labelledby="t d">',
        "  <!-- SPDX-License-Identifier: Apache-2.0 -->",
        "  <!-- Drawn by scripts/render_concurrency.py from LEGAL_MOVES in omni_core/prefix_cache/task.py. -->",
        '  <title id="t">The states of a write</title>',
        '  <desc id="d">' + ", then ".join(state.name for state in path) + "; or FAILED from any but the last.</desc>",
        "  <style>",
        "    text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; fill: #1f2328; "
        "text-anchor: middle; }",
        "    .state { fill: #bcd7f5; stroke: #2a5d9c; } .end { fill: #b7dfc0; stroke: #2d7a3e; } "
        ".failed { fill: #f5c9c6; stroke: #a1332b; }",
        "    .move { stroke: #57606a; fill: none; stroke-width: 1.4; marker-end: url(#tip); }",
        "  </style>",
        '  <defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#57606a"/></marker></defs>',
        f'  <rect x="0.5" y="0.5" width="{whole - 1}" height="209" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>',
    ]
    for index, state in enumerate(path):
        left = 20 + step * index
        kind = "state" if LEGAL_MOVES[state] else "end"
        parts.append(f'  <rect x="{left}" y="30" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        parts.append(f'  <text x="{left + width // 2}" y="57">{state.name}</text>')
        if index:
            parts.append(f'  <path d="M{left - step + width},52 L{left},52" class="move"/>')
        if TaskState.FAILED in LEGAL_MOVES[state]:
            end = middle + (left + width // 2 - middle) // 6
            parts.append(f'  <path d="M{left + width // 2},74 L{end},146" class="move"/>')
    parts.append(f'  <rect x="{middle - width // 2}" y="148" width="{width}" height="{height}" rx="6" class="failed"/>')
    parts.append(f'  <text x="{middle}" y="175">{TaskState.FAILED.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


# -- checkpoints, waits, threads, locks -------------------------------------------------------------------------------


def checkpoints_table() -> str:
    """Every point of the core where a seeded runtime may let another thread run although nothing blocks."""
    rows = ["| Thread | Checkpoint | Stands in |", "|---|---|---|"]
    found = [site for site in calls(CORE) if site.method == "checkpoint"]
    order = list(THREADS)
    found.sort(key=lambda site: order.index(str(site.name).partition(".")[0]))
    rows += [f"| {THREADS[str(site.name).partition('.')[0]]} | `{site.name}` | `{site.where}` |" for site in found]
    return "\n".join(rows)


def waits_table() -> str:
    """Every call of the core that can block, with its bound."""
    rows = ["| Stands in | Waits for | At most |", "|---|---|---|"]
    for site in calls(CORE):
        if (what := _waited_for(site)) is not None:
            *_, limit = site.arguments
            bound = ast.unparse(limit).removeprefix("self.").removeprefix("_").replace("config.", "")
            rows.append(f"| `{site.where}` | {what} | {'no bound: idle' if bound == 'None' else f'`{bound}`'} |")
    return "\n".join(rows)


def _waited_for(site: CallSite) -> str | None:
    receiver = ast.unparse(site.receiver)
    if site.method == "synchronize":
        return "a copy, without the lock"
    if site.method == "join" and "thread" in receiver:
        return "the thread to end, without the lock"
    if site.method not in ("wait", "wait_for") or len(site.arguments) != 2 or site.where.startswith("state."):
        return None
    predicate = site.arguments[0]
    condition = ast.unparse(predicate.body if isinstance(predicate, ast.Lambda) else predicate)
    text = condition.replace("self._", "").replace("self.", "").replace("|", "\\|")
    return f"`{text}`"


def named(method: str) -> set[str]:
    """The names that threads (`spawn`), locks (`lock`) or conditions (`condition`) are made with."""
    sites = [site for folder in SOURCES for site in calls(folder) if site.method == method]
    names = [site.name if method != "condition" else _second_name(site) for site in sites]
    return {name for name in names if name is not None}


def _second_name(site: CallSite) -> str | None:
    return CallSite(site.where, site.method, site.receiver, site.arguments[1:]).name


# -- the page ---------------------------------------------------------------------------------------------------------

PARTS = {
    "states": lambda: f"{states_table()}\n\n{states_mermaid()}",
    "waits": waits_table,
    "checkpoints": checkpoints_table,
}


def rendered(page: str) -> str:
    """The page with every generated part as it should be."""
    for name, part in PARTS.items():
        page = with_block(page, name, part())
    return page


def main() -> None:
    """Write the page and its picture."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(states_svg(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
