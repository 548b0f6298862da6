"""The looks: one stylesheet for what panels show (each has its own shadow root), one for the page around them."""

from __future__ import annotations

from typing import Final

from workbench_widgets.theme import FONT, LOG_HEIGHT, MONO, PHASE_COLOURS, SMALL_SIZE, TEXT_SIZE, css_variables

_COLOURS: Final = {**PHASE_COLOURS, "other": "var(--dt-other)"}
_PHASES: Final = "".join(f".phase-{name}{{background:{value}}}" for name, value in _COLOURS.items())
_TONES: Final = "".join(
    f".tone-{name}{{color:var(--dt-{name})}}" for name in ("accent", "good", "warn", "bad", "muted")
)

PANEL: Final = f"""
.dt{{color:var(--dt-text);font:{TEXT_SIZE}/1.45 {FONT}}}
*{{box-sizing:border-box}}
h1,h2,p,dl,dd,dt,ul{{margin:0;padding:0;font-size:inherit}}
h2{{font-size:{SMALL_SIZE};font-weight:600;color:var(--dt-muted)}}
.hidden{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}}
.muted{{color:var(--dt-muted)}} .small{{font-size:{SMALL_SIZE}}}
{_TONES}
.phase{{font-weight:600;white-space:nowrap}}
a{{color:var(--dt-accent)}}
pre,.mono{{font:{SMALL_SIZE}/1.45 {MONO};font-variant-numeric:tabular-nums}}
pre{{margin:6px 0 0;padding:8px 10px;background:var(--dt-raised);border:1px solid var(--dt-line);border-radius:4px;
 white-space:pre-wrap;overflow-wrap:anywhere;max-height:320px;overflow:auto}}
summary{{cursor:pointer}}
:focus-visible{{outline:2px solid var(--dt-accent);outline-offset:1px;border-radius:3px}}

.head{{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 12px}}
.head h1{{font-size:15px;font-weight:600}}
.stats{{display:flex;flex-wrap:wrap;gap:4px 28px;margin:8px 0 2px}}
.stats>div{{min-width:76px}} .stats dt{{font-size:{SMALL_SIZE};color:var(--dt-muted)}}
.stats dd{{font-size:17px;line-height:1.25;font-variant-numeric:tabular-nums;white-space:nowrap}}
.stats small{{font-size:{SMALL_SIZE};color:var(--dt-muted)}}
.bar{{height:4px;border-radius:2px;background:var(--dt-line);overflow:hidden;margin:6px 0 2px}}
.bar>i{{display:block;height:100%;background:var(--dt-accent)}}
.notice{{margin:6px 0 0;padding:6px 10px;border-left:3px solid var(--dt-warn);background:var(--dt-raised)}}
.notice.bad{{border-color:var(--dt-bad)}} .notice.good{{border-color:var(--dt-good)}}
.notice.quiet{{border-color:var(--dt-line)}}

button,select,input{{font:inherit;color:var(--dt-text);background:var(--dt-page);border:1px solid var(--dt-line);
 border-radius:4px;height:26px;padding:0 10px}}
button{{cursor:pointer}} button:hover,select:hover{{border-color:var(--dt-muted)}}
button[aria-disabled=true]{{color:var(--dt-muted);cursor:default;border-color:var(--dt-line)}}
button.danger{{color:var(--dt-bad)}}
button.sure{{color:var(--dt-page);background:var(--dt-bad);border-color:var(--dt-bad)}}
.tools input{{flex:1 1 90px;min-width:90px;max-width:260px}}
input::placeholder{{color:var(--dt-muted);opacity:1}} select{{padding:0 4px}}
.tools{{margin-bottom:6px;display:flex;flex-wrap:wrap;gap:6px;align-items:center}}

.scroll{{overflow:auto;max-height:340px}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
th,td{{padding:4px 12px 4px 0;text-align:left;font-weight:400;white-space:nowrap;
 border-bottom:1px solid var(--dt-line)}}
.now{{min-width:21ch}}
.scroll{{container-type:inline-size}} .scroll+.scroll{{margin-top:8px}}
@container(max-width:840px){{.need7{{display:none}}}}
@container(max-width:770px){{.need6{{display:none}}}}
@container(max-width:700px){{.need4{{display:none}}}}
@container(max-width:580px){{.need3,.need5{{display:none}}}}
thead th{{color:var(--dt-muted);font-size:{SMALL_SIZE};position:sticky;top:0;background:var(--dt-page);z-index:1}}
th.n,td.n{{text-align:right}} td.wide{{white-space:normal}}
tbody tr.marked>*{{background:var(--dt-mark)}}
tbody tr.marked>:last-child,tbody tr.marked>th{{font-weight:600}}
tbody th{{padding-left:4px}} thead th:first-child{{padding-left:4px}}
.dot{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;vertical-align:-1px}}
.shares{{display:flex;width:100%;min-width:130px;max-width:420px;height:16px;border-radius:3px;overflow:hidden}}
.shares>i{{display:block;overflow:hidden;font:11px/16px {FONT};color:#000;text-align:center;white-space:nowrap}}
.shares>i+i{{border-left:1px solid var(--dt-page)}}
{_PHASES}
.legend{{display:flex;flex-wrap:wrap;gap:2px 12px;margin-top:4px;font-size:{SMALL_SIZE};color:var(--dt-muted)}}
.swatch{{margin-right:5px;vertical-align:-1px}} .charthead .legend{{margin:2px 0 0}}
.legend i{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px;vertical-align:-1px}}

.log{{height:{LOG_HEIGHT}px;overflow:auto;background:var(--dt-raised);border:1px solid var(--dt-line);border-radius:4px;
 padding:4px 0;font:{SMALL_SIZE}/1.5 {MONO};position:relative}}
.log>div{{display:flex;gap:10px;padding:0 10px}}
.log .who{{flex:0 0 auto;min-width:7ch;color:var(--dt-muted);white-space:nowrap;user-select:none}}
.log .what{{white-space:pre-wrap;overflow-wrap:anywhere;min-width:0}}
.log .level1 .what{{color:var(--dt-warn)}} .log .level2 .what{{color:var(--dt-bad)}}
.log .empty{{color:var(--dt-muted);font-family:{FONT};padding:4px 10px}}
.logwrap{{position:relative}}
.few{{width:76px;min-width:0 !important;flex:0 0 auto !important}}
.tools label{{display:inline-flex;gap:6px;align-items:center}}
td button{{height:22px;padding:0 8px}}
.story{{margin:2px 0 0;padding:0;list-style:none}} .story li{{padding:1px 0}}
.key{{display:inline-flex;align-items:center;justify-content:center;min-width:14px;height:14px;margin-right:5px;
 border-radius:2px;font:600 10px/14px {FONT};vertical-align:-2px}}
.key.mark{{border:1px solid currentColor;border-radius:7px;background:none}}
.shares.wide{{max-width:none;margin:4px 0 8px}} .events{{max-height:230px}} .events th,.events td{{vertical-align:top}}
.findings{{list-style:none;display:grid;gap:8px}} .findings li{{padding:6px 10px;border-left:3px solid var(--dt-line);
 background:var(--dt-raised)}} .findings button:not(.pick){{margin-top:4px}}
.scale{{display:inline-flex;align-items:center;gap:6px;font-size:{SMALL_SIZE};color:var(--dt-muted)}}
.scale i{{display:inline-block;width:120px;height:10px;border-radius:2px}} .charthead .tools{{margin:4px 0}}
.hint{{margin-left:auto}}
.tools input[type=range]{{flex:4 1 200px;max-width:none;padding:0;border:0;accent-color:var(--dt-accent)}}
.moment{{min-width:9ch;text-align:right;font-variant-numeric:tabular-nums}}
.done{{display:inline-flex;align-items:center;gap:8px}} .done .bar{{width:64px;margin:0}}
.why{{display:block;min-width:20ch;white-space:normal;overflow-wrap:anywhere}} pre+.tools{{margin-top:6px}}
.share{{min-width:5ch}} .tall{{max-height:none}}
.pager{{margin:8px 0 0}} .tools[role=search]{{margin:8px 0}}
tbody tr.chosen>*{{background:var(--dt-raised)}} tbody tr.chosen>:first-child{{box-shadow:inset 3px 0 var(--dt-accent)}}
button.pick{{border:0;background:none;height:auto;padding:0 2px;font:inherit;color:inherit}}
button.box{{font-size:15px;line-height:1;margin-right:6px}}
a.button{{border:1px solid var(--dt-accent);border-radius:4px;padding:2px 10px;text-decoration:none}}
button.pick:hover{{text-decoration:underline}}
details.save{{width:fit-content;margin:var(--dt-lift,-20px) 0 0 auto;padding:0!important;pointer-events:auto}}
details.save summary{{text-align:right}} details.save .tools{{margin:4px 0 0}}
details[open]{{padding-bottom:20px}}
.keeping{{justify-content:flex-end;margin:0}}
.launch .tools{{margin:6px 0}} .launch input:not(.few){{width:220px}}
h2.next{{margin-top:14px}} .sides th{{vertical-align:top}}
.sides td{{white-space:normal;vertical-align:top;min-width:16ch}}
.jump{{position:absolute;right:14px;bottom:10px}}
"""

