// The playground: chats with the models of this server, kept as trees in the browser's database.
// All that users and models say becomes text nodes: nothing of it is ever taken for HTML.

const LARGEST_SIDE = 2048;
const LARGEST_BYTES = 6e6;
const SHADES = [0.1, 0.5, 1, 2, 4];
const find = (id) => document.getElementById(id);
const [place, thread, composer, text, card] = ["playground", "thread", "composer", "text", "token"].map(find);
const FIELDS = ["n", "temperature", "top_p", "max_tokens", "seed", "top", "system"];

/** Makes an element with properties and children, which may be texts. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- Chats: a node is what somebody said; its parent is what it answers

let chat = newChat();
let pictures = [];
let running = null; // the AbortController of what streams

/** As crypto.randomUUID, which browsers have with HTTPS only. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

function newChat() {
  return { id: newId(), title: "", changed: Date.now(), nodes: {}, leaf: null, fields: {}, numbered: 0 };
}

function add(parent, role, more) {
  const node = { id: `n${chat.numbered++}`, parent, role, text: "", pictures: [], ...more };
  chat.nodes[node.id] = node;
  return node;
}

/** Nodes from the first to the one that is looked at. */
function path(leaf = chat.leaf) {
  const found = [];
  for (let node = chat.nodes[leaf]; node; node = chat.nodes[node.parent]) found.unshift(node);
  return found;
}

function siblings(node) {
  return Object.values(chat.nodes).filter((each) => each.parent === node.parent && each.role === node.role);
}

/** The newest leaf below a node. */
function lastBelow(node) {
  const below = Object.values(chat.nodes).filter((each) => each.parent === node.id);
  if (!below.length) return node.id;
  return lastBelow(below.find((each) => each.id === node.next) || below[below.length - 1]);
}

function look(node) {
  if (chat.nodes[node.parent]) chat.nodes[node.parent].next = node.id;
  chat.leaf = lastBelow(node);
  keep();
  draw();
}

