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