PAGE: Final = f"""
{css_variables()}
html,body{{margin:0;padding:0;background:var(--dt-page);color:var(--dt-text);font:{TEXT_SIZE}/1.45 {FONT}}}
main{{padding:10px 12px 12px;max-width:1500px;margin:0 auto}}
section{{margin-top:12px;min-width:0}} .saves{{pointer-events:none}}
section[aria-label=Resources],section[aria-label=Gradients]{{--dt-lift:0}}
h2{{margin:0 0 4px;font-size:{SMALL_SIZE};font-weight:600;color:var(--dt-muted)}}
.top{{display:flex;flex-wrap:wrap;gap:6px 24px;align-items:flex-start}}
.top>:first-child{{flex:1 1 420px;min-width:0}} .top>:last-child{{flex:0 1 auto;max-width:100%}}
.two{{display:grid;grid-template-columns:minmax(0,1fr);gap:0 24px}}
@media(min-width:740px){{.two{{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}}}}
.time{{position:sticky;top:0;z-index:5;padding-top:6px;background:var(--dt-page);
 border-bottom:1px solid var(--dt-line)}}
[inert]{{opacity:.4}} html:not([data-begun]) section{{visibility:hidden}}
.bk-Tooltip{{--tooltip-color:var(--dt-raised);--tooltip-text:var(--dt-text);--tooltip-border:var(--dt-muted)}}
.first{{display:flex;flex-wrap:wrap;gap:4px 24px;justify-content:space-between;align-items:center;margin-bottom:6px}}
.first>:nth-child(2):not(:last-child){{flex:1 1 200px}}
nav{{font-size:{SMALL_SIZE}}} nav a{{color:var(--dt-accent);text-decoration:none}}
nav a:hover{{text-decoration:underline}} :focus-visible{{outline:2px solid var(--dt-accent);outline-offset:1px}}
#state{{margin:0}} #state:not(:empty){{margin-bottom:8px;padding:6px 10px;border-left:3px solid var(--dt-warn);
 background:var(--dt-raised)}}
"""
