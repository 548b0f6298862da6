"""The one bridge to the browser: HTML made in Python, drawn in place, and what the reader does, sent back.

`Live` shows HTML. New HTML changes only what differs, so that focus, selection, scroll positions and what a screen
reader says stay as they are. A control in it carries `data-do` (a button) or `data-set` (an input or select); using one
calls `on_action(name, value)`; a slider tells while it moves, and while it has the focus it is the reader's, unless it
is at its end (`data-live`), which goes on. A button with `data-once` tells not twice within a second; one with
`data-picture` saves its section's chart (see `pictures`); one with `data-copy` copies the text of the element with that
id, and tells `copied` with 1 or nothing. A scroller with `data-tail` keeps to its end until the reader
scrolls away.

`Frame` is the page's heartbeat: the browser answers each `pulse` once it has drawn, which is how a page that is hidden
or slow gets no more than it can take. It also says which theme the page has, and brings files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import panel as pn
import param

from workbench_widgets.theme import THEMES

_LIVE: Final = """
function morph(from, to) {
  const a = [...from.childNodes], b = [...to.childNodes];
  const key = b.length && b[0].dataset ? b[0].dataset.key : undefined;
  if (key !== undefined) {
    const at = a.findIndex(n => n.dataset && n.dataset.key === key);
    if (at > 0) a.splice(0, at).forEach(n => n.remove());
  }
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    const x = a[i], y = b[i];
    if (!x) from.append(y);
    else if (!y) x.remove();
    else if (x.nodeName !== y.nodeName) x.replaceWith(y);
    else if (x.nodeType === 3) { if (x.data !== y.data) x.data = y.data; }
    else { attributes(x, y); if (x.type === 'range') slide(x, y); morph(x, y); }
  }
}
function attributes(x, y) {
  const own = name => name === 'open' && x.nodeName === 'DETAILS';  // the reader's
  for (const {name, value} of y.attributes)
    if (!own(name) && x.getAttribute(name) !== value) x.setAttribute(name, value);
  for (const name of x.getAttributeNames())
    if (!own(name) && !y.hasAttribute(name)) x.removeAttribute(name);
}
const slide = (x, y) => {
  if (x.getRootNode().activeElement !== x || 'live' in y.dataset) x.value = y.getAttribute('value');
};
async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; }
  catch (e) {  // not over plain http to another host, nor in every frame
    const area = document.createElement('textarea'), was = document.activeElement;
    area.value = text; area.style.cssText = 'position:fixed;opacity:0';
    document.body.append(area); area.select();
    const done = document.execCommand('copy');
    area.remove(); if (was) was.focus();
    return done;
  }
}
const atEnd = s => s.scrollHeight - s.scrollTop - s.clientHeight < 24;
export function render({model}) {
  const root = document.createElement('div');
  root.className = 'dt';
  const tails = new WeakMap(), pressed = new WeakMap();
  const draw = () => {
    const made = document.createElement('template');
    made.innerHTML = model.markup;
    morph(root, made.content);
    for (const s of root.querySelectorAll('[data-tail]')) {
      if (!tails.has(s)) {
        tails.set(s, true);
        s.addEventListener('scroll', () => { tails.set(s, atEnd(s)); shown(s); });
      }
      if (tails.get(s)) s.scrollTop = s.scrollHeight;
      shown(s);
    }
  };
  const shown = s => {
    const jump = root.querySelector('[data-tail-of="' + s.id + '"]');
    if (jump) jump.hidden = tails.get(s);
  };
  const tell = (name, value) => model.send_msg({name, value});
  root.addEventListener('click', event => {
    const button = event.target.closest('[data-do],[data-tail-of],[data-picture],[data-copy]');
    if (!button) return;
    for (const input of [...waits.keys()]) flush(input);  // what was typed belongs to what is pressed
    if (button.dataset.picture || 'once' in button.dataset) {  // the second click of two
      if (event.timeStamp - (pressed.get(button) || -1e9) < 1000) return;
      pressed.set(button, event.timeStamp);
    }
    const {picture: kind, file: name} = button.dataset;
    if (kind) return dispatchEvent(new CustomEvent('dtrain-picture', {detail: {button, kind, name}}));
    if (button.dataset.copy) {
      const text = root.querySelector('#' + button.dataset.copy).textContent;
      return copy(text).then(done => tell('copied', done ? '1' : ''));
    }
    if (button.dataset.do) return tell(button.dataset.do, button.value || '');
    const s = root.querySelector('#' + button.dataset.tailOf);
    tails.set(s, true); s.scrollTop = s.scrollHeight; shown(s);
  });
  root.addEventListener('change', event => {
    if (event.target.dataset.set && event.target.nodeName === 'SELECT')
      tell(event.target.dataset.set, event.target.value);
  });
  const waits = new Map();  // inputs whose value is to be told, with what they said last
  const flush = input => {
    const {timer, said} = waits.get(input);
    clearTimeout(timer); waits.delete(input); tell(input.dataset.set, said);
  };
  root.addEventListener('input', event => {
    const input = event.target;  // later the event would name the shadow root's host
    if (!input.dataset.set || input.nodeName === 'SELECT') return;
    const isSlider = input.type === 'range', before = waits.get(input);
    if (before && !isSlider) clearTimeout(before.timer);
    const timer = before && isSlider ? before.timer : setTimeout(() => flush(input), isSlider ? 80 : 200);
    waits.set(input, {timer, said: input.value});
  });
  draw();
  model.on('markup', draw);
  requestAnimationFrame(draw);
  return root;
}
"""
_FRAME: Final = """
export function render({model}) {
  const page = document.documentElement;
  const theme = () => model.send_msg({theme: page.dataset.theme});
  if (page.dataset.auto) theme();
  model.on('where', () => {
    const address = new URL(location.href);
    for (const name of ['rank', 'step', 'at']) address.searchParams.delete(name);
    for (const [name, value] of new URLSearchParams(model.where)) address.searchParams.set(name, value);
    history.replaceState(null, '', address);
  });
  model.on('msg:custom', file => dispatchEvent(new CustomEvent('dtrain-file', {detail: file})));
  new MutationObserver(theme).observe(page, {attributes: true, attributeFilter: ['data-theme']});
  const answer = () => requestAnimationFrame(() => { model.send_msg({}); page.dataset.live = '1'; });
  model.on('pulse', answer);
  if (model.pulse > 1) answer();  // it came while this script was being loaded; the first is in the page
  return document.createElement('span');
}
"""


class Live(pn.custom.JSComponent):
    """See the module. `markup` must be escaped by whoever makes it."""

    markup = param.String()
    _esm = _LIVE

    def __init__(self, *, on_action: Callable[[str, str], None] | None = None, **params: Any) -> None:
        params.setdefault("sizing_mode", "stretch_width")
        super().__init__(**params)  # type: ignore[no-untyped-call]
        self._on_action = on_action

    def _handle_msg(self, data: Any) -> None:
        if self._on_action is not None and isinstance(data, dict):
            self._on_action(str(data.get("name", "")), str(data.get("value", ""))[:1000])


class Frame(pn.custom.JSComponent):
    """See the module. `on_shown` hears that the browser has drawn, `on_theme` that the page's theme is another one."""

    pulse = param.Integer(default=0)
    where = param.String(doc="what the reader points at, for the address: rank=2&step=410&at=93")
    _esm = _FRAME

    def __init__(self, on_shown: Callable[[], None], on_theme: Callable[[str], None]) -> None:
        super().__init__(name="frame")  # type: ignore[no-untyped-call]
        self._on_shown, self._on_theme = on_shown, on_theme

    def send(self, name: str, kind: str, data: str | bytes) -> None:
        """Have the browser save a file."""
        self._send_msg({"name": name, "type": kind, "data": data})

    def _handle_msg(self, data: Any) -> None:
        theme = data.get("theme") if isinstance(data, dict) else None
        if theme in THEMES:
            self._on_theme(theme)
        else:
            self._on_shown()