// ---- The browser's database

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("tinsmith-playground", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function stored(mode, work) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("chats", mode);
    const request = work(transaction.objectStore("chats"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

async function keep() {
  if (!Object.keys(chat.nodes).length) return;
  chat.changed = Date.now();
  chat.title = path(chat.leaf)[0]?.text.slice(0, 80) || "A picture";
  for (const name of FIELDS) chat.fields[name] = find(name).value;
  history.replaceState(null, "", `${location.pathname}${location.search}#${chat.id}`);
  try {
    await stored("readwrite", (chats) => chats.put(chat));
  } catch (error) {
    notice(`The chat could not be kept: ${error}`);
  }
  await list();
}

async function list() {
  const all = (await stored("readonly", (chats) => chats.getAll())).sort((a, b) => b.changed - a.changed);
  find("chats").replaceChildren(...all.map((each) => {
    const open = make("button", { type: "button", title: each.title, onclick: () => load(each.id) }, each.title);
    const gone = make("button", { type: "button", className: "delete", title: "Delete", onclick: () => forget(each.id) }, "×");
    gone.setAttribute("aria-label", `Delete ${each.title}`);
    const entry = make("li", {}, open, gone);
    if (each.id === chat.id) entry.setAttribute("aria-current", "true");
    return entry;
  }));
}

async function load(id) {
  const found = await stored("readonly", (chats) => chats.get(id));
  if (!found) return;
  stop();
  chat = found;
  for (const node of Object.values(chat.nodes)) node.running = false;
  for (const name of FIELDS) if (chat.fields[name] !== undefined) find(name).value = chat.fields[name];
  history.replaceState(null, "", `${location.pathname}${location.search}#${chat.id}`);
  draw();
  await list();
}

async function forget(id) {
  await stored("readwrite", (chats) => chats.delete(id));
  if (id === chat.id) begin();
  await list();
}

function begin() {
  stop();
  chat = newChat();
  history.replaceState(null, "", `${location.pathname}${location.search}`);
  draw();
  list();
  text.focus();
}

// ---- Talking

/** The short name of a model, which the page knows unless it is gone. */
function labelOf(name) {
  return [...find("model").options].find((option) => option.value === name)?.text || name;
}

function models() {
  return [find("model").value, find("beside").value].filter((name, at, all) => name && all.indexOf(name) === at);
}

async function send() {
  const said = text.value.trim();
  if (running || (!said && !pictures.length)) return;
  const node = add(chat.leaf, "user", { text: said, pictures });
  if (chat.nodes[node.parent]) chat.nodes[node.parent].next = node.id;
  text.value = "";
  pictures = [];
  drawPictures();
  await answer(node);
}

/** Lets each model answer what a user has said. */
async function answer(said) {
  const count = Math.max(1, Number(find("n").value) || 1);
  const control = running = new AbortController();
  const wanted = models().map((model) => ({ model, nodes: Array.from({ length: count }, () =>
    add(said.id, "assistant", { model, tokens: [], running: true })) }));
  if (wanted.length) {
    chat.leaf = wanted[0].nodes[0].id;
    said.next = chat.leaf;
  }
  draw();
  thread.lastElementChild?.scrollIntoView({ block: "end", behavior: "smooth" });
  await keep();
  await Promise.all(wanted.map(({ model, nodes }) => ask(model, said, nodes, control.signal)));
  if (running === control) running = null;
  drawButtons();
  await keep();
}

function stop() {
  if (running) running.abort();
  running = null;
  drawButtons();
}

function messages(said) {
  const system = find("system").value.trim();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const node of path(said.id)) {
    const parts = node.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    found.push({ role: node.role, content: parts.length ? [...parts, { type: "text", text: node.text }] : node.text });
  }
  return found;
}

function request(model, said, count) {
  const top = Number(find("top").value);
  const asked = { model, messages: messages(said), n: count, logprobs: true, stream: !top };
  if (top) asked.top_logprobs = top;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (find(name).value !== "") asked[name] = Number(find(name).value);
  }
  return asked;
}

async function ask(model, said, nodes, signal) {
  const began = performance.now();
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request(model, said, nodes.length)),
      signal,
    });
    if (!reply.ok) throw new Error(await why(reply));
    const isStream = (reply.headers.get("content-type") || "").startsWith("text/event-stream");
    if (isStream) for await (const event of events(reply.body)) take(event, nodes);
    else take(await reply.json(), nodes);
  } catch (error) {
    for (const node of nodes) if (node.running) node.ended = error.name === "AbortError" ? "stopped" : node.error = error.message;
  }
  for (const node of nodes) {
    node.running = false;
    node.seconds = (performance.now() - began) / 1000;
    redraw(node);
  }
}

async function why(reply) {
  const said = await reply.text();
  try {
    const found = JSON.parse(said);
    return found.error?.message || found.detail || said;
  } catch {
    return said || reply.statusText;
  }
}

