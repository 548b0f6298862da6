"""Tells a reader who looks elsewhere that the job failed, recovered or ended: a banner, the tab's title, and a
notification of the browser where the reader has allowed that (a button asks; only a person's click may).

What has happened before the page was opened is not news.
"""

from __future__ import annotations

import json
from typing import Any, Final

import panel as pn
import param

from workbench import JobPhase
from workbench.views.job import JobView
from workbench_widgets.style import PANEL

_SCRIPT: Final = """
export function render({model}) {
  const root = document.createElement('div');
  root.className = 'dt';
  root.innerHTML = '<p class="notice" role="alert" hidden><span></span> <button type="button">Dismiss</button></p>' +
    '<button type="button" class="ask" hidden>Notify me of failures, recoveries and the end</button>';
  const banner = root.querySelector('p'), text = banner.querySelector('span'), ask = root.querySelector('.ask');
  const can = () => window.isSecureContext && 'Notification' in window;
  const title = document.title;
  const offer = () => { ask.hidden = !can() || Notification.permission !== 'default'; };
  const seen = () => { banner.hidden = true; document.title = title; };
  banner.querySelector('button').addEventListener('click', seen);
  ask.addEventListener('click', () => Notification.requestPermission().then(offer));
  let last = model.news;
  model.on('news', () => {
    const before = last; last = model.news;
    if (!before) return;  // the page has just learned how the job stands
    const news = JSON.parse(model.news);
    if (!news.is_told) { seen(); return; }
    text.textContent = news.title + ': ' + news.text;
    banner.classList.toggle('bad', news.is_bad);
    banner.hidden = false;
    document.title = news.title + ' · ' + title;
    if (!can() || Notification.permission !== 'granted' || document.hasFocus()) return;
    try { new Notification(news.title, {body: news.text, tag: news.job_id}); } catch (error) { /* not on phones */ }
  });
  offer();
  return root;
}
"""
TEXT: Final = 300  # characters


class Notices:
    """See the module."""

    def __init__(self) -> None:
        self.root = Bell(name="notices", stylesheets=[PANEL])  # type: ignore[no-untyped-call]

    def update(self, view: JobView, *, is_over: bool = False) -> None:
        """`is_over`: nothing will happen any more."""
        self.root.visible = not is_over
        self.root.news = json.dumps(news_of(view))


class Bell(pn.custom.JSComponent):
    """`news`: JSON of `news_of`."""

    news = param.String()
    _esm = _SCRIPT


def news_of(view: JobView) -> dict[str, Any]:
    """What there is to tell; the same as long as nothing new has happened."""
    word = _WORDS.get(view.phase, "")
    if view.phase is JobPhase.HEALTHY and view.restart_count:
        word = "recovered"
    failure = view.failure.reason if view.failure is not None else ""
    text = f"restart {view.restart_count}, after: {failure}" if word == "recovered" else view.reason
    return {
        "job_id": view.job_id,
        "title": f"{view.job_id} {word}",
        "text": " ".join(text.split())[:TEXT] if word else "",
        "is_told": bool(word),
        "is_bad": view.phase in (JobPhase.FAILED, JobPhase.RECOVERING),
    }


_WORDS: Final = {
    JobPhase.RECOVERING: "failed and is recovering",
    JobPhase.FAILED: "failed",
    JobPhase.SUCCEEDED: "finished",
    JobPhase.STOPPED: "was stopped",
}
