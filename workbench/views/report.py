"""A page about jobs that needs nothing else: no script, no network, no server. Pure; made of what panels are made of.

Every picture has its words: a sentence, and a table that opens. What is long (code, a story of many restarts) is cut
and says so, so that a page stays under a megabyte for any job.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

import msgspec

from workbench.spec import EntrypointKind, JobSpec
from workbench.views.charts import Series, chart, lanes
from workbench.views.compare import Trace, curve
from workbench.views.gradients import agreement_line
from workbench.views.html import table_html
from workbench.views.job import JobView
from workbench.views.story import attempts_table, since, story_lines
from workbench.views.table import Column, Table, checkpoints_table, headline, notes, progress_line, rank_table
from workbench.views.wording import count, plural, span

CODE: Final = 60_000  # characters of one job
STORY: Final = 100  # attempts, and marks
MOST_JOBS: Final = 20  # with all of their pictures
_STYLE: Final = """
:root{color-scheme:light dark;--page:#fff;--text:#1c1e21;--muted:#5b6168;--line:#dcdfe3;--s0:#0072B2;--s1:#D55E00;
--s2:#009E73;--s3:#7A5195}
@media(prefers-color-scheme:dark){:root{--page:#111;--text:#e6e6e6;--muted:#a3a9b0;--line:#34383c;--s0:#56B4E9;
--s1:#E69F00;--s2:#3ecf9f;--s3:#B39DDB}}
body{font:14px/1.5 system-ui,sans-serif;background:var(--page);color:var(--text);max-width:880px;margin:0 auto;
padding:16px}
h1{font-size:22px}h2{font-size:18px;border-top:1px solid var(--line);padding-top:16px}h3{font-size:15px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}caption{text-align:left;color:var(--muted)}
th,td{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid var(--line);font-weight:400;vertical-align:top}
th{color:var(--muted)}.n{text-align:right}.dtrain-marked>*{font-weight:700}figure{margin:12px 0}.scroll{overflow-x:auto}
figcaption,summary{color:var(--muted)}svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--text)}
polyline,path{fill:none;stroke-width:1.6}.axis{stroke:var(--line)}.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}
.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.key{width:28px;height:8px}.legend{color:var(--muted);margin:2px 0}
.legend span{margin-right:12px}.legend i{display:inline-block;width:12px;height:10px;border:1px solid var(--muted)}
.mark{font-weight:700;text-anchor:middle}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}
.slots{fill:#c5cad0;background:#c5cad0}.launching{fill:#9ad0f0;background:#9ad0f0}.running{fill:#7d9bb0;background:#7d9bb0}
.stepping{fill:#009E73;background:#009E73}.checkpointing{fill:#cc79a7;background:#cc79a7}
.waiting{fill:#e5d96a;background:#e5d96a}.stalled{fill:#d55e00;background:#d55e00}.dead{fill:#444;background:#444}
.finished{fill:#d0d4d8;background:#d0d4d8}.recovering{fill:#f0b04a;background:#f0b04a}
.stopping{fill:#8a8f95;background:#8a8f95}@media print{details>*{display:block}}
"""


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """One job: what panels show, its curves, its code by name."""

    view: JobView
    trace: Trace
    code: dict[str, str] = {}


def report_html(
    title: str, facts: Sequence[tuple[str, str]], chapters: Sequence[Chapter], left_out: Sequence[str]
) -> str:
    """The page. `facts` say what all jobs have in common: when, where, versions."""
    rows = _pairs("", [*facts, *([("left out", "; ".join(left_out))] if left_out else [])])
    contents = "".join(
        f'<li><a href="#{_text(c.view.job_id)}">{_text(c.view.job_id)}</a>: {_text(headline(c.view))}</li>'
        for c in chapters
    )
    body = "".join(_chapter(chapter) for chapter in chapters[:MOST_JOBS])
    more = f"<p>and {plural(len(chapters) - MOST_JOBS, 'job')} more</p>" if len(chapters) > MOST_JOBS else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><main><h1>{_text(title)}</h1>{rows}"
        f'<nav aria-label="Jobs"><ul>{contents}</ul></nav>{body}{more}</main></body></html>\n'
    )


def _chapter(chapter: Chapter) -> str:
    view, trace = chapter.view, chapter.trace
    told = [headline(view), progress_line(view), view.reason, *notes(view), agreement_line(view.gradients)]
    if view.timeline is not None:
        told += story_lines(view.timeline, most=10)
    parts = [f'<section aria-label="{_text(view.job_id)}"><h2 id="{_text(view.job_id)}">{_text(view.job_id)}</h2>']
    parts += [f"<p>{_text(line)}</p>" for line in dict.fromkeys(told) if line]
    parts.append(_curves(view, trace))
    if view.timeline is not None:
        parts += [lanes(view.timeline), _scroll(table_html(attempts_table(view.timeline, most=STORY))), _marks(view)]
    if view.rows:
        parts.append(_scroll(table_html(rank_table(view))))
    if view.checkpoints:
        parts.append(_scroll(table_html(checkpoints_table(view.checkpoints, view.now))))
    parts.append(_scroll(_pairs("What was asked for", _fields(trace.spec))))
    parts += [_code(name, text) for name, text in _fitting(chapter.code)]
    return "".join([*parts, "</section>"])


def _curves(view: JobView, trace: Trace) -> str:
    start = view.submitted_at

    def after(x: float) -> str:
        return span(x - start)

    def by_time(label: str, name: str) -> Series:
        return Series(label, [(p.start, getattr(p, name)) for p in view.series if getattr(p, name) is not None])

    loss = Series("loss", [(float(step), value) for step, value in curve(trace).items()])
    times = [by_time("slowest rank", "slowest"), by_time("mean", "step_time"), by_time("fastest rank", "fastest")]
    return "".join(
        [
            chart("Loss by step, mean of the ranks", "", [loss], lambda step: f"step {count(step)}"),
            chart("Throughput of all ranks", " samples/s", [by_time("samples/s", "samples_per_s")], after),
            chart("Step time", " s", times, after),
        ]
    )


def _marks(view: JobView) -> str:
    timeline = view.timeline
    if timeline is None or not timeline.marks:
        return ""
    clock = since(timeline.start)
    shown = timeline.marks[-STORY:]
    table = Table(
        f"What happened{', the newest' if len(timeline.marks) > STORY else ''}",
        (
            Column("when", False, 0, tuple(clock(mark.time) for mark in shown)),
            Column("what", False, 0, tuple(mark.kind.value for mark in shown)),
            Column("", False, 0, tuple(mark.title[:300] for mark in shown)),
        ),
    )
    return f"<details><summary>all that happened</summary>{_scroll(table_html(table))}</details>"


def _fields(spec: JobSpec) -> list[tuple[str, str]]:
    """What differs from the defaults, code apart."""
    told = msgspec.to_builtins(spec)
    told["env"] = list(told.get("env") or {})  # names only: a value may be a secret
    found = [(name, value) for name, value in told.items() if name not in ("source", "payload")]
    shown = [(name, " ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in found]
    kind = spec.kind.value if spec.kind is not EntrypointKind.SCRIPT else "script"
    return [("kind", kind), *((name, value[:500]) for name, value in shown if name != "kind" and value)]


def _fitting(code: dict[str, str]) -> list[tuple[str, str]]:
    room, found = CODE, []
    for name, text in code.items():
        cut = text[:room]
        found.append((name, cut if len(cut) == len(text) else f"{cut}\n… {len(text) - len(cut):,} more characters"))
        room -= len(cut)
    return found


def _code(name: str, text: str) -> str:
    return f"<details><summary>{_text(name)}</summary><pre>{_text(text)}</pre></details>"


def _pairs(caption: str, pairs: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in pairs)
    head = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f"<table>{head}{rows}</table>" if rows else ""


def _scroll(table: str) -> str:
    return f'<div class="scroll">{table}</div>' if table else ""


def _text(text: str) -> str:
    return escape(text, quote=True)
