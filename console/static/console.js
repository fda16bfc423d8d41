// Keep pages live: put what the server sends in place. The overview is sent as a stream of the parts that have changed;
// other pages are loaded again every few seconds. `/` goes to the search.
"use strict";

const AGAIN_MS = 3000;

// Make `old` look like `fresh` by changing only what differs, so that focus, selection and tooltips stay.
function become(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    const isOpenedByHand = name === "open" && old.nodeName === "DETAILS";
    if (!fresh.hasAttribute(name) && !isOpenedByHand) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  becomeInside(old, fresh);
}

function becomeInside(old, fresh) {
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, place) => (place < before.length ? become(before[place], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
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
        becomeInside(page.querySelector(`[data-part="${name}"]`), fresh.content);
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

  async function look() {
    try {
      if (document.hidden || isBeingFilledIn()) return;
      const response = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (response.redirected) return location.reload();
      if (!response.ok) return;
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html").querySelector("[data-refresh]");
      if (fresh && !isBeingFilledIn()) become(page, fresh);
    } catch {
      // The server does not answer; the next look may succeed.
    } finally {
      setTimeout(look, milliseconds);
    }
  }

  setTimeout(look, milliseconds);
}

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
