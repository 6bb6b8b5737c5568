"""The ``cb-loadtest`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cb_loadtest.cases import default_cases_path
from cb_loadtest.converters import Converted, convert_fanoutqa, convert_longbench_v2
from cb_loadtest.guard import guarded
from cb_loadtest.load.command import capacity as capacity_command
from cb_loadtest.load.command import run as run_command
from cb_loadtest.planning.command import plan as plan_command
from cb_loadtest.planning.command import simulate as simulate_command
from cb_loadtest.recall import RecallOptions, run_recall
from cb_loadtest.recall_plan import (
    IRRELEVANT_QUERY,
    RATIOS,
    SELECTORS,
    SERVER_WORDING,
    AnswerPlan,
    Plan,
    PlanError,
    Selector,
    parse_list,
    parse_sizes,
)
from cb_loadtest.recall_report import read_report
from cb_loadtest.recall_tables import terminal_view, write_markdown
from cb_loadtest.receiver import ANSWER_TOKENS, RECEIVER_PROMPT
from cb_loadtest.reporting.command import report as report_command
from cb_sglang.errors import CacheBackError
from cb_sglang.templates import check_template

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
convert_app = typer.Typer(no_args_is_help=True, help="Published data sets as case files.")
app.add_typer(convert_app, name="convert")
app.command("run")(run_command)
app.command("capacity")(capacity_command)
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("report")(report_command)


@app.callback()
def _main() -> None:
    """What survives of the evidence, measured on a server over HTTP."""


@app.command()
def recall(
    base_url: Annotated[
        str | None, typer.Option(help="Use this server (CB_SGLANG_API_KEY is sent), instead of starting one.")
    ] = None,
    cases: Annotated[Path | None, typer.Option(help="Case file (JSONL); the shipped one by default.")] = None,
    selectors: Annotated[
        str, typer.Option(help="Comma-separated; options as in cacheback+alpha=4+sink_free.")
    ] = ",".join(SELECTORS),
    ratios: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated; {','.join(f'{r:g}' for r in RATIOS)} unless budgets are given."),
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Comma-separated fixed budgets, in positions a context.")] = None,
    query_template: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Wording around the query, holds {{query}} once; repeat to compare. '{SERVER_WORDING}': the server's."
        ),
    ] = None,
    ablation: Annotated[bool, typer.Option(help="Also ask with a fixed irrelevant query.")] = False,
    ablation_query: Annotated[str, typer.Option(help="The irrelevant query.")] = IRRELEVANT_QUERY,
    answer: Annotated[
        bool, typer.Option(help="Also let a receiver answer; decodes text reports, so it is slow.")
    ] = False,
    answer_selectors: Annotated[
        str | None, typer.Option(help="Whose messages the receiver reads; the default selector's.")
    ] = None,
    answer_ratios: Annotated[str, typer.Option(help="Sizes of those messages, and of the text reports.")] = "8",
    answer_tokens: Annotated[int, typer.Option(min=1, max=8_192, help="Longest answer, in tokens.")] = ANSWER_TOKENS,
    receiver_prompt: Annotated[str, typer.Option(help="What the receiver reads last; holds {query} once.")] = (
        RECEIVER_PROMPT
    ),
    out: Annotated[Path, typer.Option(help="Results as JSON; journal and plots lie next to it.")] = Path(
        "build/recall.json"
    ),
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the tables there, between its marks if it has them.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Write PNG plots next to the JSON.")] = True,
    resume: Annotated[bool, typer.Option(help="Go on with what the journal of a killed run holds.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first cases of the file.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 31) - 1, help="Of `random` and of the bootstrap.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a sign of the server.")] = 3_600.0,
) -> None:
    """Measure how much of the evidence each selector's messages keep.

    Prints tables with paired bootstrap intervals and writes JSON and plots. A case that fails is reported and left
    out. Exit status: 0, 1 when the run failed, 2 for unusable arguments, 130 after Ctrl-C.
    """
    try:
        sizes = parse_sizes(
            parse_list(ratios, "--ratios") or ([] if budgets else [str(r) for r in RATIOS]),
            parse_list(budgets, "--budgets"),
        )
        chosen = tuple(map(Selector.parse, parse_list(selectors, "--selectors")))
        wordings = tuple(
            None if wording == SERVER_WORDING else check_template(wording)
            for wording in query_template or [SERVER_WORDING]
        )
        plan = Plan(chosen, sizes, wordings, ablation_query if ablation else None, seed)
        if answer:
            readers = parse_list(answer_selectors, "--answer-selectors")
            answer_plan = AnswerPlan(
                selectors=tuple(map(Selector.parse, readers)) if readers else (plan.default,),
                sizes=parse_sizes(parse_list(answer_ratios, "--answer-ratios"), []),
                max_new_tokens=answer_tokens,
                prompt=check_template(receiver_prompt),
            )
            plan = Plan(chosen, sizes, wordings, plan.irrelevant, seed, answer_plan)
    except (PlanError, CacheBackError) as error:
        raise typer.BadParameter(str(error)) from None

    def run(console: Console) -> None:
        run_recall(
            RecallOptions(
                plan=plan,
                cases=cases or default_cases_path(),
                out=out,
                base_url=base_url,
                limit=limit,
                resume=resume,
                markdown=markdown,
                plots=plots,
                timeout=timeout,
                argv=sys.argv[1:],
            ),
            console,
        )

    guarded(run, f"add --resume to go on from {out.with_suffix('.units.jsonl')}")


@app.command()
def table(
    report: Annotated[Path, typer.Argument(help="The JSON of a recall run.")] = Path("build/recall.json"),
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots whose names begin like this.")] = None,
) -> None:
    """Print the tables of a finished recall run again, or write them and the plots elsewhere."""

    def run(console: Console) -> None:
        found = read_report(report)
        if markdown is not None:
            write_markdown(markdown, found)
        if plots is not None:
            from cb_loadtest.plots import write_plots

            write_plots(found, plots)
        console.print(terminal_view(found))

    guarded(run)


_In = Annotated[Path, typer.Argument(metavar="IN", help="The published JSON file.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="The case file; its documents go into a folder next to it.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="Stop after this many cases.")]
_MaxChars = Annotated[int | None, typer.Option(min=1, help="Leave out cases with a longer context, in characters.")]


@convert_app.command()
def fanoutqa(
    source: _In,
    target: _Out,
    evidence: Annotated[Path, typer.Option(help="Folder with the pages' texts, as PAGEID-dated.md or PAGEID.txt.")],
    limit: _Limit = None,
    max_chars: _MaxChars = None,
) -> None:
    """FanOutQA's dev set: several pages a question, gold where a page first states a sub-answer."""
    guarded(
        lambda console: _say(
            console, convert_fanoutqa(source, target, evidence, limit=limit, max_chars=max_chars), target
        )
    )


@convert_app.command("longbench-v2")
def longbench_v2(source: _In, target: _Out, limit: _Limit = None, max_chars: _MaxChars = None) -> None:
    """LongBench v2: one long context a question, four choices, no gold (answers only)."""
    guarded(
        lambda console: _say(console, convert_longbench_v2(source, target, limit=limit, max_chars=max_chars), target)
    )


def _say(console: Console, made: Converted, target: Path) -> None:
    console.print(
        f"{made.cases} cases, {made.documents} documents, {made.gold} gold spans, in {target}", soft_wrap=True
    )
    for reason, count in made.left_out.items():
        console.print(f"left out: {count} with {reason}", soft_wrap=True)


if __name__ == "__main__":
    app()
