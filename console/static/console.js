// Keep the overview live: put the parts that the server sends in place. Nothing else is done in the browser.
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
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
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

if (document.querySelector("[data-code]")) history.replaceState(null, "", location.pathname);
const page = document.querySelector("[data-stream]");
if (page) follow(page);
