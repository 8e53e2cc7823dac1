// The slider over steps, and the keys that go to what comes before and after.
"use strict";

for (const slider of document.querySelectorAll("[data-slider]")) {
  const range = slider.querySelector("input");
  const places = slider.querySelector("select");
  const go = (url) => { location.href = url + (url.includes("?") ? "" : location.search); };
  range.addEventListener("input", () => { places.selectedIndex = Number(range.value); });
  range.addEventListener("change", () => go(places.options[Number(range.value)].value));
  places.addEventListener("change", () => go(places.value));
  slider.addEventListener("submit", (event) => event.preventDefault());
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`a[rel="${rel}"][href]`);
  if (link) link.click();
});
