"""The page around the panels: what loads first, says that it is loading, and tells when the server is gone.

Everything comes from this server by relative addresses, so that any prefix will do and no other host is asked.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlencode

from workbench_widgets.pictures import SCRIPT
from workbench_widgets.style import PAGE
from workbench_widgets.theme import THEMES, known_theme

# The theme comes with the address, later from the notebook around the frame: only its own origin may say.
_SCRIPT: Final = """
(function(){
var page=document.documentElement,state=document.getElementById('state'),main=document.querySelector('main');
function say(text){if(state.textContent!==text)state.textContent=text}
addEventListener('message',function(event){
var theme=event.data&&event.data.dtrainTheme;
if(event.origin===location.origin&&event.source===parent&&(theme==='dark'||theme==='light'))page.dataset.theme=theme});
var slow=setTimeout(function(){if(!page.dataset.live)
say('This takes longer than it should. If nothing comes, reload the page; if that does not help: '+
main.dataset.again)},10000);
new MutationObserver(function(){if(page.dataset.live){clearTimeout(slow);say('');page.dataset.begun='1'}})
.observe(page,{attributes:true,attributeFilter:['data-live']});
function back(){fetch('healthz',{credentials:'same-origin',cache:'no-store'}).then(function(answer){
if(!answer.ok||answer.redirected)throw answer.status;location.reload()}).catch(function(){setTimeout(back,2000)})}
function gone(){say('The live view has lost its server; below is how things stood. It comes back by itself when the \\
server does: '+main.dataset.again+'.');delete page.dataset.live;setTimeout(back,1000);
document.querySelectorAll('[data-acts]').forEach(function(part){part.inert=true})}
function fit(){try{var frame=window.frameElement;
if(frame)frame.style.height=Math.min(TALLEST,Math.max(180,Math.ceil(main.getBoundingClientRect().height)))+'px'}catch(e){}}
new ResizeObserver(fit).observe(main);
var look=setInterval(function(){
var doc=window.Bokeh&&Bokeh.documents&&Bokeh.documents[0];
if(doc){clearInterval(look);doc.on_event('connection_lost',gone)}},100);
})();
"""
# No theme in the address: the system's, also when it changes.
_AUTO: Final = """
(function(){var page=document.documentElement,dark=matchMedia('(prefers-color-scheme: dark)');
function follow(){if(page.dataset.auto)page.dataset.theme=dark.matches?'dark':'light'}
follow();dark.addEventListener('change',follow)})();
"""
_TEMPLATE: Final = """
{% from macros import embed %}
{% block inner_head %}
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title | e }}</title><link rel="icon" href="data:,">
<style>PAGE</style><script>AUTO</script>
{{ bokeh_css if bokeh_css }}
{% endblock %}
{% block inner_body %}
<main data-again="{{ again | e }}">
<p id="state" role="status" aria-live="polite">{{ loading | e }}</p>
BODY
{{ embed(roots.frame) }}
</main>
<script>SCRIPT</script>
{{ bokeh_js if bokeh_js }}
{{ plot_script }}
{% endblock %}
"""
TALLEST: Final = 720  # px that the frame in a notebook grows to; more is scrolled
JOB_BODY: Final = """
<div class="first"><nav><a href=".{{ theme_query | e }}">← all jobs</a></nav><div>{{ embed(roots.keeping) }}</div>
<div>{{ embed(roots.notices) }}</div></div>
<div class="top"><div>{{ embed(roots.header) }}</div><div data-acts>{{ embed(roots.controls) }}</div></div>
<section aria-label="Time" class="time">{{ embed(roots.period) }}</section>
<section aria-label="Findings" data-acts><h2>Findings</h2>{{ embed(roots.findings) }}</section>
<section aria-label="Ranks">{{ embed(roots.ranks) }}</section>
<section aria-label="Failures and recoveries">{{ embed(roots.timeline) }}{{ embed(roots.save_timeline) }}</section>
<div class="two">
<section aria-label="Throughput">{{ embed(roots.throughput) }}{{ embed(roots.save_throughput) }}</section>
<section aria-label="Loss">{{ embed(roots.loss) }}{{ embed(roots.save_loss) }}</section>
</div>
<section aria-label="Ranks over time">{{ embed(roots.heatmap) }}{{ embed(roots.save_heatmap) }}</section>
<div class="two">
<section aria-label="Slowest ranks"><h2>Slowest ranks</h2>{{ embed(roots.stragglers) }}</section>
<section aria-label="Communication"><h2>Communication</h2>{{ embed(roots.communication) }}</section>
<section aria-label="Logs"><h2>Output of the ranks</h2>{{ embed(roots.logs) }}</section>
<section aria-label="Events"><h2>Events</h2>{{ embed(roots.events) }}</section>
</div>
<section aria-label="Resources"><h2>Resources</h2>{{ embed(roots.resources) }}
{{ embed(roots.save_resources) }}</section>
<section aria-label="Gradients"><h2>Do ranks agree?</h2>{{ embed(roots.gradients) }}
{{ embed(roots.save_gradients) }}</section>
<section aria-label="Checkpoints" data-acts><h2>Checkpoints</h2>{{ embed(roots.checkpoints) }}</section>
"""
COMPARE_BODY: Final = """
<div class="first"><nav><a href=".{{ theme_query | e }}">← all jobs</a></nav></div>
{{ embed(roots.head) }}
<div class="two">
<section aria-label="Loss">{{ embed(roots.loss) }}{{ embed(roots.save_loss) }}</section>
<section aria-label="Throughput">{{ embed(roots.throughput) }}{{ embed(roots.save_throughput) }}</section>
</div>
<section aria-label="Differences">{{ embed(roots.tables) }}</section>
"""
LIST_BODY: Final = '<section aria-label="Jobs">{{ embed(roots.jobs) }}</section>'


def template(body: str) -> str:
    """What Panel renders, around the roots that `body` names."""
    return (
        _TEMPLATE.replace("PAGE", PAGE)
        .replace("AUTO", _AUTO)
        .replace("BODY", body)
        .replace("SCRIPT", _SCRIPT + SCRIPT)
        .replace("TALLEST", str(TALLEST))
    )


def variables(theme: str, loading: str, file: str = "") -> dict[str, Any]:
    """What the template needs to know. `file`: the saved session whose jobs "all jobs" are."""
    query = {name: value for name, value in (("file", file), ("theme", theme if theme in THEMES else "")) if value}
    auto = "" if theme in THEMES else ' data-auto="1"'
    return {
        "html_attrs": f'data-theme="{known_theme(theme)}"{auto}',
        "loading": loading,
        "theme_query": f"?{urlencode(query)}" if query else "",
        "again": "show it again with: %dtrain dashboard FILE" if file else "start it with %dtrain up",
    }


def argument(arguments: Any, name: str, default: str = "") -> str:
    """One value of the address' query, as text; the first when there are several."""
    values = (arguments or {}).get(name) or [default.encode()]
    return bytes(values[0]).decode(errors="replace")[:300]


def values(arguments: Any, name: str) -> list[str]:
    """All values of the address' query, each once."""
    return list(dict.fromkeys(value.decode(errors="replace")[:300] for value in (arguments or {}).get(name) or []))


def number(arguments: Any, name: str) -> int | None:
    """A number from the address' query; None for what is none."""
    text = argument(arguments, name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def seconds(arguments: Any, name: str) -> float | None:
    """A time in s from the address' query; None for what is none."""
    text = argument(arguments, name)
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,3})?", text) else None
