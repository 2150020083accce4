"use strict";
// Keep the parts of a page up to date. The server sends the versions of all parts, then those that
// change. A part of another version is fetched and replaced.
const main = document.querySelector("main[data-events]");
const status = document.getElementById("live");
const wanted = new Map();
const failed = new Map();
const RETRY_MS = 5000;
let source = null;
let busy = false;
let retry = 0;

const find = (name) => main.querySelector(`[data-part="${CSS.escape(name)}"]`);

// Keep what the reader has chosen in a part: ticked boxes, open details, the focus.
const keepChoices = (old, fresh) => {
  const pairs = (selector) => {
    const others = [...fresh.querySelectorAll(selector)];
    return [...old.querySelectorAll(selector)].map((one, i) => [one, others[i]]).filter((p) => p[1]);
  };
  for (const [one, other] of pairs("input[type=checkbox]")) other.checked = one.checked;
  for (const [one, other] of pairs("details")) other.open = one.open;
  return pairs("a, button, input, summary").find(([one]) => one === document.activeElement)?.[1];
};

const replace = async (name) => {
  const response = await fetch(`${main.dataset.parts}/${encodeURIComponent(name)}`);
  if (response.status === 404) {
    if (find(name)?.matches("tr")) find(name).remove();
    else status.textContent = "This run is no longer there.";
    return;
  }
  if (!response.ok) throw new Error(`status ${response.status}`);
  status.textContent = "Live.";
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = document.adoptNode(page.querySelector("[data-part]"));
  const old = find(name);
  if (!old) {
    main.querySelector("[data-list]")?.append(fresh);
    return;
  }
  fresh.hidden ||= old.matches("tr") && old.hidden;
  const focused = keepChoices(old, fresh);
  old.replaceWith(fresh);
  focused?.focus({ preventScroll: true });
};

const refresh = async () => {
  if (busy) return;
  busy = true;
  for (const [name, version] of wanted) {
    wanted.delete(name);
    try {
      if (version === null) find(name)?.remove();
      else if (find(name)?.dataset.version !== version) await replace(name);
    } catch {
      if (!wanted.has(name)) failed.set(name, version);
    }
  }
  busy = false;
  clearTimeout(retry);
  if (failed.size) retry = setTimeout(again, RETRY_MS);
};

// Fetch again what could not be fetched, unless a newer version is known.
const again = () => {
  for (const [name, version] of failed) if (!wanted.has(name)) wanted.set(name, version);
  failed.clear();
  refresh();
};

const connect = () => {
  source = new EventSource(main.dataset.events);
  source.addEventListener("open", () => (status.textContent = "Live."));
  source.addEventListener("parts", (event) => {
    for (const [name, version] of Object.entries(JSON.parse(event.data))) wanted.set(name, version);
    refresh();
  });
  source.addEventListener("error", () => {
    status.textContent = "Not connected; trying again.";
    if (source?.readyState === EventSource.CLOSED) setTimeout(reconnect, RETRY_MS);
  });
};

// Hidden pages hold no connection: browsers open few of them to one server.
const reconnect = () => {
  source?.close();
  source = null;
  if (!document.hidden) connect();
};

if (main) {
  document.addEventListener("visibilitychange", reconnect);
  reconnect();
}