/** The events of a stream, which end with [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function take(event, nodes) {
  if (event.error) throw new Error(event.error.message || "the stream broke off");
  for (const choice of event.choices || []) {
    const node = nodes[choice.index];
    if (!node) continue;
    node.text += (choice.delta || choice.message)?.content || "";
    for (const each of choice.logprobs?.content || []) {
      node.tokens.push({ text: each.token, logprob: each.logprob, whole: each.bytes !== null,
        top: (each.top_logprobs || []).map((other) => [other.token, other.logprob]) });
    }
    if (choice.finish_reason) {
      node.ended = choice.finish_reason;
      node.running = false;
    }
    redraw(node);
  }
}

// ---- Drawing

const drawn = new Map(); // the elements of answers
const waiting = new Set();

function redraw(node) {
  if (!waiting.size) requestAnimationFrame(() => {
    for (const each of waiting) if (drawn.has(each.id)) fill(drawn.get(each.id), each);
    waiting.clear();
    drawButtons();
  });
  waiting.add(node);
}

function draw() {
  drawn.clear();
  hideCard();
  thread.replaceChildren(...path().map((node) => (node.role === "user" ? drawSaid(node) : drawAnswers(node))));
  drawButtons();
}

function drawButtons() {
  find("stop").hidden = !running;
  find("send").disabled = Boolean(running) || !find("model").value;
}

function drawSaid(node) {
  const all = siblings(node);
  const at = all.indexOf(node);
  const bubble = make("div", { className: "bubble" }, ...node.pictures.map((src) => make("img", { src, alt: "picture" })), node.text);
  const acts = make("div", { className: "acts" });
  if (all.length > 1) {
    acts.append(
      make("button", { type: "button", disabled: !at, onclick: () => look(all[at - 1]), ariaLabel: "branch before" }, "‹"),
      make("span", {}, `branch ${at + 1} of ${all.length}`),
      make("button", { type: "button", disabled: at + 1 === all.length, onclick: () => look(all[at + 1]), ariaLabel: "branch after" }, "›"),
    );
  }
  acts.append(
    make("button", { type: "button", onclick: () => edit(node, bubble, acts) }, "edit"),
    make("button", { type: "button", onclick: () => { if (!running) answer(node); } }, "answer again"),
  );
  return make("article", { className: "say" }, bubble, acts);
}

/** Lets a message be said in another way, in a branch of its own. */
function edit(node, bubble, acts) {
  const field = make("textarea", { value: node.text, rows: 3 });
  const form = make("form", { className: "bubble" }, field,
    make("button", {}, "Send as a branch"), " ",
    make("button", { type: "button", className: "quiet", onclick: draw }, "Leave it"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const other = add(node.parent, "user", { text: field.value.trim(), pictures: node.pictures });
    if (chat.nodes[node.parent]) chat.nodes[node.parent].next = other.id;
    answer(other);
  });
  bubble.replaceWith(form);
  acts.hidden = true;
  field.focus();
}

function drawAnswers(chosen) {
  const strip = make("div", { className: "answers" });
  for (const node of siblings(chosen)) {
    const element = make("article", { className: "answer" });
    element.dataset.chosen = node === chosen ? "1" : "";
    drawn.set(node.id, element);
    fill(element, node);
    strip.append(element);
  }
  return strip;
}

function fill(element, node) {
  const facts = [node.tokens?.length ? `${node.tokens.length} token${node.tokens.length === 1 ? "" : "s"}` : "", node.seconds && !node.running ? `${node.seconds.toFixed(1)} s` : "",
    node.ended && !["stop", node.error].includes(node.ended) ? node.ended : ""].filter(Boolean).join(" · ");
  element.className = `answer${node.running ? " running" : ""}${element.dataset.chosen ? " chosen" : ""}`;
  const said = make("div", { className: "said-text" });
  if (node.running) said.append(node.text);
  else said.append(...tokenSpans(node));
  const header = make("header", {}, make("span", { title: node.model }, labelOf(node.model)), make("small", {}, facts));
  element.replaceChildren(header, said);
  if (node.error) element.append(make("p", { className: "bad" }, node.error));
  if (!element.dataset.chosen) {
    element.append(make("div", { className: "acts" }, make("button", { type: "button", onclick: () => look(node) }, "continue from this")));
  }
}

/** An answer as its tokens. A character of several tokens stays whole; tokens that are no text are marked. */
function tokenSpans(node) {
  const spans = [];
  let at = 0;
  let begun = [];
  const flush = (end) => {
    if (begun.length) spans.push(span(node.text.slice(at, end) || "\ufffd", begun));
    at = end;
    begun = [];
  };
  for (const token of node.tokens || []) {
    const found = token.whole && token.text ? node.text.indexOf(token.text, at) : -1;
    if (found >= 0 && (begun.length || found === at)) {
      flush(found);
      spans.push(span(token.text, [token]));
      at = found + token.text.length;
    } else if (token.whole) {
      flush(at);
      spans.push(Object.assign(span(token.text, [token]), { hidden: false }));
      spans[spans.length - 1].classList.add("control");
    } else begun.push(token);
  }
  flush(begun.length ? node.text.length : at);
  if (at < node.text.length) spans.push(node.text.slice(at));
  return spans;
}

