// Behaviour of all pages of the console. No page needs it to be read.
"use strict";

/** Shows a sentence for some seconds. */
function notice(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => { place.hidden = true; }, 8000);
}

document.addEventListener("htmx:responseError", (event) => {
  let told = event.detail.xhr.statusText;
  try { told = JSON.parse(event.detail.xhr.responseText).detail || told; } catch { /* not JSON */ }
  notice(told);
});

// Keys: g then o, r, p ... goes to a page of the head; / goes to the first field
const pages = new Map([...document.querySelectorAll(".top nav a")].map((a) => [a.textContent[0].toLowerCase(), a]));
let going = false;
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (going && pages.has(event.key)) pages.get(event.key).click();
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
    await navigator.clipboard.writeText(button.dataset.copy);
    notice(`Copied: ${button.dataset.copy}`);
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
