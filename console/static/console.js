// Keep pages live: put what the server sends in place. The overview is sent as a stream of the parts that have changed;
// other pages are loaded again every few seconds. `/` goes to the search.
"use strict";

const AGAIN_MS = 3000;
const PATIENCE_MS = 10_000;

// Make `old` look like `fresh` by changing only what differs, so that focus, selection and tooltips stay. Whether a
// <details> is open is up to the person who looks at it, and text that is being selected is left as it is.
function become(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue && !isSelected(old)) old.nodeValue = fresh.nodeValue;
    return;
  }
  const isByHand = (name) => name === "open" && old.nodeName === "DETAILS";
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !isByHand(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !isByHand(name)) old.setAttribute(name, value);
  }
  becomeInside(old, fresh);
}

// Children that are about a thing stay with it: its button must not become the button of another thing that has come
// before it. Other children are compared in their order.
function becomeInside(old, fresh) {
  const nodes = [...fresh.childNodes], wanted = new Set(nodes.map(thingOf)), known = new Map();
  for (const node of [...old.childNodes]) {
    const thing = thingOf(node);
    if (thing && !wanted.has(thing)) node.remove();
    else if (thing) known.set(thing, [...(known.get(thing) ?? []), node]);
  }
  let place = old.firstChild;
  const removePlace = () => {
    const next = place.nextSibling;
    place.remove();
    place = next;
  };
  for (const node of nodes) {
    const thing = thingOf(node), same = thing ? known.get(thing)?.shift() : nextLike(node, place);
    if (!same) {
      old.insertBefore(node, place);
      continue;
    }
    while (place !== same && !thingOf(place)) removePlace();
    if (place === same) place = place.nextSibling;
    else old.insertBefore(same, place);
    become(same, node);
  }
  while (place) removePlace();
}

// What an element is about: its id, its heading, or the first link of a row.
function thingOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return "";
  const isRow = node.nodeName === "TR" || node.nodeName === "LI";
  return node.id || node.getAttribute("aria-labelledby") || (isRow && node.querySelector("a")?.getAttribute("href")) || "";
}

function nextLike(node, place) {
  if (node.nodeType !== Node.ELEMENT_NODE) return place?.nodeType === node.nodeType ? place : null;
  while (place && (place.nodeName !== node.nodeName || thingOf(place))) place = place.nextSibling;
  return place;
}

function isSelected(node) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(node, true);
}

// Moving an element takes the focus from it.
function keepFocus(change) {
  const active = document.activeElement;
  change();
  if (active !== document.activeElement && active.isConnected) active.focus({ preventScroll: true });
}

function follow(page) {
  let source = null, timer = 0;
  const lost = page.querySelector(".lost");

  function mark(isLost) {
    page.classList.toggle("stale", isLost);
    lost.hidden = !isLost;
  }

  function close() {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  }

  function open() {
    close();
    source = new EventSource(page.dataset.stream);
    source.onmessage = ({ data }) => {
      mark(false);
      for (const [name, html] of Object.entries(JSON.parse(data))) {
        const fresh = document.createElement("template");
        fresh.innerHTML = html;
        keepFocus(() => becomeInside(page.querySelector(`[data-part="${name}"]`), fresh.content));
      }
    };
    source.addEventListener("leave", () => location.reload());
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(open, AGAIN_MS);
      // A stream that ends is opened again at once; only one that cannot be opened is worth a word.
      setTimeout(() => source && mark(source.readyState !== EventSource.OPEN), AGAIN_MS);
    };
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", () => document.hidden || open());
}

// Load a page again every few seconds while it is visible, unless a form is being filled in.
function refresh(page) {
  const milliseconds = 1000 * Number(page.dataset.refresh);
  const main = page.closest("main");

  function isBeingFilledIn() {
    const active = document.activeElement;
    if (main.contains(active) && active.matches("input, select, textarea")) return true;
    return [...main.querySelectorAll("input, textarea")].some((each) =>
      each.matches("[type=checkbox], [type=radio]")
        ? each.checked !== each.defaultChecked // a box without a value has the value "on" and no default
        : each.value !== each.defaultValue,
    );
  }

  const old = document.createElement("p");
  old.className = "card said refused";
  old.setAttribute("role", "status");
  old.textContent = "The server does not answer, so this page is not up to date. Trying again …";

  function mark(isOld) {
    page.classList.toggle("stale", isOld);
    if (!isOld) old.remove();
    else if (!old.isConnected) page.before(old);
  }

  async function look() {
    try {
      if (document.hidden || isBeingFilledIn()) return;
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const response = await fetch(location.href, { headers: { Accept: "text/html", "X-Refresh": "1" }, signal });
      if (response.redirected || response.status === 403 || response.status === 404) return location.reload();
      if (!response.ok) return mark(true);
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html").querySelector("[data-refresh]");
      mark(false);
      if (fresh && !isBeingFilledIn()) keepFocus(() => become(page, fresh));
    } catch {
      mark(true); // the server does not answer; the next look may succeed
    } finally {
      setTimeout(look, milliseconds);
    }
  }

  setTimeout(look, milliseconds);
}

// A double click on a button must not do what it does twice. After a while the form may be sent again: nothing came back.
addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method !== "post") return;
  if (form.dataset.sent) return event.preventDefault();
  form.dataset.sent = "true";
  setTimeout(() => delete form.dataset.sent, PATIENCE_MS);
});

addEventListener("keydown", (event) => {
  const search = document.querySelector("[data-search]");
  if (event.key !== "/" || !search || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  search.select();
});

if (document.querySelector("[data-code]")) history.replaceState(null, "", location.pathname);
const page = document.querySelector("[data-stream]");
if (page) follow(page);
const refreshed = document.querySelector("[data-refresh]");
if (refreshed) refresh(refreshed);