function span(shown, tokens) {
  const logprob = tokens.reduce((sum, each) => sum + each.logprob, 0);
  const shade = SHADES.filter((edge) => -logprob >= edge).length;
  const element = make("span", { className: `t h${shade}` }, shown);
  element.tokens = tokens;
  return element;
}

function showCard(element) {
  const [token] = element.tokens;
  const share = (logprob) => `${(100 * Math.exp(Math.min(logprob, 0))).toFixed(1)} %`;
  card.replaceChildren(make("div", {}, make("code", {}, visible(element.textContent)), ` ${share(token.logprob)} `,
    make("small", {}, `logprob ${token.logprob.toFixed(3)}`)));
  if (token.top.length) {
    card.append(make("table", {}, ...token.top.map(([other, logprob]) => make("tr", {},
      make("td", {}, make("code", {}, visible(other))), make("td", {}, share(logprob)),
      make("td", {}, make("meter", { min: 0, max: 1, value: Math.exp(Math.min(logprob, 0)) }))))));
  }
  card.hidden = false;
  const box = element.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - card.offsetWidth - 8));
  const below = box.bottom + 6 + card.offsetHeight < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${below ? box.bottom + 6 : box.top - card.offsetHeight - 6}px`;
}

function visible(said) {
  return said.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function hideCard() {
  card.hidden = true;
}

// ---- Pictures

async function addPicture(file) {
  if (!file.type.startsWith("image/")) return notice(`${file.name} is no picture`);
  try {
    pictures.push(await readPicture(file));
    drawPictures();
  } catch (error) {
    notice(`${file.name || "The picture"} cannot be read: ${error.message || error}`);
  }
}

/** A data URI: the file itself, or a PNG of what a model would not take. */
async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const shrink = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (["image/png", "image/jpeg"].includes(file.type) && shrink === 1 && file.size <= LARGEST_BYTES) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const canvas = make("canvas", { width: Math.round(bitmap.width * shrink), height: Math.round(bitmap.height * shrink) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92);
}

function drawPictures() {
  find("pictures").replaceChildren(...pictures.map((src, at) => make("figure", {}, make("img", { src, alt: `picture ${at + 1}` }),
    make("button", { type: "button", ariaLabel: `Remove picture ${at + 1}`, onclick: () => { pictures.splice(at, 1); drawPictures(); } }, "×"))));
}

// ---- What happens

composer.addEventListener("submit", (event) => { event.preventDefault(); send(); });
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { stop(); hideCard(); } });
find("stop").addEventListener("click", stop);
find("new-chat").addEventListener("click", begin);
find("file").addEventListener("change", async (event) => {
  for (const file of event.target.files) await addPicture(file);
  event.target.value = "";
});
document.addEventListener("paste", async (event) => {
  for (const file of event.clipboardData?.files || []) await addPicture(file);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    composer.classList.toggle("over", kind === "dragover");
    if (kind === "drop") for (const file of event.dataTransfer.files) addPicture(file);
  });
}
find("setup").addEventListener("submit", (event) => event.preventDefault());
for (const name of ["model", "beside"]) {
  find(name).addEventListener("change", () => {
    const query = new URLSearchParams(location.search);
    if (find(name).value) query.set(name, find(name).value); else query.delete(name);
    history.replaceState(null, "", `${location.pathname}?${query}${location.hash}`);
    drawButtons();
  });
}
find("shades").addEventListener("change", () => place.classList.toggle("shaded", find("shades").checked));
for (const kind of ["mouseover", "click"]) {
  thread.addEventListener(kind, (event) => { if (event.target.tokens) showCard(event.target); else hideCard(); });
}
thread.addEventListener("mouseleave", hideCard);
document.addEventListener("scroll", hideCard, { passive: true });

draw();
await load(location.hash.slice(1) || "-");
await list();
place.dataset.ready = "1";
