// Behaviour of all pages of the console. No page needs it to be read.
"use strict";

/** Shows a sentence for some seconds, or until another one or `unnotice`. */
function notice(text, stays = false) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(notice.timer);
  notice.stays = stays;
  if (!stays) notice.timer = setTimeout(() => { place.hidden = true; }, 8000);
}

/** Hides a sentence that stays. */
function unnotice() {
  if (notice.stays) document.getElementById("notice").hidden = true;
  notice.stays = false;
}

document.addEventListener("htmx:responseError", (event) => {
  let told = event.detail.xhr.statusText;
  try { told = JSON.parse(event.detail.xhr.responseText).detail || told; } catch { /* not JSON */ }
  notice(told);
});

// A browser has six connections to a server for all its pages. So a hidden page closes its stream of changes, and so does the
// one that was opened first where more are shown.
const MOST_STREAMS = 3;
const neighbours = new BroadcastChannel("tinsmith-streams");

class Stream {
  constructor(url) {
    Object.assign(this, { url, id: Math.random(), source: null, newer: new Set(), listeners: [], onopen: null, onerror: null });
    this.ended = new AbortController();
    const { signal } = this.ended;
    document.addEventListener("visibilitychange", () => (document.visibilityState === "hidden" ? this.pause() : this.open()), { signal });
    for (const name of ["focus", "pageshow", "pointerdown"]) addEventListener(name, () => this.open(), { signal });
    addEventListener("pagehide", () => this.pause(), { signal });
    neighbours.addEventListener("message", ({ data }) => this.hear(data), { signal });
    this.open();
  }

  get readyState() {
    if (this.ended.signal.aborted) return EventSource.CLOSED;
    return this.source ? this.source.readyState : EventSource.CONNECTING;
  }

  open() {
    if (this.source || document.visibilityState === "hidden") return;
    const source = this.source = new EventSource(this.url);
    source.onopen = (event) => this.onopen?.(event);
    source.onerror = (event) => {
      if (source.readyState === EventSource.CLOSED) this.close(); // refused: htmx asks for another one
      this.onerror?.(event);
    };
    for (const [name, listener] of this.listeners) source.addEventListener(name, listener);
    source.addEventListener("trouble", ({ data }) => (data ? notice(data, true) : unnotice()));
    this.newer.clear();
    neighbours.postMessage({ opened: this.id });
    unnotice();
    document.documentElement.dataset.stream = "open";
  }

  pause() {
    if (!this.source) return;
    this.source.close();
    this.source = null;
    neighbours.postMessage({ closed: this.id });
    document.documentElement.dataset.stream = "paused";
  }

  hear({ opened, closed }) {
    this.newer.delete(closed);
    if (!this.source || !opened) return;
    this.newer.add(opened);
    if (this.newer.size < MOST_STREAMS) return;
    this.pause();
    notice("Many pages of this server are open: this one changes again when you click on it.", true);
  }

  close() {
    this.pause();
    this.ended.abort();
  }

  addEventListener(name, listener) {
    this.listeners.push([name, listener]);
    this.source?.addEventListener(name, listener);
  }

  removeEventListener(name, listener) {
    this.listeners = this.listeners.filter((each) => each[0] !== name || each[1] !== listener);
    this.source?.removeEventListener(name, listener);
  }
}

htmx.createEventSource = (url) => new Stream(url);

// What somebody has marked stays marked when a part of the page changes
let marked = [];
document.addEventListener("htmx:sseBeforeMessage", ({ target }) => {
  marked = [...target.querySelectorAll("input:checked")].map((box) => box.value);
});
document.addEventListener("htmx:sseMessage", ({ target }) => {
  for (const box of target.querySelectorAll("input[type=checkbox]")) box.checked = marked.includes(box.value);
});

// Keys: g then p, s ... goes to a page of the head, to the next one with that letter; / goes to the first field
const pages = [...document.querySelectorAll(".top nav a")];
function nextPage(letter) {
  const found = pages.filter((page) => page.textContent[0].toLowerCase() === letter);
  return found[(found.findIndex((page) => page.hasAttribute("aria-current")) + 1) % found.length];
}
let going = false;
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (going) nextPage(event.key)?.click();
  going = event.key === "g";
  const field = event.key === "/" && document.querySelector("main input:not([type=hidden])");
  if (field) { event.preventDefault(); field.focus(); }
});

// Forms that need no button
document.addEventListener("change", (event) => event.target.closest("form[data-submits]")?.requestSubmit());

async function asked(place, options) {
  const reply = await fetch(place, options);
  const told = await reply.json();
  if (!reply.ok) throw new Error(told.detail);
  return told;
}

const actions = {
  async copy(button) {
    const copied = button.dataset.copy;
    if (!navigator.clipboard) return void prompt("Without HTTPS, browsers let pages copy nothing. Copy it here:", copied);
    await navigator.clipboard.writeText(copied);
    notice(`Copied: ${copied}`);
  },
  async ttl(button) {
    const days = prompt("Days from now after which it expires; empty: never", "30");
    if (days === null) return;
    const ttl_seconds = days.trim() ? Math.round(Number(days) * 86400) : null;
    await asked(button.dataset.ttl, { method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ttl_seconds }) });
    notice(ttl_seconds === null ? "It stays until it is deleted." : `It expires in ${days} days.`);
  },
  async downloads(button) {
    const { urls } = await asked(button.dataset.downloads);
    for (const url of Object.values(urls)) {
      const link = document.createElement("a");
      link.href = url;
      link.download = "";
      link.click();
    }
  },
};

document.addEventListener("click", (event) => {
  for (const [name, act] of Object.entries(actions)) {
    const button = event.target.closest(`[data-${name}]`);
    if (button) act(button).catch((error) => notice(error.message));
  }
});
