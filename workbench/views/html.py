"""What a notebook keeps of a job: a table that needs neither kernel nor server, and turns itself into the live page.

The table is plain HTML in the reader's own colours (JupyterLab's variables, else inherited ones; no background): it is
readable in light and dark, on GitHub and in nbconvert's output. In JupyterLab the script finds the live page behind
Jupyter's own address and login and puts it in the table's place; where it cannot, one line says what to do. Nothing of
the machine is in it: no token, port or path. The script is the same for every job; it takes the job from the element
it stands behind, so that two outputs of one job do not meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Final
from urllib.parse import urlencode

from workbench.feed import JobSummary, PoolStatus
from workbench.views.gradients import Agreement, GradientsView, agreement_line, strip
from workbench.views.job import JobView
from workbench.views.sides import Side, asked_table, outcome_table
from workbench.views.statistics import statistics_line
from workbench.views.story import attempts_table, story_lines
from workbench.views.table import (
    NO_JOB,
    NO_WORKER,
    Column,
    Table,
    headline,
    jobs_table,
    notes,
    pool_line,
    progress_line,
    rank_table,
    workers_table,
)
from workbench.views.wording import Clock

HEIGHT: Final = 440  # px of the live page
ATTEMPTS: Final = 12  # in a snapshot; dtrain timeline has all
REASON: Final = 1000  # characters of one sentence
_ADDRESS: Final = re.compile(r"\b(?:tls|tcp|ucx|https?)://([^\s:/]+):\d+")
_PATH: Final = re.compile(r"(?<![\w.…/])/(?:[^\s/'\":,;()]+/)+([^\s/'\":,;()]+)")
_STYLE: Final = """<style>
.dtrain-view{color:var(--jp-ui-font-color1,inherit);font-size:var(--jp-ui-font-size1,13px);line-height:1.5;overflow-x:auto}
.dtrain-view table{border-collapse:collapse;margin:6px 0;font-variant-numeric:tabular-nums}
.dtrain-view caption{text-align:left;color:var(--jp-ui-font-color2,inherit);padding:2px 0}
.dtrain-view th,.dtrain-view td{padding:2px 10px 2px 0;text-align:left;white-space:nowrap;color:inherit;\
background:none;border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.4))}
.dtrain-view th.n,.dtrain-view td.n{text-align:right}
.dtrain-view tr.dtrain-marked>*{font-weight:bold;border-bottom:2px solid currentColor}
.dtrain-view p{margin:2px 0}
.dtrain-strip{margin:4px 0;line-height:1.25}
</style>"""
_SCRIPT: Final = """<script>(function(){
var me=document.currentScript,roots=me&&me.previousElementSibling&&me.previousElementSibling.matches('.dtrain-job')?
[me.previousElementSibling]:Array.from(document.querySelectorAll('.dtrain-job'));
var config=document.getElementById('jupyter-config-data');if(!config)return;
var base;try{base=JSON.parse(config.textContent).baseUrl||'/'}catch(e){return}
if(base.slice(-1)!=='/')base+='/';
function theme(){var light=document.body.dataset.jpThemeLight;
return (light===undefined?matchMedia('(prefers-color-scheme: dark)').matches:light==='false')?'dark':'light'}
roots.forEach(function(root){
if(root.dataset.started)return;root.dataset.started='1';
var id=root.dataset.dtrainJob||'',page=root.dataset.dtrainPage||'',file=root.dataset.dtrainFile||'',\
note=root.querySelector('.dtrain-note');
var snapshot=root.querySelector('.dtrain-snapshot');
var waits=[0,1000,2000,4000,8000,15000,30000],tries=0;
function live(){
var f=document.createElement('iframe');
f.title=file?'saved session':id?'live view of job '+id:page?'jobs beside each other':'live list of jobs';
f.src=base+'dtrain/'+(id?'job?id='+encodeURIComponent(id)+'&':page?page+'&':'?')+'theme='+theme();
f.style.cssText='width:100%;height:HEIGHTpx;border:0';
snapshot.hidden=true;note.hidden=true;root.appendChild(f);
var watch=new MutationObserver(function(){if(!f.isConnected){watch.disconnect();return}
f.contentWindow.postMessage({dtrainTheme:theme()},location.origin)});
watch.observe(document.body,{attributes:true,attributeFilter:['data-jp-theme-light']})}
function look(){
if(!root.isConnected&&tries)return;tries++;
fetch(base+'dtrain/healthz'+(file?'?file='+encodeURIComponent(file):''),{credentials:'same-origin',cache:'no-store'}).then(function(r){
if(!r.ok||r.redirected)throw r.status;live()}).catch(function(){
if(tries>2){note.textContent='This is how it stood then. The live view cannot be reached: '+\
(file?'show it again with %dtrain dashboard FILE':'start it with %dtrain up')+\
(id?', or follow the job in a terminal with: dtrain attach '+id:'');note.hidden=false}
if(tries<waits.length)setTimeout(look,waits[tries])})}
look()})})()</script>""".replace("HEIGHT", str(HEIGHT))


def snapshot_html(view: JobView, *, file: str | None = None) -> str:
    """The job as it is now; turns itself into the live page in JupyterLab. Under 50 KB at any number of ranks.

    `file`: the job is of a saved session, which the live pages know by that key; '' where they do not show it.
    """
    lines = [progress_line(view), *notes(view), *(story_lines(view.timeline) if view.timeline is not None else [])]
    ranks = table_html(rank_table(view)) if view.rows else ""
    if view.failure is not None and view.failure.rank is not None and file is None:
        lines.append(f"its log: %dtrain logs {view.job_id} -r {view.failure.rank}")
    about = f"{_paragraphs(lines)}{_gradients(view.gradients)}{ranks}{_attempts(view)}"
    body = f'<p role="status"><strong>{_text(headline(view))}</strong></p>{about}'
    if file is None:
        return _live(body, view.job_id)
    return _live(body, page=f"job?{urlencode({'id': f'{file}:{view.job_id}'})}", file=file) if file else _view(body)


def snapshot_jobs_html(jobs: Sequence[JobSummary], clock: Clock, *, is_live: bool = False) -> str:
    """The list of jobs; `is_live`: it turns itself into the page of all jobs. `clock` says when they were launched."""
    body = table_html(jobs_table(jobs, clock)) if jobs else _paragraphs([NO_JOB])
    return _live(body) if is_live else _view(body)


def snapshot_saved_html(head: str, jobs: Sequence[JobSummary], clock: Clock, *, file: str) -> str:
    """A saved session: what it is, and its jobs. `file` as in `snapshot_html`."""
    body = f"{_paragraphs([head])}{table_html(jobs_table(jobs, clock))}"
    return _live(body, page=f"?{urlencode({'file': file})}", file=file) if file else _view(body)


def snapshot_sides_html(sides: Sequence[Side], ids: Sequence[str] = ()) -> str:
    """Jobs beside each other, as tables; `ids`: as the live page calls them, which the tables then turn into."""
    tables = [table for table in (outcome_table(sides), asked_table(sides)) if table.length]
    body = "".join(table_html(table) for table in tables)
    return _live(body, page="compare?" + urlencode([("id", one) for one in ids])) if ids else _view(body)


def snapshot_pool_html(pool: PoolStatus) -> str:
    """A pool with its workers and queue, without script."""
    workers = table_html(workers_table(pool, with_address=False)) if pool.workers else _paragraphs([NO_WORKER])
    queue = table_html(_queue_table(pool)) if pool.waiting else ""
    return _view(f"<p><strong>{_text(pool_line(pool))}</strong></p>{workers}{queue}")


def _gradients(view: GradientsView) -> str:
    """A line or two, and ranks by time where they did not all agree."""
    lines = [line for line in (agreement_line(view), statistics_line(view.statistics)) if line]
    rows = strip(view)
    if not rows:
        return _paragraphs(lines)
    marks = "".join(f"{_text(row)}\n" for row in rows)
    return f'{_paragraphs(lines)}<pre class="dtrain-strip" role="img" aria-label="{_aria(view)}">{marks}</pre>'


def _aria(view: GradientsView) -> str:
    bad = [lane.label for lane in view.lanes if lane.worst not in (Agreement.AGREES, Agreement.UNCHECKED)]
    return _text(f"ranks by time; not in agreement: {', '.join(bad)}")


def _attempts(view: JobView) -> str:
    """The newest attempts, once there is more than the first."""
    timeline = view.timeline
    if timeline is None or len(timeline.attempts) < 2:
        return ""
    return table_html(attempts_table(timeline, most=ATTEMPTS))


def _queue_table(pool: PoolStatus) -> Table:
    jobs, reasons = zip(*pool.waiting, strict=True)
    return Table("Waiting for slots", (Column("job", False, 0, jobs), Column("why", False, 0, reasons)))


def _view(body: str) -> str:
    return f'{_STYLE}\n<div class="dtrain-view">{body}</div>'


def _live(body: str, job_id: str = "", page: str = "", file: str = "") -> str:
    which = f' data-dtrain-page="{escape(page, quote=True)}"' if page else ""
    which += f' data-dtrain-file="{escape(file, quote=True)}"' if file else ""
    return (
        f'{_STYLE}\n<div class="dtrain-view dtrain-job" data-dtrain-job="{escape(job_id, quote=True)}"{which}>'
        f'<div class="dtrain-snapshot">{body}</div><p class="dtrain-note" role="status" hidden></p></div>{_SCRIPT}'
    )


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{_text(line)}</p>" for line in lines if line)


def table_html(table: Table) -> str:
    """Escaped, its first column naming the rows."""
    heads = "".join(f'<th scope="col"{_class(column)}>{_text(column.title)}</th>' for column in table.columns)
    rows = "".join(_row(table, index) for index in range(table.length))
    return (
        f"<table><caption>{_text(table.caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _row(table: Table, index: int) -> str:
    first, *rest = table.columns
    marked = ' class="dtrain-marked"' if index in table.marked else ""
    cells = "".join(f"<td{_class(column)}>{_text(column.cells[index])}</td>" for column in rest)
    return f'<tr{marked}><th scope="row"{_class(first)}>{_text(first.cells[index])}</th>{cells}</tr>'


def _class(column: Column) -> str:
    return ' class="n"' if column.is_number else ""


def _text(text: str) -> str:
    """Escaped, and without what only this machine understands."""
    text = _PATH.sub(r"…/\1", _ADDRESS.sub(r"\1", text))
    return escape(text if len(text) <= REASON else text[: REASON - 1] + "…")
